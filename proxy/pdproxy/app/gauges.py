"""The gauges of the process itself: requests, connections, memory, reader processes, tasks and the log."""

from __future__ import annotations

from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.logs import Log
from pdproxy.observe.metrics import Gauge
from pdproxy.serving.request.admission import Admission
from pdproxy.serving.request.body_reader import BodyReader
from pdproxy.upstream.answer_budget import AnswerBudget
from pdproxy.web.body_budget import BodyBudget
from pdproxy.web.connections import Connections
from pdproxy.web.unread_answers import UnreadAnswers


def request_gauges(admission: Admission, bodies: BodyReader) -> list[Gauge]:
    """Return the gauges of requests. Each is read at every scrape."""

    def readers() -> list[tuple[tuple[str, ...], float]]:
        workers = bodies.workers
        return [(("busy",), workers.busy), (("idle",), workers.idle), (("awaited",), workers.waiting)]

    text = "Reader processes, and large bodies that wait for one, by state"
    return [
        Gauge("pdproxy_inflight", "Requests being served", (), lambda: [((), admission.inflight)]),
        Gauge("pdproxy_queue", "Requests waiting for a place", (), lambda: [((), admission.waiting)]),
        Gauge("pdproxy_body_readers", text, ("state",), readers),
    ]


def memory_gauges(
    connections: Connections, bodies: BodyBudget, answers: AnswerBudget, unread: UnreadAnswers
) -> list[Gauge]:
    """Return the gauges of connections, and of memory that is held for clients and engines."""

    def held() -> list[tuple[tuple[str, ...], float]]:
        return [(("bodies",), bodies.held), (("answers",), answers.held), (("unread",), unread.held)]

    text = "Bytes that are held: bodies of requests, answers on their way from engines, whole answers that are not read yet"
    return [
        Gauge("pdproxy_connections", "Open connections of clients", (), lambda: [((), connections.open)]),
        Gauge("pdproxy_held_bytes", text, ("what",), held),
    ]


def process_gauges(tasks: TaskOwner, log: Log | None) -> list[Gauge]:
    """Return the counts of failed tasks and dropped log lines."""

    def failures() -> list[tuple[tuple[str, ...], float]]:
        return [((task,), count) for task, count in tasks.failures()]

    def dropped() -> list[tuple[tuple[str, ...], float]]:
        return [((), log.dropped if log is not None else 0)]

    failed = "Failures of background tasks that must always run, and that were started again"
    lost = "Log lines that were dropped, since standard error was not read or could not be written"
    return [
        Gauge("pdproxy_task_restarts", failed, ("task",), failures, counts=True),
        Gauge("pdproxy_log_lines_dropped", lost, (), dropped, counts=True),
    ]
