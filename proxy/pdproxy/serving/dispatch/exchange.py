"""One prompt's exchange with the engines: attempts, each on engines of its own, until the client has its answer.

Chooses the order of an attempt's legs, runs its stages, and asks `recovery` what follows from their outcome. However an attempt
ends, a cancelled task (the client left) included, its leases are closed once and no KV is left behind:

    before the prefill's answer             the custodian adopts the leg: it awaits the answer and releases the KV
    before the decode engine is asked       the handle is released
    before that engine has shown that it    its leg gets 0.15 s to show it, then it is closed; the KV is released if the
    took the request                        engine may not have seen the handle
    later                                   the decode leg is closed; the decode engine frees both sides
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from pdproxy.kit.errors import EngineRefusedError, EnginesLostError, StandstillError
from pdproxy.kit.frames import drop_traceback
from pdproxy.observe.events import LegTimes, ServedAlone, StreamContinued
from pdproxy.scheduling.split import why_alone
from pdproxy.serving.dispatch import orders
from pdproxy.serving.dispatch.attempt import Attempt
from pdproxy.serving.dispatch.begin import begin, begin_placed, begin_with_space, why_not_split
from pdproxy.serving.dispatch.decisions import decided, spelled
from pdproxy.serving.dispatch.few_first import Permit
from pdproxy.serving.dispatch.following import Following, Streams
from pdproxy.serving.dispatch.orders import alone
from pdproxy.serving.dispatch.orders.sequential import kv_ready
from pdproxy.serving.dispatch.prompt_request import PromptRequest
from pdproxy.serving.dispatch.record import Record
from pdproxy.serving.dispatch.recovery import (
    Action,
    Answered,
    Continue,
    DecodeFailed,
    Fail,
    Failed,
    Failure,
    ModelRefused,
    NoEngines,
    Outcome,
    PrefillFailed,
    Progress,
    Retry,
    after,
)
from pdproxy.serving.dispatch.resources import ExchangeResources, LegHeaders
from pdproxy.serving.dispatch.retry_budget import RetrySlot
from pdproxy.serving.dispatch.turn import key_of
from pdproxy.serving.dispatch.whole_prompts import refusal, spares_decode
from pdproxy.serving.stream.relay import Relay
from pdproxy.serving.stream.response_writer import ResponseWriter
from pdproxy.upstream.client import Answer
from pdproxy.wire.continuable import Reason
from pdproxy.wire.request import Alone, Parsed, Prompt

_NONE: tuple[str, ...] = ()


class Dispatcher:
    """Makes the exchanges of one process. `resources` are what they work with.

    Raises:
        LookupError: the contract names an order that does not exist.
    """

    def __init__(self, resources: ExchangeResources) -> None:
        self.resources = resources
        contract = resources.transfer.contract
        order = orders.load(contract.order)
        if not contract.needs_leg_id:  # then there are no notices, which no attempt waits for
            order = replace(order, stages=tuple(stage for stage in order.stages if stage is not kv_ready))
        self.order = order

    def exchange(
        self, parsed: Parsed, prompt: Prompt | None, headers: LegHeaders, new_relay: Callable[[], Relay]
    ) -> Exchange:
        """Return the exchange of one prompt; with `prompt` None, of a whole request that one engine serves alone."""
        left = self.resources.limits.continuations
        return Exchange(self, PromptRequest(parsed, prompt, headers, new_relay, left=left))


class Exchange:
    """One prompt's exchange. Run once."""

    __slots__ = (
        "_alone",
        "_asked",
        "_attempt",
        "_avoid",
        "_dispatcher",
        "_following",
        "_keep",
        "_number",
        "_permit",
        "_prefill_failed",
        "_prefilled",
        "_request",
        "_served_alone",
        "_slot",
        "_until",
        "_without",
    )

    def __init__(self, dispatcher: Dispatcher, request: PromptRequest) -> None:
        self._dispatcher = dispatcher
        self._request = request
        self._attempt: Attempt | None = None
        self._number = 0
        self._asked = 0
        """Attempts that had engines."""
        self._without: tuple[str, ...] = ()
        self._avoid: tuple[str, ...] = ()
        """Engines that may have failed, too: see `recovery.Retry`."""
        self._keep: str | None = None
        """The decode engine that is to get the next attempt: see `recovery.Retry`."""
        self._alone: Alone | None = None
        """Why one engine is to serve the prompt; None: it is to be split."""
        self._served_alone: Alone | None = None
        """Why one engine served the last attempt that had engines; None: it was split."""
        self._prefill_failed: Alone | None = None
        self._prefilled = 0
        """Tokens of the prompt, as a prefill engine of an attempt before has reported them; 0: none has."""
        self._until = 0.0
        """Until when it may wait for an engine that stands still, 0 before it does."""
        self._slot: RetrySlot | None = None
        """Of the next attempt, if it is a retry."""
        self._permit: Permit | None = None
        """While its client's requests are served one after the other."""
        self._following: Following | None = None
        """What follows the failure of the stream, None before that."""

    def __repr__(self) -> str:
        return f"<Exchange {self._request.headers.request_id} {self._attempt!r}>"

    @property
    def relay(self) -> Relay | None:
        """The relay of the answer, None before an engine was asked for it."""
        return None if self._attempt is None else self._attempt.relay

    @property
    def streams(self) -> Streams:
        """The streams that the answer came from: several if other engines went on with the first."""
        relay = self.relay
        own = Streams() if relay is None else Streams([relay.fast_path], relay.usage, 0, relay.filter.keeps_usage)
        return own if self._following is None else self._following.streams(own)

    @property
    def events(self) -> int:
        """How many events were sent to the client so far."""
        return sum(path.events for path in self.streams.paths)

    @property
    def usage_event(self) -> bytes | None:
        """The usage event of one stream of several, None if there was none."""
        own = None if self.relay is None else self.relay.filter.usage_event
        return own if self._following is None else self._following.usage_event(own)

    @property
    def was_asked(self) -> bool:
        """Whether an engine was asked for anything."""
        return self._attempt is not None

    @property
    def may_be_answered(self) -> bool:
        """Whether an engine may have begun with the answer, in the last attempt: it was asked, and its KV was made."""
        attempt = self._attempt
        if attempt is None or attempt.asked_url is None:
            return False
        return attempt.prefill_over is None or attempt.kv_made_at > 0

    @property
    def prompt_tokens(self) -> int:
        """The prompt's length as the last prefill engine that made its KV has reported it, 0 if none has."""
        custody = None if self._attempt is None else self._attempt.custody
        return (0 if custody is None else custody.handle.prompt_tokens) or self._prefilled

    def times(self) -> LegTimes:
        """Return what happened so far."""
        own = self._own_times()
        return own if self._following is None else self._following.times(own)

    def _own_times(self) -> LegTimes:
        attempt = self._attempt
        if attempt is None:
            return LegTimes()
        times = LegTimes(
            prefill=attempt.prefill_url,
            decode=attempt.asked_url,
            why_alone=self._served_alone.value if self._served_alone else None,
            prefill_s=attempt.prefill_s,
            first_s=attempt.first_s,
            decode_s=attempt.decode_s,
            whole_s=attempt.whole_s,
            overlap_s=attempt.overlap_s,
            attempts=self._asked,
        )
        return times if not attempt.assignment.reason else decided(times, attempt.assignment)

    @property
    def decision(self) -> str | None:
        """Which engines were chosen for the last attempt, and why; None before there were any, or if the client does not ask."""
        attempt, why_alone = self._attempt, self._served_alone
        if attempt is None or not self._request.headers.hints.wants_decision:
            return None
        return spelled(attempt.assignment, why_alone.value if why_alone else None)

    async def run(self, stream_to: Callable[[Relay], ResponseWriter]) -> Answer | None:
        """Serve the prompt. Return a whole answer; or None once a stream has been passed on to `stream_to(relay)`.

        Raises:
            PdproxyError: before any data came, or in the stream.
        """
        self._request.stream_to = stream_to
        del stream_to
        try:
            self._alone = self._why_alone()
            if self._alone is None and self._dispatcher.resources.tokenizing is not None:
                self._alone = await self._tokenize()
            if (prefixes := self._dispatcher.resources.prefixes) is not None:
                request = self._request
                request.beginning = await prefixes.known_by(request.parsed, request.prompt, request.ids)
                del request
            if (
                self._dispatcher.resources.lost.remembers and self._slot is None
            ):  # with a slot, it goes on with a stream
                await self._admit()
            while True:
                self._number += 1
                outcome = await self._try()
                if isinstance(outcome, ModelRefused) and not self._is_elsewhere(outcome):
                    return outcome.answer
                if isinstance(outcome, Answered):
                    if self._dispatcher.resources.lost.remembers:
                        self._answered(outcome)
                    return outcome.answer
                if isinstance(outcome, NoEngines) and self._alone is not None and await self._engines_changed():
                    continue
                lost = await self._lost(outcome) if self._request.headers.lost else None
                action = self._recover(outcome, lost)
                if isinstance(outcome, PrefillFailed | DecodeFailed) and not isinstance(action, Fail | Continue):
                    drop_traceback(outcome.error)  # the client may leave while this waits
                    self._slot = self._slot or await self._dispatcher.resources.retry_slot(self._request.headers)
                    action = action if self._slot is not None else Fail(self._dispatcher.resources.not_retried())
                if isinstance(action, Continue) and isinstance(outcome, DecodeFailed):
                    try:
                        await self._go_on(outcome)
                    finally:
                        drop_traceback(outcome.error)
                        del outcome, action
                    return None
                if isinstance(action, Fail):
                    try:
                        raise action.error
                    finally:
                        del outcome, action  # they hold the error, whose traceback holds this frame
        except asyncio.CancelledError:
            if self._attempt is not None:
                request, leases = self._request, self._attempt.assignment.leases
                fields, known = request.parsed.fields, request.fingerprint
                self._dispatcher.resources.lost.left(request.headers, leases, fields, known)
                del request, fields
            raise
        finally:
            self._request.drop()  # it refers to the caller of this exchange
            if self._slot is not None:
                self._slot.leave()
            if self._permit is not None:
                self._permit.leave()
            self._drop_record()

    # -- where engines were lost under requests

    async def _admit(self) -> None:
        """Look at a request that may be the cause of a loss, and wait for its turn if its client's requests have turns.

        Raises:
            EnginesLostError: it is refused.
        """
        lost, request = self._dispatcher.resources.lost, self._request
        request.fingerprint = lost.admit(request.headers, request.parsed.fields)
        self._permit = await lost.in_turn(request.headers, self._dispatcher.resources.deadlines.queue)

    def _answered(self, outcome: Answered) -> None:
        if outcome.answer is None or outcome.answer.status == 200:
            request = self._request
            self._dispatcher.resources.lost.answered(request.headers, request.parsed.fields, request.fingerprint)

    async def _lost(self, outcome: Failure) -> EnginesLostError | None:
        """Return why no other engine is risked, None if one may be."""
        if isinstance(outcome, PrefillFailed | DecodeFailed):
            drop_traceback(outcome.error)  # the client may leave while this waits
        request = self._request
        return await self._dispatcher.resources.lost.judge(request.headers, request.parsed.fields, request.fingerprint)

    # -- attempts

    def _why_alone(self) -> Alone | None:
        """Return why one engine must serve the prompt, None to split it."""
        request, resources = self._request, self._dispatcher.resources
        parsed, prompt, ledger = request.parsed, request.prompt, resources.ledger
        if prompt is None:
            return parsed.alone or Alone.UNUSUAL
        block_size = None if resources.transfer.contract.capabilities.short_prompts else ledger.block_size
        return why_alone(parsed, prompt, block_size=block_size, template_tokens=ledger.template_tokens)

    async def _tokenize(self) -> Alone | None:
        """Make the prompt's token ids. Return why one engine must serve the prompt after all, None to split it."""
        resources, request = self._dispatcher.resources, self._request
        assert request.prompt is not None
        request.ids = await resources.ids(request.parsed, request.prompt, request.headers)
        if resources.turns is not None:
            request.key = key_of(request.parsed, request.prompt, request.ids)
        return why_not_split(resources, request) if resources.transfer.contract.needs_ids else None

    async def _try(self) -> Outcome:
        """Lease engines and run the stages of the order, until one of them has an outcome."""
        dispatcher, why_alone = self._dispatcher, self._alone
        resources, order = dispatcher.resources, dispatcher.order if why_alone is None else alone.ORDER
        avoid = self._avoid
        without, forbidden = self._without, _NONE
        if self._request.headers.lost:
            forbidden = resources.lost.forbidden(self._request.headers)
            without = (*without, *forbidden)
        if self._keep is not None:
            avoid = (*avoid, *resources.ledger.other_decodes(self._keep))
        if resources.ledger.placement is not None:
            attempt = await begin_placed(resources, self._request, why_alone, without, avoid)
            if attempt is not None and attempt.prefill_url is None:
                order, why_alone = alone.ORDER, why_alone or Alone.DECIDED
        elif order.roles and resources.transfer.buffers.bounded:
            attempt = await begin_with_space(resources, self._request, order, without, avoid)
        else:
            attempt = begin(resources, self._request, order, why_alone, without, avoid)
        if attempt is None:
            error = None if self._alone is None else refusal(resources, self._request, self._alone)
            return NoEngines() if error is None else Failed(error)
        if forbidden and any(lease.node.url in forbidden for lease in attempt.assignment.leases):
            attempt.close()
            return Failed(resources.lost.protects())
        self._attempt = attempt
        attempt.retry_slot, self._slot = self._slot, None
        if self._request.stalled:
            attempt.suspect()
        attempt.sent()
        self._asked += 1
        if why_alone is not None and why_alone is not self._served_alone:
            resources.observers.notify(ServedAlone(why_alone.value))
        self._served_alone = why_alone
        try:
            for stage in order.stages:
                outcome = await stage(attempt)
                if outcome is not None:
                    return outcome
            raise AssertionError("the last stage of an order has an outcome")
        finally:
            attempt.close()

    async def _engines_changed(self) -> bool:
        """Wait for an engine that stands still, if no other can serve the prompt. Return whether it is to be tried once more.

        Raises:
            OverloadedError: too many requests are being tried again then.
        """
        resources, slot = self._dispatcher.resources, self._slot
        if slot is not None:
            slot.leave()  # others are tried again meanwhile
            self._slot = None
        self._until = self._until or resources.now() + resources.deadlines.queue
        if not await resources.comebacks.wait(self._request.parsed.model, self._until):
            return False
        if slot is not None:
            self._slot = await resources.retry_slot(self._request.headers)
            if self._slot is None:
                raise resources.not_retried()
        self._number -= 1
        if self._alone is Alone.NO_PAIR:
            self._alone = None
        return True

    def _recover(self, outcome: Failure, lost: EnginesLostError | None) -> Action:
        """Return what is done after an attempt that failed, and note what the next one must know.

        `lost`: why no other engine is risked, None if one may be.
        """
        resources = self._dispatcher.resources
        self._prefilled = self.prompt_tokens
        most, continues = resources.limits.attempts, resources.records is not None
        request, is_alone = self._request, self._alone is not None
        spares = spares_decode(resources, request, Alone.KV_FAILED)
        whole = resources.ledger.serves_alone(request.parsed.model, spares_decode=spares)
        progress = Progress(self._number, most, is_alone, self._prefill_failed, continues, request.stalled, whole)
        action = after(outcome, progress)
        if isinstance(outcome, PrefillFailed | DecodeFailed) and isinstance(outcome.error, StandstillError):
            request.stalled += outcome.error.may_be_cause
            self._avoid += resources.suspected()
        if lost is not None:
            if isinstance(action, Continue):
                resources.observers.notify(
                    StreamContinued("refused", Reason.ENGINES_LOST.value, None, request.headers.request_id)
                )
            action = Fail(lost)
        if isinstance(action, Continue):
            return action
        will_retry = not isinstance(action, Fail)
        match outcome:
            case PrefillFailed(url, reason, error):
                self._prefill_failed = reason
                resources.report_failure(self._request.headers, url, "prefill", error, will_retry=will_retry)
            case ModelRefused(url):
                text = f"{url} does not have the model any more"
                error = EngineRefusedError(text, status=outcome.answer.status, body=b"")
                self._number -= 1  # this says nothing of the others, and the engine is asked for this model no more
                resources.report_failure(
                    self._request.headers, url, _phase_of(url, self._attempt), error, will_retry=True
                )
            case DecodeFailed(url, error, _) if outcome.is_engines:
                resources.report_failure(self._request.headers, url, "decode", error, will_retry=will_retry)
        if isinstance(action, Fail):
            return action
        self._keep = action.keep if isinstance(action, Retry) else None
        if action.exclude is not None:
            self._without += (action.exclude,)
        if action.avoid is not None:
            self._avoid += (action.avoid,)
        self._alone = self._alone if isinstance(action, Retry) else action.reason
        return action

    def _is_elsewhere(self, refused: ModelRefused) -> bool:
        """Note that an engine has lost a model. Return whether another one that was not asked lists it, and can answer."""
        ledger, model = self._dispatcher.resources.ledger, self._request.parsed.model
        if model is None:
            return False
        ledger.lost_model(refused.url, model)
        return ledger.lists(model, (*self._without, refused.url))

    async def _go_on(self, failed: DecodeFailed) -> None:
        """Have another engine go on with a stream that has failed, to its end. Raises as `Following.run`."""
        assert self.relay is not None
        following = self._following = Following(self._dispatcher.resources, self._request, self.relay, failed)
        await following.run(self._next)

    def _next(self, request: PromptRequest, failed: str, slot: RetrySlot, *, silent: bool) -> Exchange:
        """Return the exchange that goes on with a stream. It keeps a record of its own, and leaves the slot."""
        if not self._request.is_of_use:
            self._drop_record()
        exchange = Exchange(self._dispatcher, request)
        exchange._slot = slot
        # The engine that has failed may serve on: a broken connection is not its end.
        exchange._avoid = (failed, *self._dispatcher.resources.suspected()) if silent else (failed,)
        request.stalled = self._request.stalled
        request.fingerprint = self._request.fingerprint
        exchange._without = (failed,) if silent else ()
        return exchange

    def _drop_record(self) -> None:
        record, self._request.record = self._request.record, None
        if isinstance(record, Record) and (records := self._dispatcher.resources.records) is not None:
            records.drop(record)


def _phase_of(url: str, attempt: Attempt | None) -> str:
    return "prefill" if attempt is not None and attempt.prefill_url == url else "decode"
