"""Faults of connections: refused, reset, closed, stalled."""

from __future__ import annotations

from pdproxy_lab.sim.faults.kind import Kind, Occurrence, arguments
from pdproxy_lab.sim.faults.moments import ANSWER, default_first
from pdproxy_lab.sim.faults.targets import Answer, Connection


class _Refuse(Kind):
    name = "refuse"
    summary = "the port refuses connections while the fault is armed; idle connections are closed"
    moments = ("accept",)
    args = arguments(seconds=0.0)
    closes_port = True


class _Reset(Kind):
    name = "reset"
    summary = "the connection is reset (RST)"
    moments = default_first("queued", ANSWER)

    def on_connection(self, connection: Connection, now: Occurrence) -> bool:
        connection.reset()
        return True

    async def take_over(self, answer: Answer, now: Occurrence) -> None:
        answer.ended()
        answer.connection.reset()


class _EOF(Kind):
    name = "eof"
    summary = "the connection is closed with a FIN"
    moments = default_first("mid_stream", ANSWER)

    def on_connection(self, connection: Connection, now: Occurrence) -> bool:
        connection.close()
        return True

    async def take_over(self, answer: Answer, now: Occurrence) -> None:
        answer.ended()
        answer.connection.close()


class _Stall(Kind):
    name = "stall"
    summary = "nothing more is sent, the connection stays open; the engine goes on"
    moments = default_first("queued", ANSWER)
    engine_continues = True

    def on_connection(self, connection: Connection, now: Occurrence) -> bool:
        connection.ignore_input()
        return True

    async def take_over(self, answer: Answer, now: Occurrence) -> None:
        return


FAMILY: tuple[Kind, ...] = (_Refuse(), _Reset(), _EOF(), _Stall())
