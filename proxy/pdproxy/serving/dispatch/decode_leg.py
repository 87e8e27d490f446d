"""The leg that answers the client: a decode engine that gets the KV in our custody, or one engine
alone.

Owns the leg, the engine's lease, and, once the request is sent, the end of the custody. The request
is sent once, whatever the connection looks like: whether another one follows is `recovery`'s to
decide. Nothing reaches the client before the engine has sent data, so that until then another
engine can be asked.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from pdproxy.kit.clock import Timer
from pdproxy.kit.errors import (
    EngineError,
    EngineTimeoutError,
    EngineUnreachableError,
    KvGoneError,
    OwnBodyRefusedError,
    Wait,
)
from pdproxy.kit.frames import drop_traceback
from pdproxy.kit.one_shot_event import OneShotEvent
from pdproxy.observe.events import DeadlinePassed
from pdproxy.scheduling.leases import GOOD, NEUTRAL
from pdproxy.serving.dispatch import turn
from pdproxy.serving.dispatch.attempt import Attempt
from pdproxy.serving.dispatch.doubtful_failures import FailedTransfer
from pdproxy.serving.dispatch.failure_class import (
    error_kind,
    error_text,
    is_about_ours,
    is_clients_fault,
    is_doubtful,
    is_of_kv,
    is_unknown_model,
    refused,
    verdict_of,
)
from pdproxy.serving.dispatch.prompt_request import PromptRequest
from pdproxy.serving.dispatch.recovery import (
    Answered,
    AskAgain,
    CannotSplit,
    DecodeFailed,
    ModelRefused,
    PrefillFailed,
)
from pdproxy.serving.kv import late_close
from pdproxy.serving.kv.custody import End
from pdproxy.serving.kv.open_turns import OpenTurn
from pdproxy.serving.stream.id_sink import IdSink, RenamedReads
from pdproxy.serving.stream.phase import StreamStarted
from pdproxy.serving.stream.splice_sink import SpliceSink
from pdproxy.transfer.bodies import added_fields, alone_body
from pdproxy.transfer.contract import Handle, PushedToDecode
from pdproxy.transfer.splice import Splice
from pdproxy.upstream.client import Answer
from pdproxy.upstream.connection import Leg, Message, Reads, Sink
from pdproxy.wire import sse
from pdproxy.wire.request import Parsed
from pdproxy.wire.route_form import Alone, Prompt

logger = logging.getLogger("pdproxy.kv")

FINISH_GRACE = 1.0
"""Seconds that an engine may take from its end mark to the end of its HTTP answer before the
connection is dropped.
"""
COUNTS_GRACE = 1.0
"""Seconds that an answer waits for the prefill engine's own answer, if the KV came before that."""
ACCEPT_GRACE = 0.15
"""After the client has left: seconds for the decode engine to show that it has the request (0.2 s
with the clock's tick), and as many from a stream's headers to its first data.
"""
ACCEPTED_UNSEEN = 1.0
"""Seconds behind which an engine that is healthy has the request, if the answer is not streamed."""


