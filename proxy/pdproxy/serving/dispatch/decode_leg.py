"""The leg that answers the client: a decode engine that gets the KV in our custody, or one engine alone.

Owns the leg, the engine's lease, and, once the request is sent, the end of the custody. The request is sent once, whatever the
connection looks like: whether another one follows is `recovery`'s to decide. Nothing reaches the client before the engine has
sent data, so that until then another engine can be asked.
"""

from __future__ import annotations

import asyncio
from functools import partial

from pdproxy.kit.clock import Timer
from pdproxy.kit.errors import EngineError, EngineTimeoutError, KvGoneError, Wait
from pdproxy.scheduling.leases import GOOD, NEUTRAL
from pdproxy.serving.dispatch import turn
from pdproxy.serving.dispatch.attempt import Attempt
from pdproxy.serving.dispatch.decode_answer import compare, failed, judge, kv_loaded
from pdproxy.serving.dispatch.decode_request import (
    alone_message,
    count_cached,
    decode_message,
    new_relay,
    sink,
    with_cached_counts,
)
from pdproxy.serving.dispatch.decode_start import accepted, awaits_data, begun, first_data
from pdproxy.serving.dispatch.decode_watch import counts_came_beside, pass_on
from pdproxy.serving.dispatch.failure_class import verdict_of
from pdproxy.serving.dispatch.open_leg import OpenAnswer
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
from pdproxy.serving.stream.phase import StreamStarted
from pdproxy.transfer.contract import PushedToDecode
from pdproxy.upstream.client import Answer
from pdproxy.upstream.connection import Leg, Message
from pdproxy.wire.request import Parsed, Prompt

FINISH_GRACE = 1.0
"""Seconds that an engine may take from its end mark to the end of its HTTP answer before the connection is dropped."""


