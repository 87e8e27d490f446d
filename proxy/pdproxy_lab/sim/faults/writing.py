"""Faults in how right bytes are written: slowly, cut into pieces, several chunks at once."""

from __future__ import annotations

from dataclasses import replace

from pdproxy_lab.sim.faults.kind import FaultKind, Occurrence, arguments
from pdproxy_lab.sim.faults.moments import STREAM
from pdproxy_lab.sim.faults.targets import AnswerTarget, Connection


class _Slow(FaultKind):
    name = "slow"
    summary = (
        "`delay` seconds before every further write; at queued also before the engine gets the "
        "request"
    )
    moments = ("queued", "accept", "prefilling", "handed_over", "head", *STREAM)
    args = arguments(delay=0.05)

    def on_connection(self, connection: Connection, now: Occurrence) -> bool:
        connection.pause_reading(now.args["delay"])
        return True

    def on_answer(self, answer: AnswerTarget, now: Occurrence) -> bool:
        answer.writer.style = replace(answer.writer.style, delay=now.args["delay"])
        return True


class _Split(FaultKind):
    name = "split"
    summary = (
        "every further write is cut at `cuts` places (0: everywhere), with `delay` seconds "
        "between the pieces"
    )
    moments = ("queued", "prefilling", "handed_over", "head", *STREAM)
    args = arguments(cuts=3, delay=0.0)

    def on_answer(self, answer: AnswerTarget, now: Occurrence) -> bool:
        cuts, delay = now.args["cuts"], now.args["delay"]
        answer.writer.style = replace(
            answer.writer.style, cuts=cuts, cut_delay=delay, chance=now.chance
        )
        return True


class _Join(FaultKind):
    name = "join"
    summary = "from then on `count` HTTP chunks (0: all others) go out in one write"
    moments = ("head", "queued", "prefilling", "handed_over", *STREAM)
    args = arguments(count=3)
    streams = True

    def on_answer(self, answer: AnswerTarget, now: Occurrence) -> bool:
        answer.writer.style = replace(answer.writer.style, join=now.args["count"])
        return True


FAMILY: tuple[FaultKind, ...] = (_Slow(), _Split(), _Join())
