"""First a prefill engine makes the KV, then a decode engine reads it and generates."""

from __future__ import annotations

from collections.abc import Awaitable

from pdproxy.scheduling.nodes import Role
from pdproxy.serving.dispatch.attempt import Attempt, Order, Stage
from pdproxy.serving.dispatch.decode_leg import DecodeLeg
from pdproxy.serving.dispatch.decode_request import new_relay
from pdproxy.serving.dispatch.prefill_leg import Prefilled, PrefillLeg
from pdproxy.serving.dispatch.recovery import Answered, CannotSplit, Outcome, PrefillFailed
from pdproxy.serving.stream.splice_sink import answer_finished
from pdproxy.transfer.contract import Handle
from pdproxy.transfer.splice import Splice
from pdproxy.upstream.client import Answer


async def prefill(attempt: Attempt, leg: PrefillLeg | None = None) -> Outcome | None:
    """Have the prompt prefilled, and take custody of its KV. `leg`: the attempt's prefill leg, if it is made already."""
    resources = attempt.resources
    started = resources.now()
    got = await (leg or PrefillLeg(attempt)).run()
    if isinstance(got, PrefillFailed):
        return got
    attempt.prefill_s = resources.now() - started
    if not isinstance(got, Prefilled):
        return got
    custody = got.custody
    attempt.keep(custody)
    if (reason := got.handle.alone) is not None:
        # Release the KV first: otherwise the engine that serves the prompt alone could read a part of it.
        released = await custody.released(resources.deadlines.first_token)
        return CannotSplit(reason, exclude=custody.prefill if released else attempt.answering_url)
    return await _finished(attempt, got.handle, got.body) if got.body else None


def kv_ready(attempt: Attempt) -> Awaitable[Outcome | None]:
    """Wait for the notices of the prefill engine's ranks, where the contract has any."""
    return attempt.kv_ready()


def decode(attempt: Attempt) -> Awaitable[Outcome | None]:
    """Have the decode engine answer."""
    return DecodeLeg(attempt).run()


async def _finished(attempt: Attempt, handle: Handle, body: bytes) -> Answered:
    """Answer with the prefill engine's token, which is the last one: no decode engine is asked."""
    request, resources = attempt.request, attempt.resources
    relay = new_relay(attempt)
    splice = Splice(request.parsed, handle, request.headers.request_id)
    answer_finished(relay, splice, body, stream=request.parsed.stream)
    first = await relay.first
    if isinstance(first, Answer):
        return Answered(first)
    relay.flow(request.stream_to(relay), None)
    await relay.watch(resources.clock, resources.deadlines.between_tokens, lambda _: None)
    return Answered(None)


BEHIND_PREFILL: tuple[Stage, ...] = (kv_ready, decode)
ORDER = Order(roles=(Role.PREFILL, Role.DECODE), stages=(prefill, *BEHIND_PREFILL))
