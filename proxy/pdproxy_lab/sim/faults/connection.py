"""Faults of connections: refused, reset, closed, stalled."""

from __future__ import annotations

from pdproxy_lab.sim.faults.kind import FaultKind, Occurrence, arguments
from pdproxy_lab.sim.faults.moments import ANSWER, default_first
from pdproxy_lab.sim.faults.targets import AnswerTarget, Connection


class _Refuse(FaultKind):
    name = "refuse"
    summary = "the port refuses connections while the fault is armed; idle connections are closed"
    moments = ("accept",)
    args = arguments(seconds=0.0)
    closes_port = True


class _Reset(FaultKind):
    name = "reset"
    summary = "the connection is reset (RST)"
    moments = default_first("queued", ANSWER)

    def on_connection(self, connection: Connection, now: Occurrence) -> bool:
        connection.reset()
        return True

    async def take_over(self, answer: AnswerTarget, now: Occurrence) -> None:
        answer.ended()
        answer.connection.reset()


class _EOF(FaultKind):
    name = "eof"
    summary = "the connection is closed with a FIN"
    moments = default_first("mid_stream", ANSWER)

    def on_connection(self, connection: Connection, now: Occurrence) -> bool:
        connection.close()
        return True

    async def take_over(self, answer: AnswerTarget, now: Occurrence) -> None:
        answer.ended()
        answer.connection.close()


class _Stall(FaultKind):
    name = "stall"
    summary = "nothing more is sent, the connection stays open; the engine goes on"
    moments = default_first("queued", ANSWER)
    engine_continues = True

    def on_connection(self, connection: Connection, now: Occurrence) -> bool:
        connection.ignore_input()
        return True

    async def take_over(self, answer: AnswerTarget, now: Occurrence) -> None:
        return


FAMILY: tuple[FaultKind, ...] = (_Refuse(), _Reset(), _EOF(), _Stall())
