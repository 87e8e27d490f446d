"""Faults of the engine and of its process."""

from __future__ import annotations

from pdproxy.sim.error_body import error_event
from pdproxy.sim.faults.kind import Kind, Occurrence, arguments
from pdproxy.sim.faults.messages import send_stream
from pdproxy.sim.faults.moments import REQUEST
from pdproxy.sim.faults.targets import Answer
from pdproxy.sim.request import EngineDeadError
from pdproxy.sim.sse import DONE


class _DeadCore(Kind):
    name = "dead_core"
    summary = "the engine core dies, the API server stays up"
    moments = REQUEST

    def on_answer(self, answer: Answer, now: Occurrence) -> bool:
        answer.engine.kill_core()
        # What the API server already has is written; the next event of a stream would have come from the core.
        return not (answer.streamed and answer.writer.head_out) or now.at == "after"

    async def take_over(self, answer: Answer, now: Occurrence) -> None:
        await send_stream(answer, error_event(str(EngineDeadError())), DONE)


class _LeaseExpiry(Kind):
    name = "lease_expiry"
    summary = "the lease of every handle ends now"
    moments = ("handed_over", "queued", "prefilling", "after")

    def on_answer(self, answer: Answer, now: Occurrence) -> bool:
        answer.engine.expire_leases()
        return True


class _LoadFailure(Kind):
    name = "load_failure"
    summary = "the next transfer of KV that the engine begins fails: D's pull or registration, P's push"
    moments = ("handed_over", "queued")

    def on_answer(self, answer: Answer, now: Occurrence) -> bool:
        answer.engine.fail_loads()
        return True


class _Restart(Kind):
    name = "restart"
    summary = "killed, and started again after `down` seconds with a new engine id and empty memory"
    moments = REQUEST
    args = arguments(down=0.0)
    engine_continues = True

    async def take_over(self, answer: Answer, now: Occurrence) -> None:
        answer.process.restart_soon(now.args["down"])


class _Kill(Kind):
    name = "kill"
    summary = "killed (SIGKILL): the kernel closes all sockets, the port refuses connections"
    moments = REQUEST
    engine_continues = True

    async def take_over(self, answer: Answer, now: Occurrence) -> None:
        answer.process.kill_soon()


class _Freeze(Kind):
    name = "freeze"
    summary = "stopped (SIGSTOP) for `seconds` (0: until thawed): sockets stay open, nothing answers"
    moments = REQUEST
    args = arguments(seconds=0.0)

    def on_answer(self, answer: Answer, now: Occurrence) -> bool:
        answer.process.freeze_now(now.args["seconds"])
        return True


class _NoFin(Kind):
    name = "no_fin"
    summary = "terminated (SIGTERM): the listener is closed, open answers send nothing more and no FIN"
    moments = REQUEST
    engine_continues = True

    async def take_over(self, answer: Answer, now: Occurrence) -> None:
        answer.process.terminate_soon()


FAMILY: tuple[Kind, ...] = (
    _DeadCore(),
    _LeaseExpiry(),
    _LoadFailure(),
    _Restart(),
    _Kill(),
    _Freeze(),
    _NoFin(),
)
