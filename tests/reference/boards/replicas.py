"""The dashboard of many proxies in front of the same engines: each beside the others."""

from __future__ import annotations

from pdproxy.app.gauges import BUILD_INFO, STATE, TASK_RESTARTS, WORKERS
from pdproxy.app.heartbeat import LOOP_LATENESS
from pdproxy.app.reloading import RELOADED
from pdproxy.app.replicas import NODE_OTHERS, REPLICAS
from pdproxy.deciding.local_admission import INFLIGHT, QUEUE
from pdproxy.fleet.gauges import NODE_INFLIGHT, NODE_UP
from pdproxy.observe.requests import REFUSALS, REQUESTS, TTFT
from pdproxy.workers.shown_of_all import RESTARTS, SCHEDULER, SCHEDULER_RESTARTS
from tests.reference.boards.overview import FAILED
from tests.reference.panels import OF_BOARD as OF
from tests.reference.panels import Board, Kind, Panel
from tests.reference.promql import of_process

_WORKERS = "several workers (listen.workers)"
_REPLICAS = "other proxies in front of the same engines (replicas.count)"
SAME = [
    Panel(
        "Versions",
        "Each proxy with its version, Python and connector. They should be the same.",
        [(OF.now(BUILD_INFO), "")],
        Kind.TABLE,
    ),
    Panel(
        "State of each proxy",
        "1 for the state of GET /ready; a part: some workers see it so.",
        [(OF.now(STATE).max("instance", "state").above(0), "{instance} {state}")],
    ),
    Panel(
        "Proxies that are counted",
        "How many proxies each proxy takes to be in front of the engines. It should be the number "
        "of proxies here.",
        [(OF.now(REPLICAS).max("instance"), "{instance}")],
        needs=_REPLICAS,
    ),
    Panel(
        "Engines that proxies see differently",
        "Engines that some proxies can use and others can not. Above 0 for long: a proxy does not "
        "reach an engine.",
        [
            (
                OF.now(NODE_UP)
                .max("node")
                .minus(OF.now(NODE_UP).min("node"))
                .sum()
                .counting("engines"),
                "engines",
            )
        ],
    ),
]
LOAD = [
    Panel(
        "Requests of each proxy",
        "A balancer should give all of them about as many.",
        [(OF.rate(REQUESTS).sum("instance"), "{instance}")],
    ),
    Panel(
        "Requests in flight of each proxy",
        "Requests that have a place.",
        [(OF.now(INFLIGHT).sum("instance"), "{instance}")],
    ),
    Panel(
        "Requests that wait at each proxy",
        "Requests that have no place yet.",
        [(OF.now(QUEUE).sum("instance"), "{instance}")],
    ),
    Panel(
        "Time to first token of each proxy",
        "95 of 100 streams had their first token in less.",
        [(OF.quantile(0.95, TTFT, "instance"), "p95 {instance}")],
    ),
    Panel(
        "Requests that fail at each proxy",
        "The part of its requests: an engine failed, a defect, or no place.",
        [
            (
                OF.rate(REQUESTS, FAILED).sum("instance").over(OF.rate(REQUESTS).sum("instance")),
                "{instance}",
            )
        ],
    ),
    Panel(
        "Refused by each proxy",
        "Requests that were refused and may succeed later.",
        [(OF.rate(REFUSALS).sum("instance"), "{instance}")],
    ),
    Panel(
        "An engine's requests, from each proxy",
        "Legs in flight.",
        [(OF.now(NODE_INFLIGHT).sum("node", "instance"), "{node} from {instance}")],
        width=12,
    ),
    Panel(
        "An engine's requests from others, as each proxy estimates",
        "From other proxies, and from clients that use the engine directly.",
        [
            (
                OF.now(NODE_OTHERS).max("node", "instance"),
                "{node} by {instance}",
            )
        ],
        needs=_REPLICAS,
        width=12,
    ),
]
PROCESSES = [
    Panel(
        "Processor time of each proxy",
        "The part of one core that it uses, all its processes together.",
        [(OF.rate(of_process("process_cpu_seconds_total")), "{instance}")],
    ),
    Panel(
        "Memory of each proxy",
        "Resident memory, all its processes together.",
        [(OF.now(of_process("process_resident_memory_bytes")), "{instance}")],
    ),
    Panel(
        "Delay of the event loop of each proxy",
        "By how much a timer was late.",
        [(OF.quantile(0.99, LOOP_LATENESS, "instance"), "p99 {instance}")],
    ),
    Panel(
        "Worker and scheduler processes",
        "Processes whose numbers are on the page of metrics. The scheduler process is there with "
        "several workers alone.",
        [
            (OF.now(WORKERS).sum("instance"), "workers {instance}"),
            (OF.now(SCHEDULER).sum("instance"), "scheduler {instance}"),
        ],
        needs=_WORKERS,
    ),
    Panel(
        "Processes that were started again",
        "In the last hour.",
        [
            (OF.increase(RESTARTS, "1h").sum("instance"), "workers {instance}"),
            (OF.increase(SCHEDULER_RESTARTS, "1h").sum("instance"), "scheduler {instance}"),
        ],
        needs=_WORKERS,
    ),
    Panel(
        "Settings that were read again",
        "In the last hour. refused: they can't be used, and nothing has changed. GET /ready says "
        "why. Stays 0 without a file of settings.",
        [(OF.increase(RELOADED, "1h").sum("instance", "result"), "{instance} {result}")],
    ),
    Panel(
        "Background tasks that failed",
        "Parts of a proxy that must always run and were started again, in the last hour. The log "
        "has the places in the code.",
        [(OF.increase(TASK_RESTARTS, "1h").sum("instance", "task"), "{instance} {task}")],
    ),
]
BOARD = Board(
    "replicas",
    "many proxies",
    "Each proxy beside the others: do they have the same version, the same view of the engines, "
    "and the same load.",
    [("Are they alike", SAME), ("Load", LOAD), ("Processes", PROCESSES)],
)
