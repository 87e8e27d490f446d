"""The metrics of what is no part's alone: connections, memory, tasks, the log, placements, state
and versions.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Iterable, Sequence

from pdproxy import __version__
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.description import NODE, TASK, Label, MergeRule, Samples, counter, gauge
from pdproxy.observe.events import Observers
from pdproxy.observe.logs import Log, LogObserver
from pdproxy.scheduling.placement import Placement, PlacementState
from pdproxy.serving.dispatch.record import ContinuationRecords
from pdproxy.upstream.answer_budget import AnswerBudget
from pdproxy.web.body_budget import BodyBudget
from pdproxy.web.connections import Connections
from pdproxy.web.operation import OperationState
from pdproxy.web.unread_answers import UnreadAnswers

WORKERS = gauge(
    "pdproxy_workers",
    "processes",
    "Workers whose numbers are on this page. Fewer than listen.workers: one is being started, or "
    "does not answer",
    workers=MergeRule.SUM,
)
TASKS = gauge(
    "pdproxy_tasks",
    "tasks",
    "Tasks of the event loop: those of requests, and those in the background",
    workers=MergeRule.SUM,
)
TASK_RESTARTS = counter(
    "pdproxy_task_restarts_total",
    "failures",
    "Failures of background tasks that must always run, and that were started again",
    TASK,
)
LINES_DROPPED = counter(
    "pdproxy_log_lines_dropped_total",
    "lines",
    "Log lines that were dropped, since standard error was not read or could not be written",
)
REFUSALS_NOT_LOGGED = counter(
    "pdproxy_refused_not_logged_total",
    "lines",
    "Log lines about refusals, and about requests without a valid key, that were left out: too "
    "many came within a second, or of "
    "one client within a minute",
)
CONNECTIONS = gauge(
    "pdproxy_connections",
    "connections",
    "Open connections of clients, also those being refused",
    workers=MergeRule.SUM,
)
HELD_BYTES = gauge(
    "pdproxy_held_bytes",
    "bytes",
    "Bytes that are held for clients and engines",
    Label(
        "what",
        (
            ("bodies", "of requests (limits.max_buffered_bytes)"),
            ("answers", "on their way from engines (limits.max_buffered_answer_bytes)"),
            (
                "unread",
                "what was written and clients have not read yet (limits.max_buffered_answer_bytes)",
            ),
            (
                "records",
                "of streams, so that other engines can go on with them (continuations.max_bytes)",
            ),
        ),
    ),
    workers=MergeRule.SUM,
)
STATE = gauge(
    "pdproxy_state",
    "bool",
    "1 for the state that /ready reports, 0 for the others",
    Label(
        "state",
        (
            ("ok", "requests are served, and prompts can be split"),
            ("degraded", "requests are served, and no prompt can be split"),
            ("not_ready", "no request can be served"),
        ),
    ),
    workers=MergeRule.MEAN,  # the part of the workers that see it so
)
BUILD_INFO = gauge(
    "pdproxy_build_info",
    "bool",
    "Always 1; the labels are the versions of pdproxy and Python, and the connector",
    Label("version", text="pdproxy's version"),
    Label("python", text="Python's version"),
    Label("connector", text="the pool's connector"),
    workers=MergeRule.MOST,
)
PREDICTION_ERRORS = gauge(
    "pdproxy_prediction_error_ratio",
    "ratio",
    "How wrong the placement's predictions of the last requests were: (measured - predicted) / "
    "predicted",
    Label("of", (("ttft", "the first token"), ("tpot", "the mean time per token after it"))),
    Label("way", (("whole", "one engine served them"), ("split", "two engines shared the work"))),
    Label("kind", (("mean", "below 0: it came earlier"), ("size", "the mean size, either way"))),
    workers=MergeRule.MOST,
    pools=MergeRule.MOST,
)
TIME_CORRECTIONS = gauge(
    "pdproxy_time_correction_ratio",
    "ratio",
    "What the placement multiplies the times of an engine's profile by, since its answers took "
    "longer or shorter",
    NODE,
    Label("work", (("prefill", "computing prompts"), ("step", "steps that only decode"))),
    workers=MergeRule.MOST,
)
KEPT_FOR_PREFILL = gauge(
    "pdproxy_engines_kept_for_prefill",
    "engines",
    "Engines of role any that the placement keeps for prefill at present",
    workers=MergeRule.MOST,
)


def show_memory(
    observers: Observers,
    connections: Connections,
    bodies: BodyBudget,
    answers: AnswerBudget,
    unread: UnreadAnswers,
    records: Sequence[ContinuationRecords],
) -> None:
    """Show the gauges of connections, and of memory that is held for clients and engines."""

    def held() -> Samples:
        kept = sum(one.held for one in records)
        found = {
            "bodies": bodies.held,
            "answers": answers.held,
            "unread": unread.held,
            "records": kept,
        }
        return [((what,), count) for what, count in found.items()]

    observers.show(CONNECTIONS, lambda: [((), connections.open)])
    observers.show(HELD_BYTES, held)


def show_process(
    observers: Observers, tasks: TaskOwner, log: Log | None, lines: LogObserver
) -> None:
    """Show the counts of tasks, of those that failed, of dropped log lines, and of lines about
    refusals that were left out.
    """

    def running() -> Samples:
        try:
            return [((), len(asyncio.all_tasks()))]
        except RuntimeError:
            return [((), 0)]  # the page is read outside of an event loop

    observers.show(WORKERS, lambda: [((), 1)])
    observers.show(TASKS, running)
    observers.show(TASK_RESTARTS, lambda: [((task,), count) for task, count in tasks.failures()])
    observers.show(LINES_DROPPED, lambda: [((), log.dropped if log is not None else 0)])
    observers.show(REFUSALS_NOT_LOGGED, lambda: [((), lines.refusals.left_out)])


def show_placement(observers: Observers, placement: Placement) -> None:
    """Show the gauges of what a placement predicts and decides."""

    def state() -> PlacementState:
        return placement.state() or PlacementState({}, {}, 0)

    def errors() -> Samples:
        found = state().errors
        return [
            ((of, way, kind), value)
            for (of, way), both in found.items()
            for kind, value in zip(("mean", "size"), both, strict=True)
        ]

    observers.show(PREDICTION_ERRORS, errors)
    observers.show(TIME_CORRECTIONS, lambda: state().corrections.items())
    observers.show(KEPT_FOR_PREFILL, lambda: [((), state().kept)])


def show_state(
    observers: Observers, state: Callable[[], OperationState], connectors: Iterable[str]
) -> None:
    """Show the gauges of what `/ready` reports, and of what runs here."""

    def states() -> Samples:
        now = state()
        return [((one.value,), float(one is now)) for one in OperationState]

    versions = [
        (__version__, platform.python_version(), connector)
        for connector in dict.fromkeys(connectors)
    ]
    observers.show(STATE, states)
    observers.show(BUILD_INFO, lambda: [(labels, 1) for labels in versions])
