"""The dashboard of the engines: which can be used, which are slow, which fail."""

from __future__ import annotations

from pdproxy.app.capacity import CAPACITY
from pdproxy.app.sources import METRICS
from pdproxy.deciding.engines_lost import ENGINES_LOST
from pdproxy.fleet.exclusions import EXCLUSIONS
from pdproxy.fleet.gauges import NODE_INFLIGHT, NODE_INFO, NODE_STATE, NODE_UP, REVISION_SHARE
from pdproxy.fleet.membership import MEMBER_CHANGES
from pdproxy.fleet.stalls import CANARIES, STALLS
from pdproxy.observe.requests import LEG_FAILURES, NODE_LEGS, NODE_SECONDS
from tests.reference.panels import OF_BOARD as OF
from tests.reference.panels import Board, Kind, Panel

_NOT_SERVING = ("down", "draining", "stalled", "asleep", "excluded", "half_open", "kv_failing")
_, _SOURCE_ENGINES, _SOURCE_AGE = METRICS[None]


def _time(title: str, phase: str, text: str, needs: str = "") -> Panel:
    where = {"phase": phase}
    seconds, legs = (OF.rate(one, where).sum("node") for one in (NODE_SECONDS, NODE_LEGS))
    return Panel(title, text, [(seconds.over(legs, unit="seconds"), "{node}")], needs=needs)


STATES = [
    Panel(
        "Engines and their states",
        "Each engine as each proxy sees it. GET /ready says why an engine is not up.",
        [
            (
                OF.now(NODE_STATE)
                .equal(1)
                .joined(OF.now(NODE_INFO), ("instance", "node"), "role", "pool", "engine_pod"),
                "",
            )
        ],
        Kind.TABLE,
        width=12,
    ),
    Panel(
        "Engines that do not serve as usual",
        "How many engines are in each state other than up, as the proxies see them. half_open: one "
        "request at a time until one shows that it serves again. kv_failing: no prompt is split "
        "with it.",
        [
            (
                OF.now(NODE_STATE, {"state": _NOT_SERVING}).max("node", "state").sum("state"),
                "{state}",
            )
        ],
        Kind.STACK,
        width=12,
    ),
    Panel(
        "Can be used",
        "1: the engine gets requests. 0: it does not. Between: some proxies or workers see it so.",
        [(OF.now(NODE_UP).min("node", "role"), "{role} {node}")],
    ),
    Panel(
        "Legs in flight",
        "Requests that each engine has from these proxies. Of one role they should be about even.",
        [(OF.now(NODE_INFLIGHT).sum("node", "role"), "{role} {node}")],
    ),
    Panel(
        "Requests that an engine can take",
        "The bound of the requests of an engine. At the bound it gets no more, and requests wait.",
        [(OF.now(CAPACITY).sum("node"), "{node}")],
        needs="limits.engine_requests",
    ),
    Panel(
        "Requests by revision",
        "The part of a pool's requests that each revision of its engines gets, by what these can "
        "do. 0: it is not complete, GET /ready says what it lacks.",
        [(OF.now(REVISION_SHARE).max("pool", "revision"), "{pool} {revision}")],
        needs="engines of several revisions",
    ),
]
TIMES = [
    _time(
        "Prefill: mean time of each engine",
        "prefill",
        "From asking the engine to its answer. One engine far above the others is slow or has the "
        "longest prompts.",
    ),
    _time(
        "KV: mean time of each engine",
        "kv",
        "From asking the decode engine to its first data: its queue, the KV transfer and one step. "
        "One engine far above the others has a slow link or a full batch.",
    ),
    _time(
        "Decode: mean time of each engine", "decode", "From the first data of a stream to its end."
    ),
    _time(
        "Alone: mean time to the first data of each engine",
        "alone",
        "Of streams that one engine serves alone: its own queue and prefill.",
        needs="streams that one engine serves alone",
    ),
    Panel(
        "Phases of legs",
        "How many phases of legs each engine ends per second.",
        [(OF.rate(NODE_LEGS).sum("node", "phase"), "{node} {phase}")],
        width=16,
    ),
]
FAILURES = [
    Panel(
        "Legs that failed",
        "Requests that failed on an engine, also in the middle of a stream. What was wrong with "
        "the request does not count.",
        [(OF.rate(LEG_FAILURES).sum("node", "phase"), "{node} {phase}")],
    ),
    Panel(
        "Engines that stood still",
        "How often the core of an engine showed no sign for health.stalled_after in the last hour.",
        [(OF.increase(STALLS, "1h").sum("node"), "{node}")],
    ),
    Panel(
        "Engines that were excluded as outliers",
        "How often in the last hour. errors: it failed more often than the others. latency: it was "
        "slower.",
        [(OF.increase(EXCLUSIONS, "1h").sum("node", "reason"), "{node} {reason}")],
    ),
    Panel(
        "Questions to silent engines",
        "Requests for one token by which engines that were silent were asked whether they work.",
        [(OF.rate(CANARIES).sum("node", "result"), "{node} {result}")],
    ),
    Panel(
        "Engines that disappeared under a request",
        "Once for each request that was under way there. several: other requests were, too. one: "
        "no other request was, so that the request may be the cause.",
        [(OF.increase(ENGINES_LOST, "1h").sum("requests").counting("engines"), "{requests}")],
    ),
]
MEMBERS = [
    Panel(
        "Changes of the engines",
        "Engines that were added, drained or removed while the proxies run, in the last hour.",
        [(OF.increase(MEMBER_CHANGES, "1h").sum("change"), "{change}")],
    ),
    Panel(
        "Engines that a source names",
        "How many engines each source names, such as a name of DNS.",
        [(OF.now(_SOURCE_ENGINES).max("source"), "{source}")],
        needs="engines that are found by a source (pools[].sources, dns:// or srv://)",
    ),
    Panel(
        "Age of a source's last answer",
        "While it grows, the engines of the last good answer stay in use.",
        [(OF.now(_SOURCE_AGE).max("source"), "{source}")],
        needs="engines that are found by a source (pools[].sources, dns:// or srv://)",
    ),
]
BOARD = Board(
    "engines",
    "engines",
    "Which engines can be used, which are slow, and which fail. Engines that were removed are not "
    "shown.",
    [
        ("States", STATES),
        ("Times", TIMES),
        ("Failures", FAILURES),
        ("Members", MEMBERS),
    ],
)
