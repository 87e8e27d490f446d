"""The dashboard of where a request spends its time: queue, token ids, prefill, KV, decode."""

from __future__ import annotations

from pdproxy.deciding.comebacks import WAITING_FOR_ENGINES
from pdproxy.deciding.local_admission import QUEUE
from pdproxy.deciding.local_scheduler import WAITING_LATE
from pdproxy.deciding.retry_budget import RETRIES
from pdproxy.observe.description import Description
from pdproxy.observe.events import DEADLINES, ENCODED_MEDIA
from pdproxy.observe.requests import OVERLAP, PHASE
from pdproxy.serving.dispatch.following import CONTINUATION_SECONDS, CONTINUATIONS
from pdproxy.serving.dispatch.tokenizing import TOKENIZE, TOKENIZED
from pdproxy.serving.kv.ready import KV_READY_WAIT
from pdproxy.serving.request.body_reader import BODY_READERS
from tests.reference.panels import OF_BOARD as OF
from tests.reference.panels import Board, Kind, Panel
from tests.reference.promql import Query, Where

_BODY_WAITS = {"state": "awaited"}


def _quantiles(metric: Description, where: Where | None = None) -> list[tuple[Query, str]]:
    return [
        (OF.quantile(part, metric, where=where), f"p{part * 100:g}") for part in (0.5, 0.95, 0.99)
    ]


def _phase(title: str, phase: str, text: str, needs: str = "") -> Panel:
    return Panel(title, text, _quantiles(PHASE, {"phase": phase}), needs=needs)


WHERE = [
    Panel(
        "Mean time of each phase",
        "The phases of a prompt's last attempt follow each other: queue, prefill, kv, decode for a "
        "stream; queue, prefill, decode_whole for another answer; alone and alone_whole where one "
        "engine serves. What is missing in total went to attempts that failed, token ids, or the "
        "proxy.",
        [(OF.mean(PHASE, "phase"), "{phase}")],
        width=12,
    ),
    Panel(
        "How many of each phase",
        "queue and total are measured once per request, the others once per prompt.",
        [(OF.observed(PHASE, "phases").sum("phase"), "{phase}")],
        width=12,
    ),
]
BEFORE = [
    _phase(
        "Queue",
        "queue",
        "From a request's complete body to its place. Long: all places are taken "
        "(limits.max_inflight, and what the engines can take).",
    ),
    Panel(
        "Requests that wait now",
        "For a place; for an engine that stands still, since no other can serve them; because no "
        "engine can begin them in time; for being tried again behind too many others; and large "
        "bodies that wait for a process that reads them.",
        [
            (OF.now(QUEUE).sum(), "for a place"),
            (OF.now(WAITING_FOR_ENGINES).sum().counting("requests"), "for an engine"),
            (OF.now(WAITING_LATE).sum().counting("requests"), "late"),
            (OF.now(RETRIES, {"state": "waiting"}).sum(), "to be tried again"),
            (OF.now(BODY_READERS, _BODY_WAITS).sum().counting("requests"), "for being read"),
        ],
    ),
    Panel(
        "Token ids",
        "Time to get the token ids of a prompt before an engine gets it. here: in the proxy. "
        "engine: by an engine's /tokenize.",
        [(OF.quantile(0.95, TOKENIZE, "source"), "p95 {source}")],
        needs="token ids that are made before an engine gets the prompt (tokenize, or a connector "
        "that needs them)",
    ),
    Panel(
        "What became of token ids",
        "ok: made. All others: the prompt goes on as text, or its request ends with an error. "
        "Stays 0 while no token ids are made before an engine gets the prompt (tokenize).",
        [(OF.rate(TOKENIZED).sum("source", "result"), "{source} {result}")],
        Kind.STACK,
    ),
    _phase(
        "Encoder engines",
        "encode",
        "From asking encoder engines for a prompt's media to the last of their answers.",
        needs="encoder engines (role encode)",
    ),
    Panel(
        "Media",
        "What came of the encoder stage for each picture, sound or video. Stays 0 without encoder "
        "engines (role encode).",
        [(OF.rate(ENCODED_MEDIA).sum("result"), "{result}")],
        Kind.STACK,
    ),
]
SPLIT = [
    _phase(
        "Prefill",
        "prefill",
        "From asking the prefill engine to its answer: its queue and the prompt's computation.",
    ),
    _phase(
        "KV",
        "kv",
        "From asking the decode engine for a stream to its first data: its queue, the KV transfer "
        "and one step.",
    ),
    _phase("Decode", "decode", "From the first data of a stream to its end."),
    Panel(
        "Waiting for notices that KV is ready",
        "From the prefill's answer to the last notice that its KV is ready.",
        [(OF.quantile(0.95, KV_READY_WAIT, "result"), "p95 {result}")],
        needs="notices (a connector with kv_ready, such as LMCache's PD mode)",
    ),
    Panel(
        "Both engines at work at once",
        "How long both engines of a prompt had been asked and the prefill engine had not answered.",
        _quantiles(OVERLAP),
        needs="a connector whose legs run at once, such as nixl-push or mooncake",
    ),
    _phase(
        "Decode of answers that are not streamed",
        "decode_whole",
        "From asking the decode engine to its answer: KV transfer and decode, not known apart.",
        needs="split requests without stream",
    ),
]
ALONE = [
    _phase(
        "One engine alone, stream",
        "alone",
        "From asking the engine to its first data: its own queue and prefill.",
        needs="streams that one engine serves alone",
    ),
    _phase(
        "One engine alone, whole answer",
        "alone_whole",
        "From asking the engine to its answer.",
        needs="answers that one engine serves alone and that are not streamed",
    ),
    Panel(
        "Waits that ended by their deadline",
        "By the setting of section deadlines that ended the wait.",
        [(OF.rate(DEADLINES).sum("wait"), "{wait}")],
        Kind.STACK,
    ),
    Panel(
        "Streams whose engine failed",
        "continued: another engine goes on. finished: only the end was missing. refused and "
        "failed: the stream ended with an error.",
        [(OF.rate(CONTINUATIONS).sum("result"), "{result}")],
        Kind.STACK,
    ),
    Panel(
        "Pauses of streams that go on",
        "From the failure of a stream's engine to the first data of the engine that goes on.",
        _quantiles(CONTINUATION_SECONDS),
        needs="streams whose engine has failed",
    ),
]
BOARD = Board(
    "phases",
    "phases of requests",
    "Where requests spend their time, phase by phase.",
    [
        ("All phases", WHERE),
        ("Before the engines", BEFORE),
        ("Prompts that are split", SPLIT),
        ("Prompts that one engine serves, and failures", ALONE),
    ],
)
