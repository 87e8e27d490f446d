"""The gauges of the process itself: requests, connections, memory, reader processes, tasks, the log, state and versions."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Iterable, Sequence

from pdproxy import __version__
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe import catalog, catalog_decisions, catalog_health, catalog_refusals, catalog_workers
from pdproxy.observe.logs import Log, LogObserver
from pdproxy.observe.metrics import Gauge
from pdproxy.scheduling.placement import Placement, PlacementState
from pdproxy.serving.dispatch.record import Records
from pdproxy.serving.dispatch.retry_budget import RetryBudget
from pdproxy.serving.request.admission import Admission
from pdproxy.serving.request.body_reader import BodyReader
from pdproxy.upstream.answer_budget import AnswerBudget
from pdproxy.web.body_budget import BodyBudget
from pdproxy.web.connections import Connections
from pdproxy.web.operation import State
from pdproxy.web.unread_answers import UnreadAnswers
from pdproxy.web.wrong_keys import ADMIN, CLIENTS, WrongKeys

Samples = list[tuple[tuple[str, ...], float]]


def request_gauges(admission: Admission, bodies: BodyReader, retries: RetryBudget) -> list[Gauge]:
    """Return the gauges of requests. Each is read at every scrape."""

    def readers() -> Samples:
        workers = bodies.workers
        return [(("busy",), workers.busy), (("idle",), workers.idle), (("awaited",), workers.waiting)]

    return [
        Gauge(catalog.INFLIGHT, lambda: [((), admission.inflight)]),
        Gauge(catalog_refusals.PLACES, lambda: [((), admission.places)]),
        Gauge(catalog_refusals.TOKENS_IN_FLIGHT, lambda: [((), admission.tokens)]),
        Gauge(catalog.QUEUE, lambda: [((), admission.waiting)]),
        Gauge(catalog.BODY_READERS, readers),
        Gauge(catalog_health.RETRIES, lambda: [(("running",), retries.running), (("waiting",), retries.waiting)]),
        Gauge(catalog_health.RETRIES_REFUSED, lambda: [((), retries.refused)]),
    ]


def wrong_key_gauges(wrong: WrongKeys) -> list[Gauge]:
    """Return the counts of wrong keys."""
    kinds = [(listener, answer) for listener in (CLIENTS, ADMIN) for answer in ("refused", "throttled")]
    return [Gauge(catalog_refusals.WRONG_KEYS, lambda: [(kind, wrong.counts[kind]) for kind in kinds])]


def memory_gauges(
    connections: Connections,
    bodies: BodyBudget,
    answers: AnswerBudget,
    unread: UnreadAnswers,
    records: Sequence[Records],
) -> list[Gauge]:
    """Return the gauges of connections, and of memory that is held for clients and engines."""

    def held() -> Samples:
        kept = sum(one.held for one in records)
        found = {"bodies": bodies.held, "answers": answers.held, "unread": unread.held, "records": kept}
        return [((what,), count) for what, count in found.items()]

    return [
        Gauge(catalog.CONNECTIONS, lambda: [((), connections.open)]),
        Gauge(catalog.HELD_BYTES, held),
    ]


def process_gauges(tasks: TaskOwner, log: Log | None, lines: LogObserver) -> list[Gauge]:
    """Return the counts of tasks, of those that failed, of dropped log lines, and of lines about refusals that were left out."""

    def failures() -> Samples:
        return [((task,), count) for task, count in tasks.failures()]

    def running() -> Samples:
        try:
            return [((), len(asyncio.all_tasks()))]
        except RuntimeError:
            return [((), 0)]  # the page is read outside of an event loop

    return [
        Gauge(catalog_workers.WORKERS, lambda: [((), 1)]),
        Gauge(catalog.TASKS, running),
        Gauge(catalog.TASK_RESTARTS, failures),
        Gauge(catalog.LINES_DROPPED, lambda: [((), log.dropped if log is not None else 0)]),
        Gauge(catalog.REFUSALS_NOT_LOGGED, lambda: [((), lines.refusals.left_out)]),
    ]


def placement_gauges(placement: Placement) -> list[Gauge]:
    """Return the gauges of what a placement predicts and decides. Each is read at every scrape."""

    def state() -> PlacementState:
        return placement.state() or PlacementState({}, {}, 0)

    def errors() -> Samples:
        found = state().errors
        return [
            ((of, kind), value)
            for of, both in found.items()
            for kind, value in zip(("mean", "size"), both, strict=True)
        ]

    return [
        Gauge(catalog_decisions.PREDICTION_ERRORS, errors, max),
        Gauge(catalog_decisions.TIME_CORRECTIONS, lambda: list(state().corrections.items())),
        Gauge(catalog_decisions.KEPT_FOR_PREFILL, lambda: [((), state().kept)]),
        Gauge(catalog_decisions.SHARED_AGE, lambda: [] if (age := state().shared_age) is None else [((), age)], max),
    ]


def state_gauges(state: Callable[[], State], connectors: Iterable[str]) -> list[Gauge]:
    """Return the gauges of what `/ready` reports, and of what runs here."""

    def states() -> Samples:
        now = state()
        return [((one.value,), float(one is now)) for one in State]

    versions = [(__version__, platform.python_version(), connector) for connector in dict.fromkeys(connectors)]
    return [Gauge(catalog.STATE, states), Gauge(catalog.BUILD_INFO, lambda: [(labels, 1) for labels in versions])]
