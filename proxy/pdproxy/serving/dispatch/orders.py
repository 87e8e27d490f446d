"""The orders in which an attempt's legs run. Each is a function from the prompt and its leased
engines to an outcome.

`one_engine` where one engine serves the prompt alone; else the contract says whether the prefill
leg comes first (`prefill_then_decode`) or both engines are asked at once (`both_at_once`).
`load_then_answer` has the KV loaded in that order before the request itself is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from pdproxy.kit.clock import Timer
from pdproxy.kit.errors import KvGoneError
from pdproxy.kit.frames import drop_traceback
from pdproxy.kit.one_shot_event import OneShotEvent
from pdproxy.scheduling.split import may_be_too_long
from pdproxy.serving.dispatch.attempt import Attempt
from pdproxy.serving.dispatch.decode_leg import DecodeLeg
from pdproxy.serving.dispatch.prefill_leg import Prefilled, PrefillLeg
from pdproxy.serving.dispatch.prompt_request import PromptRequest
from pdproxy.serving.dispatch.recovery import (
    Answered,
    AskAgain,
    CannotSplit,
    DecodeFailed,
    ModelRefused,
    Outcome,
    PrefillFailed,
)
from pdproxy.serving.kv.custody import Custody
from pdproxy.serving.stream.splice_sink import answer_finished
from pdproxy.transfer.contract import Handle
from pdproxy.transfer.splice import Splice
from pdproxy.upstream.client import Answer


def one_engine(request: PromptRequest, attempt: Attempt) -> Awaitable[Outcome]:
    """Have one engine prefill and decode by itself."""
    return DecodeLeg(request, attempt).run()


async def prefill_then_decode(
    request: PromptRequest, attempt: Attempt, leg: PrefillLeg | None = None
) -> Outcome:
    """Have a prefill engine make the KV, then a decode engine read it and generate. `leg`: the
    prefill leg, if it is made.
    """
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
        # Release the KV first: otherwise the engine that serves the prompt alone could read a part
        # of it.
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

    The prefill leg comes first where the contract can't name the prefill engine to the decode
    engine yet, where the prompt may be too long for the prefill engine alone, and where its first
    token decides whether its KV is kept.
    """
    prefill = PrefillLeg(request, attempt)
    custody = None if _prefill_alone_may_refuse(request, attempt) else prefill.promise()
    if custody is None:
        return await prefill_then_decode(request, attempt, prefill)
    return await BothLegs(request, attempt, prefill, custody).run()


ORDERS = {"sequential": prefill_then_decode, "concurrent": both_at_once}
"""By the word of `Contract.order`."""


async def load_then_answer(request: PromptRequest, attempt: Attempt) -> Outcome:
    """Have the decode engine load the KV with a request for one token, then answer the client's own
    request from its prefix cache.

    For several answers to a prompt: an engine makes a request of each, and the first one that has
    read a handle's KV frees it.
    """
    request.begin_loading()
    try:
        outcome = await ORDERS[request.resources.transfer.contract.order](request, attempt)
    finally:
        request.end_loading()
    if not isinstance(outcome, Answered) or outcome.answer is None or outcome.answer.status != 200:
        return outcome
    attempt.custody = None
    loaded = None if request.relay is None else request.relay.usage
    leg = DecodeLeg(request, attempt)
    details = None if loaded is None else loaded.prompt_tokens_details
    if details is not None and request.parsed.stream:
        # of the first answer, as on one engine; a whole answer has those of the last one
        leg.relay.filter.cached_tokens = details.cached_tokens
        leg.relay.filter.created_cache_tokens = details.created_cache_tokens
    return await leg.run()


def _prefill_alone_may_refuse(request: PromptRequest, attempt: Attempt) -> bool:
    """Return whether the prompt may be too long for the prefill engine alone: the decode engine
    would wait for its KV.
    """
    leases = attempt.assignment.leases
    prefill, decode = leases[0].engine.evidence, leases[-1].engine.evidence
    longest = None if prefill is None else prefill.max_model_len
    if (
        longest is None
        or decode is None
        or (decode.max_model_len is not None and decode.max_model_len <= longest)
    ):
        return False
    assert request.prompt is not None
    tokens = None if request.ids is None else request.ids.count
    return may_be_too_long(
        request.parsed, request.prompt, tokens, longest, request.resources.states.template_tokens
    )


async def _finished(
    request: PromptRequest, attempt: Attempt, handle: Handle, body: bytes
) -> Answered:
    """Answer with the prefill engine's token, which is the last one: no decode engine is asked."""
    resources = request.resources
    relay = request.relay = request.new_relay()
    relay.filter.cached_tokens, relay.filter.created_cache_tokens = (
        handle.cached_tokens,
        handle.created_cache_tokens,
    )
    splice = Splice(request.parsed, handle, request.headers.request_id)
    answer_finished(relay, splice, body, stream=request.parsed.stream)
    first = await relay.first
    if isinstance(first, Answer):
        return Answered(first)
    relay.flow(request.stream_to(relay), None)
    await relay.watch(resources.clock, resources.deadlines.between_tokens, lambda _: None)
    return Answered(None)


REFUSAL_GRACE = 1.0
"""Seconds for the decode engine to refuse what the prefill engine has refused."""

_Result = Prefilled | Answered | AskAgain | CannotSplit | ModelRefused | PrefillFailed


