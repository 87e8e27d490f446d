"""Faults of the engine and of its process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdproxy_lab.sim import since
from pdproxy_lab.sim.faults.kind import FaultError, FaultKind, Occurrence, arguments
from pdproxy_lab.sim.faults.messages import send_failure
from pdproxy_lab.sim.faults.moments import REQUEST, Moment
from pdproxy_lab.sim.faults.targets import AnswerTarget


class _DeadCore(FaultKind):
    name = "dead_core"
    summary = "the engine core dies, the API server stays up"
    moments = REQUEST

    def on_answer(self, answer: AnswerTarget, now: Occurrence) -> bool:
        answer.engine.kill_core()
        # What the API server already has is written; the next event of a stream would have come
        # from the core.
        return not (answer.streamed and answer.writer.head_out) or now.at == "after"

    async def take_over(self, answer: AnswerTarget, now: Occurrence) -> None:
        await send_failure(answer, since.dead_message(answer.engine.facts.version))


class _LeaseExpiry(FaultKind):
    name = "lease_expiry"
    summary = "the lease of every handle ends now, before its time: the blocks keep their content"
    moments = ("handed_over", "queued", "prefilling", "after")

    def on_answer(self, answer: AnswerTarget, now: Occurrence) -> bool:
        answer.engine.expire_leases()
        return True


class _LoadFailure(FaultKind):
    name = "load_failure"
    summary = (
        "the next transfer of KV that the engine begins fails: D's pull or registration, P's push"
    )
    moments = ("handed_over", "queued")

    def on_answer(self, answer: AnswerTarget, now: Occurrence) -> bool:
        answer.engine.fail_loads()
        return True


class _Restart(FaultKind):
    name = "restart"
    summary = "killed, and started again after `down` seconds with a new engine id and empty memory"
    moments = REQUEST
    args = arguments(down=0.0)
    engine_continues = True

    async def take_over(self, answer: AnswerTarget, now: Occurrence) -> None:
        answer.process.restart_soon(now.args["down"])


class _Kill(FaultKind):
    name = "kill"
    summary = "killed (SIGKILL): the kernel closes all sockets, the port refuses connections"
    moments = REQUEST
    engine_continues = True

    async def take_over(self, answer: AnswerTarget, now: Occurrence) -> None:
        answer.process.kill_soon()


class _Freeze(FaultKind):
    name = "freeze"
    summary = (
        "stopped (SIGSTOP) for `seconds` (0: until thawed): sockets stay open, nothing answers"
    )
    moments = REQUEST
    args = arguments(seconds=0.0)

    def on_answer(self, answer: AnswerTarget, now: Occurrence) -> bool:
        answer.process.freeze_now(now.args["seconds"])
        return True


class _CoreFreeze(FaultKind):
    name = "core_freeze"
    summary = (
        "the engine core is stopped (SIGSTOP) for `seconds` (0: until thawed), the API server "
        "stays up: `/health` answers, no"
        " metric moves (`rank`: only that data-parallel rank's core, empty: all)"
    )
    moments = REQUEST
    args = arguments(seconds=0.0, rank="")

    def check(self, at: Moment, args: Mapping[str, Any]) -> None:
        if args["rank"] and not (args["rank"].isascii() and args["rank"].isdigit()):
            raise FaultError(f"rank = {args['rank']!r} is no number")

    def on_answer(self, answer: AnswerTarget, now: Occurrence) -> bool:
        rank = now.args["rank"]
        answer.process.freeze_core_now(now.args["seconds"], int(rank) if rank else None)
        return True


class _NoFin(FaultKind):
    name = "no_fin"
    summary = (
        "terminated (SIGTERM): the listener is closed, open answers send nothing more and no FIN"
    )
    moments = REQUEST
    engine_continues = True

    async def take_over(self, answer: AnswerTarget, now: Occurrence) -> None:
        answer.process.terminate_soon()


FAMILY: tuple[FaultKind, ...] = (
    _DeadCore(),
    _LeaseExpiry(),
    _LoadFailure(),
    _Restart(),
    _Kill(),
    _Freeze(),
    _CoreFreeze(),
    _NoFin(),
)