class DecodeLeg:
    """The answering leg of an attempt. Run once. Without custody of any KV, the engine serves the request alone."""

    __slots__ = (
        "_asking",
        "_attempt",
        "_client",
        "_custody",
        "_ended_by",
        "_engine",
        "_expected",
        "_first_token_s",
        "_first_token_timer",
        "_lease",
        "_leg",
        "_lost",
        "_sent_at",
        "_starts_in_silence",
        "_turn",
        "_url",
        "gave_up",
    )

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._custody = attempt.custody
        self._starts_in_silence = attempt.request.parsed.starts_in_silence
        self._lease = attempt.assignment.leases[-1]
        self._url = self._lease.node.url
        self._engine = attempt.resources.engines.known[self._url]
        self._client = self._engine.client
        self._leg: Leg | None = None
        self._sent_at = 0.0
        """When the request was written, in monotonic seconds."""
        self._turn: OpenTurn | None = None
        self._expected = 0
        """Prompt tokens that the auditor expects by KV transfer."""
        self._first_token_timer: Timer | None = None
        self._first_token_s = attempt.resources.deadlines.first_token
        """Seconds that it has for its first data, before it is asked whether its engine works."""
        self._asking: asyncio.Task[None] | None = None
        """The question whether its engine works, although its deadline has come."""
        self._ended_by: EngineError | None = None
        """Why it was ended from outside, before any data."""
        self._lost = False
        """Whether that was the loss of the prefill engine before its push."""
        self.gave_up = False
        """Whether it ended because the prefill has failed."""

    def __repr__(self) -> str:
        return f"<DecodeLeg {self._url}, {self._attempt.relay!r}>"

    async def run(self) -> Answered | AskAgain | CannotSplit | DecodeFailed | ModelRefused | PrefillFailed:
        """Have the engine answer, and pass a stream on to its end. The lease and the custody end here.

        Closing the leg makes an engine that has the request free the KV on both sides; else the custody is released.
        """
        attempt, resources, custody, url = self._attempt, self._attempt.resources, self._custody, self._url
        started = resources.now()
        verdict = NEUTRAL
        data_came = whole = False
        legs, beside = self._engine.open_legs, 0
        new_relay(attempt)
        attempt.take(self._lease)
        attempt.asked_url = self._url
        open_leg = OpenAnswer(attempt, started, self._lease.prompt_bytes, self._end)
        legs.add(open_leg)
        try:
            if custody is not None:
                custody.is_for(url)
                custody.on_gone = self._kv_gone
                if not custody.promised:
                    self._expect(custody.handle.prompt_tokens)
            first = await self._first_data()
            first_at = resources.now()
            if custody is not None and first_at >= custody.sure_until and await resources.lease_may_have_ended(custody):
                custody.end(End.EXPIRED)
                raise KvGoneError(f"the lease of the KV at {custody.prefill} ended before {url} had sent data")
            data_came = True
            asked_at = max(started, attempt.kv_made_at)
            if isinstance(first, Answer):
                whole = True
                attempt.whole_s = first_at - asked_at if first.status == 200 else None
                if custody is not None:
                    custody.decode_answered()
                if (refusal := judge(attempt, self._url, first)) is not None:
                    return refusal
                verdict = GOOD
                kv_loaded(attempt, url, started)
                over = attempt.prefill_over
                if over is not None and first.status == 200 and await counts_came_beside(attempt, over):
                    first = with_cached_counts(attempt, first)
                compare(attempt, self._url)
                if custody is not None and first.status == 200 and attempt.relay is not None:
                    first = turn.whole(self._turn, first, attempt.request.parsed, attempt.relay)
                return Answered(first)
            attempt.first_s = first_at - asked_at
            if self._lease.trial or resources.ledger.placement is not None:
                resources.ledger.began(self._lease, first_at)
            legs.flowing += 1
            beside = legs.flowing
            if custody is not None:
                custody.end(End.LOADED)
                kv_loaded(attempt, url, started)
                resources.kv_took(custody.prefill, url, attempt.first_s)
            if attempt.prefill_over is not None:
                await counts_came_beside(attempt, attempt.prefill_over)
            try:
                await pass_on(attempt, self._leg, url)
            finally:
                attempt.decode_s = resources.now() - first_at
            whole = True
            verdict = GOOD
            compare(attempt, self._url)
            if self._turn is not None and attempt.relay is not None:
                turn.streamed(self._turn, attempt.relay)
            return Answered(None)
        except asyncio.CancelledError:
            if not data_came:
                await self._end_if_accepted()
            raise  # a handle that has not ended is released below, once the leg is closed
        except EngineError as error:
            attempt.broke(
                self._lease,
                error,
                self._sent_at,
                streamed=data_came and not whole,
                beside=self.gave_up and self._leg is not None,
            )
            verdict = (
                NEUTRAL if self.gave_up else verdict_of(error, with_kv=custody is not None and (not data_came or whole))
            )
            return failed(attempt, url, error, data_came=data_came, whole=whole, gave_up=self.gave_up, lost=self._lost)
        finally:
            legs.remove(open_leg, ended_well=resources.now() if verdict is GOOD else None)
            if self._leg is not None:
                if whole:
                    self._leg.let_finish(FINISH_GRACE)
                else:
                    late_close.close(self._leg, None if data_came else custody)
            if self._first_token_timer is not None:
                self._first_token_timer.cancel()
            if self._asking is not None:
                self._asking.cancel()
                self._asking = None  # its CancelledError refers to this leg
            if self._turn is not None:
                turn.over(self._turn, self._attempt.relay)
            if custody is not None:
                custody.on_gone = None  # it refers to this leg
                if self._expected:
                    resources.auditor.over(self._engine, self._expected, loaded=custody.how is End.LOADED)
                custody.release()  # whatever has not ended by now
            if beside:
                beside = (beside + legs.flowing) // 2
                legs.flowing -= 1
            resources.close(self._lease, verdict, attempt.relay, beside)

    # -- while the prefill engine works, too

    def kv_made(self) -> None:
        """The prefill engine has answered: from now on, the first data has its deadline."""
        resources, relay, custody = self._attempt.resources, self._attempt.relay, self._custody
        if relay is None or custody is None:
            return
        count_cached(relay, custody)
        self._expect(custody.handle.prompt_tokens)
        if not self._starts_in_silence and awaits_data(relay):
            self._first_data_within(resources.deadlines.first_token)

    def _first_data_within(self, seconds: float) -> None:
        """Begin the deadline of the first data, in place of the one before."""
        if self._first_token_timer is not None:
            self._first_token_timer.cancel()
        self._first_token_s = seconds
        self._first_token_timer = self._attempt.resources.clock.after(seconds, self._first_data_late)

    def _first_data_late(self) -> None:
        """The deadline has come. A stream's engine may be seen to work: then it gets as long again."""
        relay = self._attempt.relay
        if self._starts_in_silence or relay is None or (relay.status == 0 and self._leg is None):
            self._end_late()
        else:
            self._asking = asyncio.get_running_loop().create_task(self._ask_engine(), name="does a silent engine work")

    async def _ask_engine(self) -> None:
        resources, custody = self._attempt.resources, self._custody
        works = await resources.works(self._url, Wait.FIRST_TOKEN.value)
        if works and custody is not None and custody.awaits_push and not custody.promised:
            works = not await resources.is_push_lost(custody)
        if works:
            self._first_data_within(resources.deadlines.first_token)
        else:
            self._end_late()

    def _end_late(self) -> None:
        seconds = self._first_token_s
        self._end(EngineTimeoutError(f"{self._url} sent no data in {seconds:g} s", wait=Wait.FIRST_TOKEN))

    def give_up(self) -> None:
        """The prefill has failed: close the leg, unless data has come."""
        self.gave_up = self._end(EngineError("the prefill has failed")) or self.gave_up

    def _end(self, error: EngineError) -> bool:
        """End the leg, unless data has come. Return whether this has ended it."""
        relay = self._attempt.relay
        if relay is None or not awaits_data(relay):
            return False
        self._ended_by = error
        relay.failed(error)
        return True

    def _expect(self, tokens: int) -> None:
        self._expected = tokens
        self._attempt.resources.auditor.asked(self._engine, tokens)

    # -- asking

    def _message(self, parsed: Parsed, prompt: Prompt | None) -> Message:
        """Return the request, which is written in the same step: here the handle is given to the engine.

        `parsed`, `prompt`: as they were when the leg began, whatever has become of the client's request.

        Raises:
            EngineError: the request is not wanted any more. The engine may have taken seconds to be connected to.
        """
        if self._ended_by is not None:  # it would wait for KV that does not come
            raise self._ended_by
        attempt, custody = self._attempt, self._custody
        self._sent_at = attempt.resources.now()
        if custody is None:
            return alone_message(attempt, self._client, parsed, prompt)
        handle = custody.spend(self._lease.node.run_number)
        if attempt.resources.turns is not None and not custody.promised:
            self._turn = turn.opened(attempt, attempt.resources.turns, custody, handle, self._engine)
        assert prompt is not None
        return decode_message(attempt, self._client, parsed, prompt, handle)

    async def _first_data(self) -> Answer | StreamStarted:
        """Send the request, and wait for its first data.

        Raises:
            EngineError: the leg failed before its first data.
        """
        attempt, custody, resources = self._attempt, self._custody, self._attempt.resources
        request, in_silence = attempt.request, self._starts_in_silence
        timeout = resources.deadlines.total if in_silence else resources.deadlines.first_token
        if custody is not None and custody.promised and not in_silence:
            timeout += 2 * resources.deadlines.prefill  # the prefill engine may be asked twice
        relay, node = attempt.relay, self._lease.node
        assert relay is not None
        self._first_data_within(timeout)
        # Nothing here may refer to the request any longer than until it is written.
        message = partial(self._message, request.parsed, request.prompt)
        self._leg = await self._client.send(message, sink(attempt, relay))
        del message
        return await first_data(resources, relay, node, in_silence=in_silence)

    # -- what came of it

    async def _end_if_accepted(self) -> None:
        """The client has left before any data. If the engine has the request, closing the leg makes it free the KV."""
        custody, relay, resources = self._custody, self._attempt.relay, self._attempt.resources
        if self._leg is None or custody is None or custody.state is None or relay is None:
            return
        holder = resources.transfer.contract.holder
        if isinstance(holder, PushedToDecode):
            if holder.release_body is None:
                await begun(resources, relay, self._sent_at)
            # What waits for the KV gets it, and what does not leaves it to the prefill engine's lease.
            custody.end(End.ABORTED)
            return
        if await accepted(resources, self._url, relay, self._sent_at, stream=self._attempt.request.parsed.stream):
            custody.end(End.ABORTED, in_silence=self._starts_in_silence)

    def _kv_gone(self, why: str, prefill_lost: bool) -> None:
        """Fail the leg, unless data has come: its KV will not come, or the decode engine may read another prompt's KV."""
        if self._end(EngineError(why)):
            self.gave_up = self._lost = prefill_lost