class BothLegs:
    """The two legs of an attempt that run at once. Run once. `custody`: of the KV that `prefill`
    has promised.

    The decode engine waits while the prefill engine makes the KV and writes it there. Custody
    begins before the first leg. The failure of one leg ends the other at once:

        the prefill engine refuses the prompt   the decode engine mostly does, too; otherwise its
                                                leg is closed, and one engine serves the prompt
        the prefill fails                       it is asked once more under the same id, which alone
                                                frees a decode engine that waits; then the decode
                                                leg is closed, and another pair is tried under a new
                                                id
        the decode engine refuses or fails      the prefill leg is closed, if nothing waits for its
                                                KV; else the custodian awaits it
        the client leaves                       the decode leg is closed, and the custodian awaits
                                                the prefill's answer
    """

    __slots__ = (
        "_attempt",
        "_custody",
        "_decode",
        "_failure",
        "_give_up",
        "_is_prefill_open",
        "_no_kv_later",
        "_prefill",
        "_prefill_over",
        "_prefill_sent",
        "_request",
        "_started",
    )

    def __init__(
        self, request: PromptRequest, attempt: Attempt, prefill: PrefillLeg, custody: Custody
    ) -> None:
        self._request = request
        self._attempt = attempt
        self._custody = custody
        self._prefill = prefill
        self._decode = DecodeLeg(request, attempt)
        self._failure: (
            Answered | AskAgain | CannotSplit | ModelRefused | PrefillFailed | Exception | None
        ) = None
        self._give_up: Timer | None = None
        """Ends the decode leg, if the prefill engine has refused the prompt."""
        self._no_kv_later: str | None = None
        """Why there is no KV, if only the end of the decode leg shows whether that matters."""
        self._is_prefill_open = False
        """Whether the prefill leg was under way when the decode leg was over."""
        self._started = request.resources.now()
        self._prefill_sent = prefill.sent = OneShotEvent()
        self._prefill_over = self._decode.prefill_over = OneShotEvent()

    async def run(self) -> Outcome:
        """Run both legs. Return the decode leg's outcome; the prefill leg's, if that has ended
        both.
        """
        prefill = asyncio.get_running_loop().create_task(
            self._run_prefill(), name="prefill beside decode"
        )
        prefill.add_done_callback(self._prefill_closed)
        try:
            # A prefill engine that takes no connection must not leave a decode engine waiting.
            await self._prefill_sent.wait()
            outcome = await self._decode.run() if self._failure is None else None
        except BaseException:
            if isinstance(self._failure, PrefillFailed):
                drop_traceback(self._failure.error)  # the client has left: nobody else handles it
            raise
        finally:
            self._leave(prefill)
            if self._give_up is not None:
                self._give_up.cancel()
            if self._no_kv_later is not None:
                self._no_kv(self._no_kv_later)
        failure, self._failure = self._failure, None
        if failure is not None and (
            outcome is None or self._decode.gave_up or isinstance(failure, Exception)
        ):
            if isinstance(outcome, DecodeFailed):
                drop_traceback(outcome.error)  # nobody else handles it
            if isinstance(failure, Exception):
                raise failure
            return failure
        assert outcome is not None
        if isinstance(failure, PrefillFailed):
            # the decode engine had what it needs: nobody else handles it
            drop_traceback(failure.error)
        if isinstance(outcome, DecodeFailed):
            if self._is_prefill_open:
                self._request.broke(self._attempt.assignment.leases[0], outcome.error, beside=True)
            if not outcome.data_sent:
                self._prefill.forget_peers()
        return outcome

    async def _run_prefill(self) -> None:
        """Run the prefill leg, and process its end in the same step: the decode leg may be over in
        the next one.
        """
        try:
            self._process(await self._prefill.run())
        except Exception as error:
            self._failure = error
            self._no_kv("a defect of pdproxy")
            self._decode.give_up()
        finally:
            self._prefill_sent.set()
            self._prefill_over.set()

    def _prefill_closed(self, leg: asyncio.Task[None]) -> None:
        """Process the end of a prefill leg that was closed, perhaps before its first step."""
        if leg.cancelled():
            self._no_kv("its leg was closed")
            self._prefill_sent.set()
            self._prefill_over.set()

    def _process(self, got: _Result) -> None:
        request, resources = self._request, self._request.resources
        if isinstance(got, Prefilled):
            now = resources.now()
            request.tried.prefill_s = request.tried.overlap_s = now - self._started
            self._decode.kv_made(now)
            return
        if not isinstance(got, PrefillFailed):
            # What one engine refuses the other mostly refuses, too: its answer is the client's, and
            # it does not wait for the KV.
            self._failure, self._no_kv_later = got, "it refused the prompt"
            self._give_up = resources.clock.after(REFUSAL_GRACE, self._decode.give_up)
            return
        if self._decode.relay.has_data:
            # The decode engine has its KV, or needs none, though nobody may have looked at its
            # answer yet.
            self._no_kv_later = got.error.message
            if not isinstance(got.error, KvGoneError):
                resources.report_failure(
                    request.headers, got.url, "prefill", got.error, will_retry=False
                )
            drop_traceback(got.error)
            return
        self._no_kv(got.error.message)
        self._failure = got
        self._decode.give_up()

    def _no_kv(self, why: str) -> None:
        if not self._prefill.handed_on:
            self._custody.not_made(why)

    def _leave(self, leg: asyncio.Task[None]) -> None:
        """The decode leg is over. Close the prefill leg if nobody waits for its KV, else leave it
        to the custodian.
        """
        if leg.done():
            return
        self._is_prefill_open = True
        custody = self._custody
        if custody.ends_later:
            self._request.later = custody
        if (
            custody.promised
            and not custody.decode_waits
            and not custody.ends_later
            and custody.how is None
        ):
            self._prefill.drop()
        else:
            self._prefill.abandon()
        leg.cancel()