class DecodeLeg:
    """The answering leg of an attempt. Run once. Without custody of any KV, the engine serves the
    request alone.

    The watch over engines that stand still sees it as a `fleet.open_legs.OpenLeg`.
    """

    __slots__ = (
        "_asking",
        "_attempt",
        "_client",
        "_closes_later",
        "_custody",
        "_data_came",
        "_ended_by",
        "_engine",
        "_expected",
        "_first_token_s",
        "_in_silence",
        "_kv_made_at",
        "_lease",
        "_leg",
        "_loads",
        "_lost",
        "_request",
        "_resources",
        "_sent_at",
        "_timer",
        "_turn",
        "_url",
        "_whole",
        "gave_up",
        "prefill_over",
        "prompt_bytes",
        "relay",
        "since",
    )

    phase = "decode"
    is_counted = True

    def __init__(self, request: PromptRequest, attempt: Attempt) -> None:
        self._request = request
        self._resources = request.resources
        self._attempt = attempt
        self._custody = custody = attempt.custody
        self._loads = request.loads
        """Whether it only has the engine load the KV: the client's own request follows."""
        self._in_silence = request.parsed.starts_in_silence and not request.loads
        """Whether nothing comes before the answer is whole, or before reasoning that the client
        does not want is over.
        """
        self._lease = lease = attempt.assignment.leases[-1]
        self._url = lease.engine.url
        self._engine = request.resources.engines.known[self._url]
        self._client = self._engine.client
        self.relay = request.relay = request.new_relay()
        """The answer on its way to the client."""
        if custody is not None:
            self._show_cached_counts()
        self.prompt_bytes = lease.prompt_bytes
        self.since = 0.0
        """When the leg began, in seconds of the clock."""
        self._leg: Leg | None = None
        self._sent_at = 0.0
        """When the request was written, in seconds of the clock."""
        self._closes_later = False
        """Whether the custodian closes it, and ends its custody."""
        self._turn: OpenTurn | None = None
        self._expected = 0
        """Prompt tokens that the auditor expects by KV transfer."""
        self._timer: Timer | None = None
        """Of the first data."""
        self._first_token_s = 0.0
        """Seconds that it has for its first data, before it is asked whether its engine works."""
        self._asking: asyncio.Task[None] | None = None
        """The question whether its engine works, although its deadline has come."""
        self._data_came = self._whole = False
        """Whether the first data has come; and whether the answer has come to its end."""
        self._ended_by: EngineError | None = None
        """Why it was ended from outside, before any data."""
        self._lost = False
        """Whether that was the loss of the prefill engine before its push."""
        self.gave_up = False
        """Whether it ended because the prefill has failed."""
        self.prefill_over: OneShotEvent | None = None
        """Set once the prefill leg is over, if that runs at the same time."""
        self._kv_made_at = 0.0
        """When the prefill engine has answered, if it was asked at the same time; else 0."""

    def __repr__(self) -> str:
        return f"<DecodeLeg {self._url}, {self.relay!r}>"

    async def run(
        self,
    ) -> Answered | AskAgain | CannotSplit | DecodeFailed | ModelRefused | PrefillFailed:
        """Have the engine answer, and pass a stream on to its end. The lease and the custody end
        here.

        Closing the leg makes an engine that has the request free the KV on both sides; else the
        custody is released.
        """
        request, resources, custody, url = self._request, self._resources, self._custody, self._url
        self.since = resources.now()
        verdict = NEUTRAL
        open_legs, beside = self._engine.open_legs, 0
        self._attempt.take(self._lease)
        tried = request.tried
        tried.decode = url
        has_kv = self.prefill_over is None or self._kv_made_at > 0
        request.may_be_answered = has_kv and not self._loads
        open_legs.add(self)
        try:
            if custody is not None:
                custody.is_for(url)
                custody.on_gone = self._kv_gone
                if not custody.promised:
                    self._expect(custody.handle.prompt_tokens)
            first = await self._first_data()
            if self._loads and not isinstance(first, Answer):
                raise EngineError(f"{url} answered with a stream that it was not asked for")
            first_at = resources.now()
            if self._timer is not None:
                self._timer.cancel()
            if (
                custody is not None
                and first_at >= custody.sure_until
                and await resources.lease_may_have_ended(custody)
            ):
                custody.end(End.EXPIRED)
                raise KvGoneError(
                    f"the lease of the KV at {custody.prefill} ended before {url} had sent data"
                )
            self._data_came = True
            asked_at = self._attempt.loading_since or max(self.since, self._kv_made_at)
            if isinstance(first, Answer):
                self._whole = True
                is_answer = first.status == 200 and not self._loads
                if is_answer:
                    tried.whole_s = first_at - asked_at
                if custody is not None:
                    custody.decode_answered()
                if (refusal := self._refusal(first)) is not None:
                    return refusal
                verdict = GOOD
                if request.doubtful is not None and is_answer:
                    request.answered_well()
                self._kv_loaded()
                if (
                    first.status == 200
                    and self.prefill_over is not None
                    and await self._counts_came(self.prefill_over)
                ):
                    first = self._with_cached_counts(first)
                self._compare()
                if self._turn is not None and first.status == 200:
                    first = turn.whole(self._turn, first, request.parsed, self.relay)
                return Answered(first)
            tried.first_s = first_at - asked_at
            if request.doubtful is not None:
                request.answered_well()
            if self._lease.trial or resources.states.has_placement:
                resources.scheduler.began(self._lease, first_at)
            open_legs.flowing += 1
            beside = open_legs.flowing
            if custody is not None:
                custody.end(End.LOADED)
                self._kv_loaded()
                resources.kv_took(custody.prefill, url, tried.first_s)
            if self.prefill_over is not None:
                await self._counts_came(self.prefill_over)
            try:
                await self._pass_on()
            finally:
                tried.decode_s = resources.now() - first_at
            self._whole = True
            verdict = GOOD
            self._compare()
            if self._turn is not None:
                turn.streamed(self._turn, self.relay)
            return Answered(None)
        except asyncio.CancelledError:
            if not self._data_came:
                await self._end_if_accepted()
            raise  # a handle that has not ended is released below, once the leg is closed
        except EngineError as error:
            streamed = self._data_came and not self._whole
            sent_beside = self.gave_up and self._leg is not None
            request.broke(self._lease, error, self._sent_at, streamed=streamed, beside=sent_beside)
            if not self.gave_up:
                verdict = verdict_of(error, streamed=streamed)
                if not streamed and is_doubtful(error):
                    request.in_doubt().answer_failed(self._lease, with_kv=custody is not None)
            return self._failed(error)
        finally:
            open_legs.remove(self, ended_well=resources.now() if verdict is GOOD else None)
            if self._leg is not None and not self._closes_later:
                if self._whole:
                    self._leg.let_finish(FINISH_GRACE)
                else:
                    late_close.close(self._leg, None if self._data_came else custody)
            if self._timer is not None:
                self._timer.cancel()
            if self._asking is not None:
                self._asking.cancel()
                self._asking = None  # its CancelledError refers to this leg
            if self._turn is not None:
                turn.over(self._turn, self.relay)
            if custody is not None:
                custody.on_gone = None  # it refers to this leg
                if self._expected:
                    resources.auditor.over(
                        self._engine, self._expected, loaded=custody.how is End.LOADED
                    )
                if not self._closes_later:
                    custody.release()  # whatever has not ended by now
            if beside:
                beside = (beside + open_legs.flowing) // 2
                open_legs.flowing -= 1
            if self._loads and verdict is GOOD:
                self._attempt.loaded(self._lease, self.since)
            else:
                resources.close(self._lease, verdict, self.relay, beside)

    # -- asking

    async def _first_data(self) -> Answer | StreamStarted:
        """Send the request. Wait for its first data, or the whole of an unstreamed answer.

        Raises:
            EngineError: the leg failed before that.
        """
        request, custody, deadlines = self._request, self._custody, self._resources.deadlines
        if self._in_silence:
            self._resources.down_watch.watch()  # its deadline is that of the request
        elif custody is not None and custody.promised:
            # The prefill engine may be asked twice.
            self._first_data_within(deadlines.first_token + 2 * deadlines.prefill)
        else:
            self._first_data_within(deadlines.first_token)
        # Nothing here may refer to the request any longer than until it is written.
        message = partial(self._message, request.parsed, request.prompt)
        self._leg = await self._client.send(message, self._sink())
        del message
        return await self.relay.first

    def _message(self, parsed: Parsed, prompt: Prompt | None) -> Message:
        """Return the request, which is written in the same step: here the handle is given to the
        engine.

        `parsed`, `prompt`: as they were when the leg began, whatever has become of the client's
        request.

        Raises:
            EngineError: the request is not wanted any more. The engine may have taken seconds to be
                connected to.
        """
        if self._ended_by is not None:  # it would wait for KV that does not come
            raise self._ended_by
        attempt, custody, headers = self._attempt, self._custody, self._request.headers
        self._sent_at = self._resources.now()
        self._request.sent()
        if custody is None:
            body = alone_body(attempt.parsed_for(self._url, parsed), prompt)
            return self._client.request(headers.path, headers.headers, body)
        handle = custody.spend(self._lease.engine.run_number)
        if (turns := self._resources.turns) is not None and not custody.promised:
            self._turn = turn.opened(self._request, attempt, turns, custody, handle, self._engine)
        assert prompt is not None
        own = headers.headers
        if (shared := attempt.shared_id) is not None:
            parsed, own = parsed.named(shared), headers.named(shared)
        leg = self._resources.transfer.contract.decode(parsed, prompt, handle, attempt.dispatch)
        return self._client.request(leg.route.path, own + leg.headers, leg.content)

    def _sink(self) -> Sink:
        """Return what gets the engine's answer: the relay, or what changes the answer on its way
        there.

        Raises:
            KvGoneError: the handle has ended, whose first token the answer would begin with.
        """
        custody, shared, headers = self._custody, self._attempt.shared_id, self._request.headers
        if custody is None:
            return self.relay
        if shared is not None:
            return IdSink(self.relay, shared, self._attempt.shown_id)
        handle = custody.handle
        if handle.first is None:
            return self.relay
        if not isinstance(handle, Handle):
            raise KvGoneError(f"the KV at {custody.prefill} is gone")
        return SpliceSink(self.relay, Splice(self._request.parsed, handle, headers.request_id))

    # -- the deadline of the first data

    def _first_data_within(self, seconds: float) -> None:
        """Begin the deadline of the first data, in place of the one before."""
        if self._timer is not None:
            self._timer.cancel()
        self._first_token_s = seconds
        self._timer = self._resources.clock.after(seconds, self._first_data_late)

    def _first_data_late(self) -> None:
        """The deadline has come. The engine may be seen to work: then it gets as long again."""
        if self.relay.status == 0 and self._leg is None:
            self._end_late()
        else:
            self._asking = asyncio.get_running_loop().create_task(
                self._ask_engine(), name="does a silent engine work"
            )

    async def _ask_engine(self) -> None:
        resources, custody = self._resources, self._custody
        works = await resources.works(self._url, Wait.FIRST_TOKEN.value)
        if works and custody is not None and custody.awaits_push and not custody.promised:
            works = not await resources.is_push_lost(custody)
        if works:
            self._first_data_within(resources.deadlines.first_token)
        else:
            self._end_late()

    def _end_late(self) -> None:
        text = f"{self._url} sent no data in {self._first_token_s:g} s"
        self._end(EngineTimeoutError(text, wait=Wait.FIRST_TOKEN))

    # -- ended from outside

    def _end(self, error: EngineError) -> bool:
        """End the leg, unless data has come. Return whether this has ended it."""
        if self.relay.first.done():
            return False
        self._ended_by = error
        self.relay.failed(error)
        return True

    def give_up(self) -> None:
        """The prefill has failed: close the leg, unless data has come."""
        self.gave_up = self._end(EngineError("the prefill has failed")) or self.gave_up

    def _kv_gone(self, why: str, prefill_lost: bool) -> None:
        """Fail the leg, unless data has come: its KV will not come, or the decode engine may read
        another prompt's KV.
        """
        if self._end(EngineError(why)):
            self.gave_up = self._lost = prefill_lost

    async def _end_if_accepted(self) -> None:
        """The client has left before any data. If the engine has the request, closing the leg makes
        it free the KV.
        """
        custody, resources = self._custody, self._resources
        if self._leg is None or custody is None or custody.state is None:
            return
        holder = resources.transfer.contract.holder
        if isinstance(holder, PushedToDecode):
            if holder.release_body is None:
                await self._has_begun()
            # What waits for the KV gets it, and what does not leaves it to the prefill engine's
            # lease.
            custody.end(End.ABORTED)
        elif (
            not self._request.parsed.stream
            and resources.clock.now() - self._sent_at > ACCEPTED_UNSEEN
        ):
            # The client may have had a deadline: it does not wait for the engine's answer.
            self._closes_later, self._attempt.custody = True, None
            closing = late_close.ask_and_close(
                self._leg,
                custody,
                partial(resources.is_alive, self._url),
                resources.clock,
                in_silence=self._in_silence,
            )
            resources.custodian.spawn(closing, "is a silent engine healthy")
        elif await self._is_accepted():
            custody.end(End.ABORTED, in_silence=self._in_silence)

    async def _has_begun(self) -> None:
        """Wait until the engine has had `ACCEPT_GRACE` to begin with the request.

        One that is closed before the engine's scheduler has seen it asks for no KV, and nothing
        else could free it.
        """
        clock = self._resources.clock
        try:
            with clock.within(max(0.0, self._sent_at - clock.now() + ACCEPT_GRACE)):
                await self.relay.first_again()
        except EngineError as error:
            drop_traceback(error)
        except TimeoutError:
            pass

    async def _is_accepted(self) -> bool:
        """Return whether the engine has the request. If it has, closing the leg frees the KV.

        A stream shows it by its headers, unless an error follows: an engine may refuse a request in
        the stream. What shows nothing behind its headers waits for its turn, or for KV. An answer
        that is not streamed shows nothing before its end.
        """
        relay, clock = self.relay, self._resources.clock
        try:
            with clock.within(ACCEPT_GRACE):
                await relay.accepted.wait()
        except TimeoutError:
            return False
        if relay.status != 200:
            return False  # refused or lost: then the engine owns nothing
        try:
            with clock.within(ACCEPT_GRACE):
                await relay.first_again()
        except EngineError as error:
            drop_traceback(error)
            # a deadline on its silence ended it, as the client did
            return isinstance(error, EngineTimeoutError)
        except TimeoutError:
            pass
        return True

    # -- as an open leg of its engine

    def last_sign(self) -> float:
        """Return when the last data came that went on to the client."""
        fast_path = self.relay.fast_path
        return fast_path.last if fast_path.events else 0.0

    @property
    def in_silence(self) -> bool:
        """Whether its engine sends nothing now though it works."""
        return self._in_silence and not self.relay.first.done()

    @property
    def stalled_before(self) -> int:
        """How many engines have stood still under its request before."""
        return self._request.stalled

    @property
    def must_progress(self) -> bool:
        """Whether its engine has the KV, and its client reads."""
        return not self.relay.paused and (self._custody is None or self.relay.has_data)

    @property
    def waits_for(self) -> str | None:
        """The prefill engine of its KV, before its first data."""
        return None if self._custody is None or self.relay.has_data else self._custody.prefill

    def source_lost(self, why: str) -> None:
        """End it as one whose prefill has failed."""
        custody = self._custody
        # pushes are looked after by `kv.lost_pushes`
        if custody is not None and not custody.awaits_push:
            custody.source_lost(why)

    def fail(self, error: EngineError) -> None:
        """End it, before its first data or in the stream."""
        if not self._end(error):
            self.relay.failed(error)

    # -- while the prefill engine works, too

    def kv_made(self, at: float) -> None:
        """The prefill engine has answered at that time: from now on, the first data has its
        deadline.
        """
        custody = self._custody
        assert custody is not None
        self._kv_made_at = at
        self._show_cached_counts()
        if self.since:
            self._request.may_be_answered = not self._loads
            self._expect(custody.handle.prompt_tokens)
            if not self._in_silence and not self.relay.first.done():
                self._first_data_within(self._resources.deadlines.first_token)

    def _expect(self, tokens: int) -> None:
        self._expected = tokens
        self._resources.auditor.asked(self._engine, tokens)

    async def _counts_came(self, over: OneShotEvent) -> bool:
        """Wait for the prefill engine's answer beside the decode engine's data, since only it has
        the counts of its cache.

        `over` is set then. Return whether it has come: before the data, behind it, or at the same
        moment. The push comes before it, but the answer is on its way by then.
        """
        custody = self._custody
        if custody is None:
            return False
        try:
            with self._resources.clock.within(COUNTS_GRACE):
                await over.wait()
        except TimeoutError:
            logger.info(
                "%s has pushed KV, and not answered: the answer shows no counts of its cache",
                custody.prefill,
            )
        return not custody.promised

    def _show_cached_counts(self) -> None:
        """Have the answer's usage show what the prefill engine found in its cache, where the decode
        engine can't know it.
        """
        assert self._custody is not None
        counts, events = self._custody.handle, self.relay.filter
        events.cached_tokens, events.created_cache_tokens = (
            counts.cached_tokens,
            counts.created_cache_tokens,
        )

    def _with_cached_counts(self, answer: Answer) -> Answer:
        """Return a whole answer with those counts, which may have come behind it."""
        self._show_cached_counts()
        return Answer(answer.status, answer.headers, self.relay.filter.counted(answer.body))

    # -- the stream

    async def _pass_on(self) -> None:
        """Pass a stream on to the client until it is over.

        Raises:
            EngineError: it failed after its first data.
        """
        request, resources, relay, url = self._request, self._resources, self.relay, self._url
        custody, shared, leg = self._custody, self._attempt.shared_id, self._leg
        reads: Reads | None = leg
        direct = custody is None or custody.handle.first is None
        if custody is not None and shared is not None:
            # Reads may take the fast path only if the client's answer has the same lengths as the
            # engine's.
            shown = self._attempt.shown_id
            direct = direct and len(shared) == len(shown)
            reads = None if leg is None else RenamedReads(leg, shared, shown)
        stream_to = request.stream_to
        request.stream_flows()
        relay.flow(stream_to(relay), reads, direct=direct)
        del stream_to
        request.keep_record()

        def passed(wait: Wait) -> None:
            resources.observers.notify(DeadlinePassed(wait.value, url))

        works = partial(resources.works, url, Wait.BETWEEN_TOKENS.value)
        await relay.watch(resources.clock, resources.deadlines.between_tokens, passed, works)

    # -- what came of it

    def _refusal(self, answer: Answer) -> AskAgain | CannotSplit | ModelRefused | None:
        """Decide what a whole answer means for the KV. Return why it can't go to the client, None
        if it can.

        Raises:
            EngineError: another engine may do better.
        """
        custody, url = self._custody, self._url
        if answer.status == 200:
            if sse.is_aborted(answer.body):
                raise EngineError(f"{url} gave the answer up half-way")
            if self.relay.usage is None:
                raise EngineError(f"{url} answered 200 with something that is no completion")
            if custody is not None:
                custody.end(End.LOADED)
            return None
        if not is_clients_fault(answer):
            raise refused(url, answer)
        if is_unknown_model(answer):
            return ModelRefused(url, answer)
        if answer.status == 400 and is_about_ours(answer, added_fields(self._request.parsed)):
            raise OwnBodyRefusedError(
                f"{url} refused what the client has not sent: {error_text(answer.body)}"
            )
        if custody is None:
            return (
                AskAgain() if answer.status == 400 and self._attempt.added_is_refused(url) else None
            )
        if custody.handle.first is not None:
            # This leg is not the client's own request: only an engine that gets that can say what
            # is wrong with it.
            return CannotSplit(Alone.PREFILL_REFUSED, exclude=custody.prefill)
        # 401 and 404 come from before the handler that releases KV.
        if answer.status == 400 and self._request.parsed.route.form.frees_refused:
            error_type, param = error_kind(answer.body)
            if self._resources.transfer.contract.holder.refusal_released(error_type, param):
                custody.end(End.REFUSED)
        if self._loads:  # as above
            return CannotSplit(Alone.PREFILL_REFUSED, exclude=custody.prefill)
        return None

    def _failed(self, error: EngineError) -> DecodeFailed | PrefillFailed:
        """Decide what the failure of the leg means for the KV. Return its outcome."""
        custody, url, lost = self._custody, self._url, self._lost
        before_data, leave_out = not self._data_came or self._whole, None
        if custody is not None:
            has_handle = custody.was_asked and before_data and not (self.gave_up or lost)
            if has_handle and is_of_kv(error, awaits_push=custody.awaits_push):
                leave_out = self._kv_failed(custody.prefill, is_counted=custody.was_unread)
            if isinstance(error, EngineUnreachableError):
                custody.decode_answered()
            if self.gave_up and custody.decode_waits:
                custody.end(End.ABORTED)  # the prefill may still end: then its KV frees both sides
            elif lost or isinstance(error, EngineTimeoutError):
                custody.decode_was_late(accepted=self.relay.status == 200)
            if lost:
                return PrefillFailed(custody.prefill, Alone.PREFILL_FAILED, error)
        wait = (
            error.wait if isinstance(error, EngineTimeoutError | EngineUnreachableError) else None
        )
        if wait is not None and not self._data_came:
            self._resources.observers.notify(DeadlinePassed(wait.value, url))
        return DecodeFailed(url, error, not before_data, leave_out)

    def _kv_failed(self, prefill: str, *, is_counted: bool = False) -> str:
        """Note that the prompt's KV did not get from one engine to the other. The prompt may be the
        cause itself.

        `is_counted`: the engine has reported it, too. Return which of the two is left out if the
        prompt is tried again.
        """
        request, resources = self._request, self._resources
        first = request.kv_failed() and not is_counted
        doubtful = request.in_doubt()
        doubtful.transfer_failed(FailedTransfer(prefill, self._url, resources.now(), first))
        return resources.scheduler.left_out(prefill, self._url, doubtful.transfers)

    def _kv_loaded(self) -> None:
        """Count a prompt whose KV was loaded."""
        custody = self._custody
        if custody is not None and custody.how is End.LOADED:
            self._resources.scheduler.kv_loaded(custody.prefill, self._url, self.since)

    def _compare(self) -> None:
        """Compare the prompt lengths that both engines reported; of one alone, what was expected of
        its cache.
        """
        custody, usage = self._custody, self.relay.usage
        if custody is None:
            self._attempt.counted(self._lease, usage)
        elif usage is not None and not custody.promised:
            counted = custody.handle.prompt_tokens
            self._resources.auditor.compared(
                custody.prefill, self._url, counted, usage.prompt_tokens
            )
