"""The metrics of a request's end, which `observe.metrics` counts: outcomes, refusals, tokens,
times; and of legs that failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pdproxy.kit.errors import Fault, RefusalReason
from pdproxy.observe.description import NODE, Label, counter, histogram
from pdproxy.observe.events import ITL_BOUNDS, LegFailed, LegTimes, Refused

if TYPE_CHECKING:
    from pdproxy.observe.recent import RecentPrompt

OUTCOMES = (
    ("ok", "answered"),
    (Fault.CLIENT.value, "the request was refused: it is wrong, or it has no valid key"),
    (Fault.ENGINE.value, "an engine failed, was too late, or sent invalid data"),
    (Fault.CAPACITY.value, "no place, no engine, or shutting down"),
    (Fault.OURS.value, "a defect of pdproxy"),
    (Fault.CLIENT_LEFT.value, "the client closed its connection before the end"),
)
PHASES = (
    ("queue", "from a request's complete body to its place (limits.max_inflight)"),
    ("encode", "a prompt's media: from asking encoder engines to their last answer"),
    ("prefill", "a prompt: the prefill leg, from its start to its answer"),
    (
        "kv",
        (
            "a split prompt's stream: from asking the decode engine to its first data: the KV "
            "transfer and one step"
        ),
    ),
    ("decode", "a prompt's stream: from the engine's first data to its end"),
    (
        "decode_whole",
        (
            "a split prompt's answer that is not streamed: the decode leg: KV transfer and decode, "
            "not known apart"
        ),
    ),
    (
        "alone",
        "a stream of one engine alone: from asking it to its first data: its own queue and prefill",
    ),
    ("alone_whole", "an answer of one engine alone that is not streamed: its whole leg"),
    ("total", "from a request's complete body to its end"),
)
LEG_PHASES = PHASES[1:-1]
FAILED_LEGS = (
    ("encode", "a leg that has media encoded"),
    ("prefill", "the prefill leg"),
    ("decode", "the leg that answers, also of an engine that serves alone"),
    ("alone", "a leg of a route that one engine always serves alone"),
)
_ROLE_PHASES = {
    "encode": ("encode",),
    "prefill": ("prefill",),
    "decode": ("kv", "decode", "decode_whole", "alone", "alone_whole"),
    "aggregated": ("decode", "alone", "alone_whole"),
    "any": ("prefill", "kv", "decode", "decode_whole", "alone", "alone_whole"),
}
_PATH = Label("path", (("split", "prefill and decode by two engines"), ("alone", "one engine")))
_OURS, _CLIENTS = "503", "429"
REASONS = (
    (
        RefusalReason.KEY_REQUESTS,
        _CLIENTS,
        "its key has sent as many requests as it may per minute (rpm)",
    ),
    (
        RefusalReason.KEY_TOKENS,
        _CLIENTS,
        "its key has too few tokens left of those that it may use per minute (tpm)",
    ),
    (
        RefusalReason.KEY_INFLIGHT,
        _CLIENTS,
        "as many requests of its key are being served as may be (inflight)",
    ),
    (RefusalReason.WRONG_KEYS, _CLIENTS, "its address has sent too many wrong keys"),
    (
        RefusalReason.SHARE,
        _CLIENTS,
        "the queue was full, and its client had the most requests in it",
    ),
    (RefusalReason.QUEUE_FULL, _OURS, "limits.max_queue requests wait"),
    (RefusalReason.QUEUE_TIMEOUT, _OURS, "no place came free in deadlines.queue"),
    (RefusalReason.DEADLINE, _OURS, "it can't be served within its X-Request-Timeout"),
    (
        RefusalReason.CAPACITY,
        _OURS,
        "no decode engine had space for the prompt's KV in deadlines.queue",
    ),
    (
        RefusalReason.RETRY_BUDGET,
        _OURS,
        "its engine has failed, and no place to try it again came free in deadlines.retry",
    ),
    (RefusalReason.OBJECTIVE, _OURS, "no engine can serve it in time (policy.refuse_late)"),
    (RefusalReason.NO_ENGINE, _OURS, "no engine that can serve it is up"),
    (
        RefusalReason.ALONE,
        _OURS,
        "it can't be split, and pools[].alone lets no decode engine serve it whole",
    ),
    (RefusalReason.ENGINES_LOST, _OURS, "engines disappeared under it, and it may be the cause"),
    (RefusalReason.DRAINING, _OURS, "pdproxy is shutting down"),
    (RefusalReason.BODIES, _OURS, "no space for the body: limits.max_buffered_bytes"),
    (
        RefusalReason.READERS,
        _OURS,
        "too many large bodies are being read, or it was not read in deadlines.read_body",
    ),
    (
        RefusalReason.ANSWERS,
        _OURS,
        "no space for an engine's answer: limits.max_buffered_answer_bytes",
    ),
    (
        RefusalReason.SLOW_READER,
        _OURS,
        "its client reads too slowly and holds more than its share, while others wait",
    ),
    (RefusalReason.CONNECTIONS, _OURS, "limits.max_connections are open"),
    (RefusalReason.OPEN_FILES, _OURS, "the process may open no more files (ulimit -n)"),
)
"""Each reason with its status and its meaning."""
_NO_WAIT = 0.0005
"""Seconds. Whoever has token ids in less has not waited for them."""
STATUS_OF = {reason.value: status for reason, status, _ in REASONS}
MODEL = Label(
    "model", text='a model that an engine lists and that was served; else "other"', most=100
)
TENANT = Label(
    "tenant",
    text='a name of the file of keys or of overload.weights; "other" for other names in '
    "overload.tenant_header",
    most=1000,
)
REQUESTS = counter(
    "pdproxy_requests_total",
    "requests",
    "Requests of engines' routes that have ended, however: also those with a wrong key, and "
    "those that no engine was asked for. "
    "What was refused before its body was complete is in pdproxy_early_refusals_total only",
    MODEL,
    Label("endpoint", text="the route's path"),
    Label("outcome", OUTCOMES),
)
LEG_FAILURES = counter(
    "pdproxy_leg_failures_total",
    "legs",
    "Legs that failed, also in the middle of a stream; an engine that refuses what is wrong with "
    "the request has not failed",
    NODE,
    Label("phase", FAILED_LEGS),
    of=LegFailed,
)
NODE_LEGS = counter(
    "pdproxy_node_legs_total",
    "legs",
    "Measured phases of legs: by pdproxy_node_leg_seconds_total, the mean time of each engine",
    NODE,
    Label("phase", LEG_PHASES),
)
NODE_SECONDS = counter(
    "pdproxy_node_leg_seconds_total",
    "seconds",
    "Seconds of the phases of legs, summed up for each engine; phases as in pdproxy_phase_seconds",
    NODE,
    Label("phase", LEG_PHASES),
)
TOKENS = counter(
    "pdproxy_tokens_total",
    "tokens",
    "Tokens of requests that have ended, as engines reported them on any route; without a report "
    "what is known: the prompt by "
    "the prefill engine or by its bytes, the answer by the token ids or the events that were seen",
    Label("kind", (("prompt", "tokens of prompts"), ("completion", "generated tokens"))),
)
TENANT_TOKENS = counter(
    "pdproxy_tenant_tokens_total",
    "tokens",
    "Tokens of prompts and answers by tenant, of requests that have ended: counted as "
    "pdproxy_tokens_total",
    TENANT,
)
REFUSALS = counter(
    "pdproxy_refusals_total",
    "refusals",
    "Requests and connections that were refused now and may succeed later, by the reason in the "
    "error's body",
    Label("reason", tuple((reason.value, text) for reason, _, text in REASONS)),
    Label(
        "status", ((_CLIENTS, "the client's own limit or share"), (_OURS, "what all clients share"))
    ),
    together=tuple(STATUS_OF.items()),
    of=Refused,
    counts=lambda event: (
        [] if event.overload is None else [((event.overload, STATUS_OF[event.overload]), 1)]
    ),
)
TTFT = histogram(
    "pdproxy_ttft_seconds",
    "Seconds from the complete body of a request with a stream to the first data that was sent. "
    "Answers that are not streamed "
    "do not count",
    _PATH,
)
OVERLAP = histogram(
    "pdproxy_legs_overlap_seconds",
    "Seconds in which both engines of a prompt had been asked and the prefill engine had not "
    "answered yet (connectors whose "
    "legs run at once)",
)
ITL = histogram(
    "pdproxy_itl_seconds",
    "Seconds between the events of a stream; events that come in one read have none between them",
    bounds=ITL_BOUNDS,
)
PHASE = histogram(
    "pdproxy_phase_seconds",
    "Seconds of each phase: queue and total once per request, the others once per prompt, of its "
    "last attempt",
    Label("phase", PHASES),
)


def phases_of_prompt(
    times: LegTimes | RecentPrompt,
) -> Iterator[tuple[str, str | None, float]]:
    """Yield the phases that a prompt has had, one behind the other: name, engine and seconds.

    The names are those of `PHASES`; `tokenize`: it waited for its token ids.
    """
    is_split = times.prefill is not None
    first, whole = ("kv", "decode_whole") if is_split else ("alone", "alone_whole")
    for name, engine, seconds in (
        ("tokenize", None, times.tokenize_s),
        ("encode", None, times.encode_s),
        ("prefill", times.prefill, times.prefill_s),
        (first, times.decode, times.first_s),
        ("decode", times.decode, times.decode_s),
        (whole, times.decode, times.whole_s),
    ):
        if seconds is not None and (seconds >= _NO_WAIT or name != "tokenize"):
            yield name, engine, seconds


def failed_legs_of(role: str) -> tuple[str, ...]:
    """Return the legs of an engine that can fail, by its role, as in `FAILED_LEGS`."""
    prefills = ("prefill",) if role in ("prefill", "any") else ()
    answers = () if role in ("encode", "prefill") else ("decode", "alone")
    return ("encode",) if role == "encode" else (*prefills, *answers)


def phases_of(role: str) -> tuple[str, ...]:
    """Return the phases of an engine's legs by its role."""
    return _ROLE_PHASES.get(role, ())
