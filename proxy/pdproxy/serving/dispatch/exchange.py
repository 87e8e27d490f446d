"""The course of one prompt: attempts with the engines, each on engines of its own, until the client
has its answer.

`Exchange.run` is the course, from top to bottom. An attempt leases engines (`begin`), and runs its
legs in an order (`orders`) until there is an outcome; `recovery` decides what follows from the
outcome. However an attempt ends, a cancelled task (the client left) included, its leases are closed
once and no KV is left behind:

    before the prefill's answer             the custodian adopts the leg: it awaits the answer and
                                            releases the KV
    before the decode engine is asked       the handle is released
    before that engine has shown that it    its leg gets 0.15 s to show it, then it is closed; the
                                            KV is released if the
    took the request                        engine may not have seen the handle
    later                                   the decode leg is closed; the decode engine frees both
                                            sides
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from pdproxy.kit.errors import EngineRefusedError, EnginesLostError, StandstillError
from pdproxy.kit.frames import drop_traceback
from pdproxy.observe.events import LegTimes, ServedAlone, StreamContinued
from pdproxy.scheduling.decisions import decided, spelled
from pdproxy.scheduling.losses import SOON, Fingerprint, Slot, protected
from pdproxy.scheduling.scheduler import ANY, Constraints
from pdproxy.scheduling.split import why_alone
from pdproxy.serving.dispatch.attempt import Attempt, ask_of, why_not_split
from pdproxy.serving.dispatch.encoding import encode_media
from pdproxy.serving.dispatch.failure_class import is_doubtful
from pdproxy.serving.dispatch.following import Following, Streams
from pdproxy.serving.dispatch.orders import ORDERS, load_then_answer, one_engine
from pdproxy.serving.dispatch.prompt_request import PromptRequest
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
from pdproxy.serving.dispatch.tokenizing import WhenMade
from pdproxy.serving.dispatch.turn import key_of
from pdproxy.serving.dispatch.whole_prompts import refusal, spares_decode
from pdproxy.serving.stream.relay import Relay
from pdproxy.serving.stream.response_writer import ResponseWriter
from pdproxy.tokens.ids import BegunIds
from pdproxy.upstream.client import Answer
from pdproxy.wire.continuable import NotContinued
from pdproxy.wire.request import Parsed
from pdproxy.wire.route_form import Alone, Prompt

_NONE: tuple[str, ...] = ()


class Exchange(PromptRequest):
    """One prompt's exchange. Run once. With `prompt` None, a whole request that one engine serves
    alone.

    `left`: how often other engines may go on with its stream, None: as the limits say.
    """

    __slots__ = (
        "_alone",
        "_asked",
        "_avoid",
        "_following",
        "_keep",
        "_number",
        "_prefill_failed",
        "_served_alone",
        "_until",
        "_without",
    )

    def __init__(
        self,
        resources: ExchangeResources,
        parsed: Parsed,
        prompt: Prompt | None,
        headers: LegHeaders,
        new_relay: Callable[[], Relay],
        left: int | None = None,
    ) -> None:
        left = resources.limits.continuations if left is None else left
        super().__init__(resources, parsed, prompt, headers, new_relay, left)
        self._number = 0
        self._asked = 0
        """Attempts that had engines."""
        self._without = self._avoid = _NONE
        """Engines that must not get the next attempt; and those that may have failed, too: see
        `recovery.Retry`.
        """
        self._keep: str | None = None
        """The decode engine that is to get the next attempt: see `recovery.Retry`."""
        self._alone: Alone | None = None
        """Why one engine is to serve the prompt; None: it is to be split."""
        self._served_alone: Alone | None = None
        """Why one engine served the last attempt that had engines; None: it was split."""
        self._prefill_failed: Alone | None = None
        self._until = 0.0
        """Until when it may wait for an engine that stands still, 0 before it does."""
        self._following: Following | None = None
        """What follows the failure of the stream, None before that."""

    def __repr__(self) -> str:
        return (
            f"<Exchange {self.headers.request_id}{' (dropped)' if self.is_dropped else ''}, "
            f"{self.relay!r}>"
        )

    # -- what is known of it

    @property
    def streams(self) -> Streams:
        """The streams that the answer came from: several if other engines went on with the
        first.
        """
        relay = self.relay
        own = (
            Streams()
            if relay is None
            else Streams([relay.fast_path], relay.usage, 0, relay.filter.keeps_usage)
        )
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
        return self.assignment is not None

    def times(self) -> LegTimes:
        """Return what happened so far."""
        return self.tried if self._following is None else self._following.times(self.tried)

    @property
    def decision(self) -> str | None:
        """Which engines were chosen for the last attempt, and why; None before there were any, or
        if the client does not ask.
        """
        assignment, why = self.assignment, self._served_alone
        if assignment is None or not self.headers.hints.wants_decision:
            return None
        return spelled(assignment, why.value if why else None)

    # -- the course

    async def run(self, stream_to: Callable[[Relay], ResponseWriter]) -> Answer | None:
        """Serve the prompt. Return a whole answer; or None once a stream has been passed on to
        `stream_to(relay)`.

        Raises:
            PdproxyError: before any data came, or in the stream.
        """
        resources = self.resources
        self.stream_to = stream_to
        del stream_to
        try:
            self._alone = self._why_alone()
            if self._alone is None and resources.tokenizing is not None:
                self._alone = await self._tokenize()
            if resources.prefixes is not None and self.beginning is None:
                self.beginning = await resources.prefixes.known_by(
                    self.parsed, self.prompt, self.ids
                )
            # with a slot, it goes on with a stream
            if resources.suspects.remembers and self.slot is None:
                await self._admit()
            while True:
                self._number += 1
                outcome = await self._try()
                if isinstance(outcome, Answered):
                    if resources.suspects.remembers:
                        self._answered(outcome)
                    return outcome.answer
                if isinstance(outcome, ModelRefused) and not self._is_elsewhere(outcome):
                    return outcome.answer
                if (
                    isinstance(outcome, NoEngines)
                    and self._alone is not None
                    and await self._engines_changed()
                ):
                    continue
                lost = await self._lost(outcome) if self.headers.lost else None
                action = self._recover(outcome, lost)
                if isinstance(outcome, PrefillFailed | DecodeFailed) and not isinstance(
                    action, Fail | Continue
                ):
                    drop_traceback(outcome.error)  # the client may leave while this waits
                    self.slot = self.slot or await resources.retry_slot(self.headers)
                    action = action if self.slot is not None else Fail(resources.not_retried())
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
            if self.assignment is not None:
                if self.parsed.fields:
                    resources.lost.left(self.headers, self.assignment.leases, self._known())
                if self.permit is not None:  # it may still end its engine
                    self.permit.leave_in(SOON, harmless=False)
                    self.permit = None
            raise
        finally:
            self.drop()  # it refers to the caller of this exchange
            self.leave_slot()
            if self.permit is not None:
                self.permit.leave(harmless=False)
            self.drop_record()

    def _why_alone(self) -> Alone | None:
        """Return why one engine must serve the prompt, None to split it."""
        parsed, prompt, resources = self.parsed, self.prompt, self.resources
        if prompt is None:
            return parsed.alone or Alone.UNUSUAL
        capabilities = resources.transfer.contract.capabilities
        if parsed.route not in capabilities.routes or (
            not parsed.route.form.has_rank_header and self._needs_rank_header()
        ):
            return Alone.ROUTE
        if prompt.media and not capabilities.media:
            return Alone.NON_TEXT
        states = resources.states
        block_size = None if capabilities.short_prompts else states.block_size
        return why_alone(
            parsed,
            prompt,
            block_size=block_size,
            template_tokens=states.template_tokens,
            several=capabilities.caches_loaded and states.caching and resources.turns is None,
        )

    def _needs_rank_header(self) -> bool:
        """Return whether legs are for one data-parallel rank of several."""
        resources = self.resources
        return resources.transfer.contract.capabilities.peers_from is not None and any(
            engine.run.peers.ranks > 1 for engine in resources.engines.values()
        )

    async def _tokenize(self) -> Alone | None:
        """Make the prompt's token ids. Return why one engine must serve the prompt after all, None
        to split it.
        """
        resources = self.resources
        assert self.prompt is not None
        started = resources.now()
        prefixes = resources.prefixes
        begins = prefixes is not None and prefixes.takes_beginnings
        take = self._take_beginning if begins else None
        self.ids = await resources.ids(self.parsed, self.prompt, self.headers, take)
        self.tried.tokenize_s = resources.now() - started
        if resources.turns is not None:
            self.key = key_of(self.parsed, self.prompt, self.ids)
        return why_not_split(resources, self) if resources.transfer.contract.needs_ids else None

    def _take_beginning(self, begun: BegunIds) -> WhenMade | None:
        """Take the ids of the prompt's beginning if they are enough to choose engines by. See
        `tokenizing.TakeBeginning`.
        """
        prefixes, prompt = self.resources.prefixes, self.prompt
        if prefixes is None or prompt is None:
            return None
        self.beginning = prefixes.known_by_first(self.parsed, prompt, begun)
        return None if self.beginning is None else partial(prefixes.complete, self.beginning)

    async def _try(self) -> Outcome:
        """Lease engines and run their legs, until there is an outcome."""
        resources, why_alone = self.resources, self._alone
        transfer, states = resources.transfer, resources.states
        without, avoid = self._without, self._avoid
        forbidden: Sequence[str] = _NONE
        if self.headers.lost:
            forbidden = await resources.lost.forbidden(self.headers)
            without = (*without, *forbidden)
        if self._keep is not None:
            avoid = (*avoid, *states.other_decodes(self._keep))
        constraints = ANY
        if why_alone is not None or without or avoid or self.ids is not None:
            constraints = Constraints(
                None if why_alone is None else why_alone.value,
                without,
                avoid,
                0 if self.ids is None else self.ids.count,
            )
        ask = ask_of(resources, self, why_alone)
        assignment = await resources.scheduler.choose(
            self.headers.request_id, ask, constraints, self.key
        )
        if assignment is None:
            error = None if self._alone is None else refusal(resources, self, self._alone)
            return NoEngines() if error is None else Failed(error)
        attempt = Attempt(resources, self, assignment)
        if why_alone is None and states.has_placement and attempt.prefill_url is None:
            why_alone = Alone.DECIDED
        if forbidden and any(lease.engine.url in forbidden for lease in attempt.assignment.leases):
            attempt.close()
            return Failed(protected())
        self._begin(attempt, why_alone)
        if why_alone is not None:
            order = one_engine
        elif self.parsed.alone is not None and self.parsed.needs_loading:
            order = load_then_answer
        else:
            order = ORDERS[transfer.contract.order]
        try:
            if self.prompt is not None and self.prompt.media:
                stopped = await encode_media(self, attempt, self.prompt.media)
                if stopped is not None:
                    return stopped
            return await order(self, attempt)
        finally:
            self.leave_slot()
            attempt.close()

    def _begin(self, attempt: Attempt, why_alone: Alone | None) -> None:
        """Begin to note what comes of an attempt."""
        assignment = self.assignment = attempt.assignment
        self.relay, self.may_be_answered = None, False
        self._asked += 1
        why = None if why_alone is None else why_alone.value
        self.tried = LegTimes(
            prefill=attempt.prefill_url,
            why_alone=why,
            attempts=self._asked,
            tokenize_s=self.tried.tokenize_s,
        )
        if why is not None:
            self.tried.beside_idle = assignment.leases[0].beside_idle
        if assignment.reason:
            self.tried = decided(self.tried, assignment)
        if self.stalled:
            self.suspect(assignment)
        if why is not None and why_alone is not self._served_alone:
            self.resources.observers.notify(ServedAlone(why))
        self._served_alone = why_alone

    # -- where engines were lost under requests

    async def _admit(self) -> None:
        """Look at a request that may be the cause of a loss, and wait for its turn if it has one.

        Raises:
            EnginesLostError: it is refused.
        """
        resources, fingerprint = self.resources, self._known()
        if resources.suspects.know(fingerprint, self.headers.client):
            self.permit = await resources.lost.turn(
                self.headers, fingerprint, resources.deadlines.queue
            )

    def _known(self) -> Fingerprint:
        """Return its fingerprint. Its fields were not dropped."""
        found = self.fingerprint
        if found is None:
            found = self.resources.fingerprint(self.headers.path, self.parsed.fields)
            self.fingerprint = found
        return found

    def _answered(self, outcome: Answered) -> None:
        if outcome.answer is None or outcome.answer.status == 200:
            self.note_fingerprint()
            self.resources.cleared(self.headers, self.fingerprint, whole=True)

    async def _lost(self, outcome: Failure) -> EnginesLostError | None:
        """Return why no other engine is risked, None if one may be."""
        if isinstance(outcome, PrefillFailed | DecodeFailed):
            drop_traceback(outcome.error)  # the client may leave while this waits
        self.note_fingerprint()
        return await self.resources.lost.judge(self.headers, self.fingerprint)

    async def _engines_changed(self) -> bool:
        """Wait for an engine that stands still, if no other can serve the prompt. Return whether it
        is to be tried once more.

        Raises:
            OverloadedError: too many requests are being tried again then.
        """
        resources, slot = self.resources, self.slot
        if slot is not None:
            slot.leave()  # others are tried again meanwhile
            self.slot = None
        self._until = self._until or resources.now() + resources.deadlines.queue
        if not await resources.engines_change(self.parsed.model, self._until):
            return False
        if slot is not None:
            self.slot = await resources.retry_slot(self.headers)
            if self.slot is None:
                raise resources.not_retried()
        self._number -= 1
        if self._alone is Alone.NO_PAIR:
            self._alone = None
        return True

    def _recover(self, outcome: Failure, lost: EnginesLostError | None) -> Action:
        """Return what is done after an attempt that failed, and note what the next one must know.

        `lost`: why no other engine is risked, None if one may be.
        """
        resources = self.resources
        most, continues = resources.limits.attempts, resources.records is not None
        is_alone = self._alone is not None
        spares = spares_decode(resources, self, Alone.KV_FAILED)
        whole = resources.states.serves_alone(self.parsed.model, spares_decode=spares)
        follows = self._note_doubt(outcome)
        progress = Progress(
            self._number,
            most,
            is_alone,
            self._prefill_failed,
            continues,
            self.stalled,
            whole,
            follows,
        )
        action = after(outcome, progress)
        if isinstance(outcome, PrefillFailed | DecodeFailed) and isinstance(
            outcome.error, StandstillError
        ):
            self.stalled += outcome.error.may_be_cause
            self._avoid += resources.suspected()
        if lost is not None:
            if isinstance(action, Continue):
                resources.observers.notify(
                    StreamContinued(
                        "refused", NotContinued.ENGINES_LOST.value, None, self.headers.request_id
                    )
                )
            action = Fail(lost)
        if isinstance(action, Continue):
            return action
        if isinstance(action, Fail) and self.doubtful is not None and is_doubtful(action.error):
            resources.unanswered(self.doubtful)
        will_retry = not isinstance(action, Fail)
        match outcome:
            case PrefillFailed(url, reason, error):
                self._prefill_failed = reason
                resources.report_failure(self.headers, url, "prefill", error, will_retry=will_retry)
            case ModelRefused(url):
                text = f"{url} does not have the model any more"
                error = EngineRefusedError(text, status=outcome.answer.status, body=b"")
                # this says nothing of the others, and the engine is asked for this model no more
                self._number -= 1
                resources.report_failure(
                    self.headers, url, self._phase_of(url), error, will_retry=True
                )
            case DecodeFailed(url, error, _) if outcome.is_engines:
                resources.report_failure(self.headers, url, "decode", error, will_retry=will_retry)
        if isinstance(action, Fail):
            return action
        self._keep = action.keep if isinstance(action, Retry) else None
        if action.exclude is not None:
            self._without += (action.exclude,)
        if action.avoid is not None:
            self._avoid += (action.avoid,)
        self._alone = self._alone if isinstance(action, Retry) else action.reason
        return action

    def _note_doubt(self, outcome: Failure) -> bool:
        """Return whether a 5xx has followed the prompt to a second engine. Behind the first one,
        avoid what may be broken.
        """
        if not isinstance(outcome, PrefillFailed | DecodeFailed) or not is_doubtful(outcome.error):
            return False
        if self.doubtful is None:
            return False  # its stream had begun
        if self.doubtful.follow(prefill=isinstance(outcome, PrefillFailed)):
            return True
        if isinstance(outcome, PrefillFailed) or outcome.leave_out is None:
            self._avoid += self.resources.doubted()
        return False

    def _is_elsewhere(self, refused: ModelRefused) -> bool:
        """Note that an engine has lost a model. Return whether another one that was not asked lists
        it, and can answer.
        """
        resources, model = self.resources, self.parsed.model
        if model is None:
            return False
        resources.scheduler.lost_model(refused.url, model)
        return resources.states.lists(model, (*self._without, refused.url))

    def _phase_of(self, url: str) -> str:
        return "prefill" if self.tried.prefill == url else "decode"

    # -- when a stream has failed

    async def _go_on(self, failed: DecodeFailed) -> None:
        """Have another engine go on with a stream that has failed, to its end. Raises as
        `Following.run`.
        """
        assert self.relay is not None
        following = self._following = Following(self.resources, self.headers, failed)
        await following.run(self, self.relay, failed, self._next)

    def _next(
        self,
        parsed: Parsed,
        prompt: Prompt,
        headers: LegHeaders,
        new_relay: Callable[[], Relay],
        failed: str,
        slot: Slot,
        *,
        silent: bool,
    ) -> Exchange:
        """Return the exchange that goes on with the stream. It keeps a record of its own, and
        leaves the slot.
        """
        if not self.is_of_use:
            self.drop_record()
        exchange = Exchange(self.resources, parsed, prompt, headers, new_relay, self.left - 1)
        exchange.slot, exchange.permit = slot, self.permit
        exchange.stalled, exchange.fingerprint = self.stalled, self.fingerprint
        # The engine that has failed may serve on: a broken connection is not its end.
        exchange._avoid = (failed, *self.resources.suspected()) if silent else (failed,)
        exchange._without = (failed,) if silent else _NONE
        return exchange
