"""The orders in which an attempt's legs run. Each is a function from the prompt and its leased engines to an outcome.

`one_engine` where one engine serves the prompt alone; else the contract says whether the prefill leg comes first
(`prefill_then_decode`) or both engines are asked at once (`both_at_once`).
"""

from __future__ import annotations

from collections.abc import Awaitable

from pdproxy.scheduling.split import may_be_too_long
from pdproxy.serving.dispatch.attempt import Attempt
from pdproxy.serving.dispatch.both_legs import BothLegs
from pdproxy.serving.dispatch.decode_leg import DecodeLeg
from pdproxy.serving.dispatch.prefill_leg import Prefilled, PrefillLeg
from pdproxy.serving.dispatch.prompt_request import PromptRequest
from pdproxy.serving.dispatch.recovery import Answered, CannotSplit, Outcome, PrefillFailed
from pdproxy.serving.stream.splice_sink import answer_finished
from pdproxy.transfer.contract import Handle
from pdproxy.transfer.splice import Splice
from pdproxy.upstream.client import Answer


def one_engine(request: PromptRequest, attempt: Attempt) -> Awaitable[Outcome]:
    """Have one engine prefill and decode by itself."""
    return DecodeLeg(request, attempt).run()


async def prefill_then_decode(request: PromptRequest, attempt: Attempt, leg: PrefillLeg | None = None) -> Outcome:
    """Have a prefill engine make the KV, then a decode engine read it and generate. `leg`: the prefill leg, if it is made."""
    resources = request.resources
    started = resources.now()
    got = await (PrefillLeg(request, attempt) if leg is None else leg).run()
    if isinstance(got, PrefillFailed):
        return got
    request.tried.prefill_s = resources.now() - started
    if not isinstance(got, Prefilled):
        return got
    custody = got.custody
    attempt.keep(custody)
    if (reason := got.handle.alone) is not None:
        # Release the KV first: otherwise the engine that serves the prompt alone could read a part of it.
        released = await custody.released(resources.deadlines.first_token)
        return CannotSplit(reason, exclude=custody.prefill if released else attempt.answering_url)
    if got.body:
        return await _finished(request, attempt, got.handle, got.body)
    del got  # the custody has the handle
    if attempt.awaits_notices and (outcome := await attempt.kv_ready(request)) is not None:
        return outcome
    return await DecodeLeg(request, attempt).run()


async def both_at_once(request: PromptRequest, attempt: Attempt) -> Outcome:
    """Have the prompt prefilled and answered at the same time.

    The prefill leg comes first where the contract can't name the prefill engine to the decode engine yet, and where the prompt
    may be too long for the prefill engine alone.
    """
    prefill = PrefillLeg(request, attempt)
    custody = None if _prefill_alone_may_refuse(request, attempt) else prefill.promise()
    if custody is None:
        return await prefill_then_decode(request, attempt, prefill)
    return await BothLegs(request, attempt, prefill, custody).run()


ORDERS = {"sequential": prefill_then_decode, "concurrent": both_at_once}
"""By the word of `Contract.order`."""


def _prefill_alone_may_refuse(request: PromptRequest, attempt: Attempt) -> bool:
    """Return whether the prompt may be too long for the prefill engine alone: the decode engine would wait for its KV."""
    leases = attempt.assignment.leases
    prefill, decode = leases[0].node.evidence, leases[-1].node.evidence
    longest = None if prefill is None else prefill.max_model_len
    if longest is None or decode is None or (decode.max_model_len is not None and decode.max_model_len <= longest):
        return False
    assert request.prompt is not None
    tokens = None if request.ids is None else request.ids.count
    return may_be_too_long(request.parsed, request.prompt, tokens, longest, request.resources.ledger.template_tokens)


async def _finished(request: PromptRequest, attempt: Attempt, handle: Handle, body: bytes) -> Answered:
    """Answer with the prefill engine's token, which is the last one: no decode engine is asked."""
    resources = request.resources
    relay = request.relay = request.new_relay()
    relay.filter.cached_tokens, relay.filter.created_cache_tokens = handle.cached_tokens, handle.created_cache_tokens
    splice = Splice(request.parsed, handle, request.headers.request_id)
    answer_finished(relay, splice, body, stream=request.parsed.stream)
    first = await relay.first
    if isinstance(first, Answer):
        return Answered(first)
    relay.flow(request.stream_to(relay), None)
    await relay.watch(resources.clock, resources.deadlines.between_tokens, lambda _: None)
    return Answered(None)
