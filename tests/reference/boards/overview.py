"""The dashboard to look at first: are requests served, how fast, and what is refused."""

from __future__ import annotations

from pdproxy.app.gauges import CONNECTIONS, STATE
from pdproxy.app.heartbeat import LOOP_LATENESS
from pdproxy.deciding.local_admission import INFLIGHT, PLACES, QUEUE
from pdproxy.fleet.gauges import NODE_UP
from pdproxy.observe.events import DEADLINES
from pdproxy.observe.prompt_shares import PROMPT_TOKENS
from pdproxy.observe.requests import ITL, PHASE, REFUSALS, REQUESTS, TOKENS, TTFT
from pdproxy.web.refusals import EARLY_REFUSALS
from tests.reference.panels import OF_BOARD as OF
from tests.reference.panels import Board, Kind, Panel
from tests.reference.promql import of_process

FAILED = {"outcome": ("engine", "ours", "capacity")}
SERVICE = [
    Panel(
        "State of the proxies",
        "How many proxies are in each state of GET /ready. ok: requests are served, and prompts "
        "can be split. degraded: no prompt can be split. not_ready: nothing is served. A part of a "
        "proxy: only some of its workers see it so.",
        [(OF.now(STATE).sum("state"), "{state}")],
        Kind.NUMBERS,
    ),
    Panel(
        "Engines that can be used",
        "Engines of each role that get requests. Where several proxies differ about an engine, the "
        "proxy counts that can not use it.",
        [(OF.now(NODE_UP).min("node", "role").sum("role"), "{role}")],
        Kind.NUMBERS,
    ),
    Panel(
        "Requests that fail",
        "The part of the requests that did not get their answer: an engine failed, pdproxy has a "
        "defect, or there was no place for them. What clients did wrong, and clients that left, do "
        "not count.",
        [(OF.rate(REQUESTS, FAILED).sum().over(OF.rate(REQUESTS).sum()), "failed")],
        Kind.NUMBERS,
    ),
    Panel(
        "Requests by outcome",
        "Requests that have ended. engine: an engine failed or was too late. capacity: no place or "
        "no engine. ours: a defect of pdproxy. client: the request was wrong. client_left: the "
        "client closed its connection.",
        [(OF.rate(REQUESTS).sum("outcome"), "{outcome}")],
        Kind.STACK,
    ),
    Panel(
        "Tokens",
        "Tokens of the requests that have ended.",
        [(OF.rate(TOKENS).sum("kind"), "{kind}")],
    ),
    Panel(
        "How prompts are served",
        "Prompt tokens. split: by a prefill and a decode engine. beside_idle: by a decode engine "
        "alone, while a prefill engine had no request. alone: by one engine in all other cases.",
        [(OF.rate(PROMPT_TOKENS).sum("served"), "{served}")],
        Kind.STACK,
    ),
]
LATENCY = [
    Panel(
        "Time to first token",
        "From the complete body of a request with a stream to the first data that was sent.",
        [(OF.quantile(part, TTFT), f"p{part * 100:g}") for part in (0.5, 0.95, 0.99)],
    ),
    Panel(
        "Time between tokens",
        "Between two events of a stream. Events that come in one read have none between them.",
        [(OF.quantile(part, ITL), f"p{part * 100:g}") for part in (0.5, 0.95, 0.99)],
    ),
    Panel(
        "Time of whole requests",
        "From the complete body of a request to the end of its answer.",
        [
            (OF.quantile(part, PHASE, where={"phase": "total"}), f"p{part * 100:g}")
            for part in (0.5, 0.95, 0.99)
        ],
    ),
]
REFUSED = [
    Panel(
        "Requests in the proxies",
        "Requests that are served, requests that wait for a place, and how many may be served at "
        "once.",
        [
            (OF.now(INFLIGHT).sum(), "served"),
            (OF.now(QUEUE).sum(), "waiting"),
            (OF.now(PLACES).sum(), "places"),
        ],
    ),
    Panel(
        "Refused now",
        "Requests that were refused and may succeed later, by the reason in the error's body.",
        [(OF.rate(REFUSALS).sum("reason"), "{reason}")],
        Kind.STACK,
    ),
    Panel(
        "Refused before the body was complete",
        "Wrong keys, bodies and heads that are too large or too slow, too many connections. These "
        "are in no other panel.",
        [(OF.rate(EARLY_REFUSALS).sum("reason"), "{reason}")],
        Kind.STACK,
    ),
    Panel(
        "Waits that ended by their deadline",
        "By the setting of section deadlines that ended the wait.",
        [(OF.rate(DEADLINES).sum("wait"), "{wait}")],
        Kind.STACK,
    ),
]
PROCESS = [
    Panel(
        "Processor time",
        "The part of one core that a proxy uses, all its processes together. One process near "
        "100 % is the bottleneck: use several workers.",
        [(OF.rate(of_process("process_cpu_seconds_total")), "{instance}")],
    ),
    Panel(
        "Delay of the event loop",
        "By how much a timer was late. What holds up the event loop delays all requests.",
        [(OF.quantile(0.99, LOOP_LATENESS, "instance"), "p99 {instance}")],
    ),
    Panel(
        "Memory",
        "Resident memory of a proxy, all its processes together.",
        [(OF.now(of_process("process_resident_memory_bytes")), "{instance}")],
    ),
    Panel(
        "Connections of clients",
        "Open connections, also those that are being refused.",
        [(OF.now(CONNECTIONS).sum("instance"), "{instance}")],
    ),
    Panel(
        "Open files",
        "The part of the files that a proxy may have open. At 100 % it refuses connections.",
        [
            (
                OF.now(of_process("process_open_fds")).over(OF.now(of_process("process_max_fds"))),
                "{instance}",
            )
        ],
    ),
]
BOARD = Board(
    "overview",
    "overview",
    "Are requests served, how fast, and what is refused. The other dashboards go into details.",
    [
        ("Service", SERVICE),
        ("Times that clients see", LATENCY),
        ("Waiting and refused", REFUSED),
        ("The proxies' processes", PROCESS),
    ],
)
