"""What an engine has to do, in a few numbers that each lease changes in constant time. Pure.

Prompts that wait are seconds of work, in the order of arrival. Sequences that decode are their
number and three sums: of their prompts' tokens, of their start times, and of the engine's steps
when they started. All of them get a token per step, so the steps that the engine has made since
then are their tokens: an engine's steps are counted by predicted times, and corrected by what
answers took.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

import msgspec

from pdproxy.scheduling.auto.correction import Factor, Handoff
from pdproxy.scheduling.auto.times import WorkTimes
from pdproxy.scheduling.ledger_engine import LedgerEngine

MEMORY_S = 4.0
"""How long an engine's delays are remembered, in seconds: what its sequences are to expect."""
MOST_BUSY = 0.9
"""The largest part of the time in which an engine's sequences are expected to wait for prompts."""
NOTHING_S = 1e-6
"""Less prefill than this is none."""
_WAIT_GAIN = 0.1
_ENOUGH_ALONE = 0.5
"""The part of an answer's steps that must be without prefill, if the answer says something of such
steps.
"""
_ENOUGH_TOKENS = 8
_SEQUENCE_S = 0.004
"""A sequence at an engine counts as so many seconds of work, where engines are put in an order."""
_SHARE_STEPS = 2.0
"""How much more than its share of the time a delay counts there, in steps."""


class PredictedLeg(msgspec.Struct, eq=False):
    """A lease: what was predicted of it. Times in monotonic seconds, durations in seconds."""

    opened_at: float
    tokens: int
    """Of the prompt."""
    output: float
    """Expected tokens of the answer."""
    seconds: float
    """Prefill; 0 where the KV comes from elsewhere."""
    plain_s: float
    """The same without the correction's factor."""
    steps: float
    """Steps that its prefill takes."""
    pull_s: float
    """How long the pull of its KV stops the engine's sequences."""
    residual_s: float = 0.0
    """How long the step takes that is under way when it comes."""
    began_at: float | None = None
    began_step: float = 0.0
    began_busy: float = 0.0
    began_alone: float = 0.0
    ttft_s: float = 0.0
    """A prediction; 0: none."""
    tpot_s: float = 0.0
    """A prediction; 0: none."""
    handoff: Handoff | None = None
    """Where its KV comes from elsewhere, and it was predicted how long that takes."""
    handoff_s: float = 0.0
    """With a handoff: from the end of the prefill to the first token, predicted without the
    handoff's ratio.
    """
    prefilled_at: float = 0.0
    """With a handoff: when the prefill was done; 0: not yet."""
    decode: PredictedLeg | None = None
    """Of a prefill: the leg that gets its KV, if that has a handoff."""
    weight: float = 1.0
    """What its request's miss counts."""
    unseen: bool = False
    """Whether its first token is not seen: its answer comes as a whole. Nothing is learned of
    how long it took.
    """


class PredictedLoad:
    """One engine."""

    __slots__ = (
        "_last_done",
        "_number",
        "_soonest",
        "_then",
        "_unseen",
        "alone_steps",
        "assumed",
        "began_steps",
        "began_sum",
        "busy_from",
        "busy_steps",
        "corrects",
        "decode_order",
        "decoding",
        "delay",
        "delay_at",
        "engine",
        "expected",
        "expected_tokens",
        "free_at",
        "kept",
        "outputs",
        "own",
        "pending_s",
        "pending_steps",
        "prefill",
        "prefill_order",
        "prompts",
        "pulls",
        "step",
        "steps",
        "times",
        "url",
        "wait_s",
        "weight",
    )

    def __init__(
        self,
        engine: LedgerEngine,
        times: WorkTimes,
        *,
        assumed: bool = False,
        corrects: bool = True,
    ) -> None:
        self.engine, self.url, self.times, self.corrects = engine, engine.url, times, corrects
        self.own: PredictedLoad = self
        """What our own leases make of it: what becomes of these is noted there."""
        self.assumed = assumed
        """Whether its times are generic ones."""
        self._unseen: list[tuple[float, int, PredictedLeg]] = []
        """Answers that come as a whole, by the time when they begin: a heap."""
        self._number = 0
        self.kept = False
        """Whether it is kept for prefill."""
        self.pending_s = 0.0
        """Prefill that is not done, in predicted seconds."""
        self.pending_steps = 0.0
        """The same in steps."""
        self.busy_from = 0.0
        """When the engine began, or will begin, with the first of it."""
        self.free_at = 0.0
        """When it will be done."""
        self.expected = 0
        """Leases whose first token is to come."""
        self.expected_tokens = 0
        """Of their prompts."""
        self.pulls = 0
        """The leases whose first token is to come, and whose KV comes from another engine."""
        self.decoding = 0
        self.weight = 0.0
        """What a miss of all that decode or are to begin counts: their number, if all are equal."""
        self.prompts = 0
        """Tokens of their prompts."""
        self.outputs = 0.0
        """Expected tokens of their answers."""
        self.steps = 0.0
        """Steps with decoding so far."""
        self.busy_steps = 0.0
        """Those with prefill, too."""
        self.alone_steps = 0.0
        """Those without, as they would be with no correction."""
        self.began_sum = self.began_steps = 0.0
        """The sums of when they began: in seconds, and in steps."""
        self._then = 0.0
        self.delay = self.delay_at = 0.0
        """The part of the time in which they waited lately, at that time: it is forgotten from then
        on.
        """
        self.wait_s = 0.0
        """How long first tokens took lately, from when their leases were opened."""
        self._last_done = self._soonest = 0.0
        self.prefill = Factor()
        self.step = Factor()
        self.prefill_order = 0.0
        """The smaller, the better for a prompt; only to find the engines that are worth a look."""
        self.decode_order = 0.0
        """The same for a sequence."""

    # -- what it has

    @property
    def known(self) -> bool:
        """Whether its times are known: from a profile, or from measurements."""
        return not self.assumed or self.prefill.known or self.step.known

    def context(self) -> float:
        """Return the tokens of the sequences that decode."""
        return self.prompts + self.decoding * self.steps - self.began_steps

    def delay_share(self, now: float) -> float:
        """Return the part of the time in which its sequences waited lately, for prompts and for
        pulls.
        """
        share = self.delay * math.exp((self.delay_at - now) / MEMORY_S)
        return min(MOST_BUSY, share)

    # -- what comes and goes

    def advance(self, now: float) -> None:
        """Count the steps until now."""
        passed = now - self._then
        if self._unseen:
            while self._unseen and self._unseen[0][0] <= now:
                self._begin_unseen(*heappop(self._unseen))
            passed = now - self._then
        if passed <= 0.0:
            return
        self._then = now
        decoding = self.decoding
        if not decoding:
            return
        times, steps = self.times, self.steps
        context, pending = self.prompts + decoding * steps - self.began_steps, self.pending_s
        if pending:
            begin, end = now - passed, self.free_at
            if self.busy_from > begin:
                begin = self.busy_from
            if now < end:
                end = now
            if end > begin:
                beside = (end - begin) / pending * self.pending_steps
                steps += beside
                self.busy_steps += beside
                passed -= end - begin
        alone = passed / times.step_s(decoding, context)
        self.steps = steps + alone
        self.alone_steps += alone * times.step_factor

    def opened(
        self, leg: PredictedLeg, *, arrives_at: float, answers: bool, longer_s: float
    ) -> None:
        """A lease was opened. Its prompt arrives a little later; `longer_s`: how long the engine's
        sequences will wait.
        """
        now, seconds = leg.opened_at, leg.seconds
        self.advance(now)
        self.delay = self.delay * math.exp((self.delay_at - now) / MEMORY_S) + longer_s / MEMORY_S
        self.delay_at = now
        if seconds:
            begins_at, free_at = arrives_at, self.free_at
            if self.decoding and free_at <= arrives_at:
                leg.residual_s = residual = 0.5 * self.times.step_s(self.decoding, self.context())
                begins_at += residual
            if free_at < begins_at:
                free_at = begins_at
                if not self.pending_s:
                    self.busy_from = begins_at
            self.free_at = free_at + seconds
            self._soonest = begins_at + seconds
            self.pending_s += seconds
            self.pending_steps += leg.steps
        else:
            self.pulls += 1
        if answers:
            self.expected += 1
            self.weight += leg.weight
            self.expected_tokens += leg.tokens
        self._order()

    def computed(self, leg: PredictedLeg, arrived_at: float, done_at: float, now: float) -> None:
        """A prompt was computed, or will not be (`done_at` is 0): what waits behind it is what is
        left.
        """
        self.advance(now)
        self._done(leg)
        if not done_at:
            self.free_at = min(self.free_at, now + self.pending_s)
        else:
            if self.decoding and not self.pending_s:
                self._recount(min(self.free_at, now) - done_at, leg.steps / leg.seconds)
            self.free_at = done_at + self.pending_s
            if self.pending_s:
                if self.free_at < self._soonest:  # the newest prompt had not come yet
                    self.free_at = self._soonest
                self.busy_from = self.free_at - self.pending_s
            began = self._last_done
            if began < arrived_at:
                began = arrived_at
            self._last_done = done_at
            took = done_at - began - leg.residual_s
            if self.prefill.add(max(0.0, took), leg.plain_s) and self.corrects:
                self.times.prefill_factor = self.prefill.value
        self._order()

    def _done(self, leg: PredictedLeg) -> None:
        self.pending_s -= leg.seconds
        self.pending_steps -= leg.steps
        if self.pending_s < NOTHING_S:
            self.pending_s = self.pending_steps = 0.0

    def begins_unseen(self, leg: PredictedLeg, at: float) -> None:
        """The first token of an answer will not be seen: it is taken to be there at that time, if
        the answer is not over.
        """
        leg.unseen = True
        self._number += 1
        heappush(self._unseen, (at, self._number, leg))

    def _begin_unseen(self, at: float, _: int, leg: PredictedLeg) -> None:
        if not leg.unseen:
            return  # it is over
        self._done(leg)
        self.began(leg, max(at, self._then))

    def _recount(self, seconds: float, per_s: float) -> None:
        """So many seconds were counted as steps with prefill, `per_s` of them each, and were not;
        below 0: the reverse.
        """
        beside = seconds * per_s
        alone = seconds / self.times.step_s(self.decoding, self.context())
        self.steps += alone - beside
        self.busy_steps -= beside
        self.alone_steps += alone * self.times.step_factor

    def began(self, leg: PredictedLeg, now: float) -> None:
        """The first token of an answer is there."""
        self.advance(now)
        if not leg.seconds:
            self.pulls -= 1
            if self.decoding:
                lost = leg.pull_s / self.times.step_s(self.decoding, self.context())
                self.steps -= lost
                self.alone_steps -= lost * self.times.step_factor
        self.expected -= 1
        self.expected_tokens -= leg.tokens
        self.prompts += leg.tokens
        self.outputs += leg.output
        self.wait_s += _WAIT_GAIN * (now - leg.opened_at - self.wait_s)
        leg.began_at, leg.began_step = now, self.steps
        leg.began_busy, leg.began_alone = self.busy_steps, self.alone_steps
        self.decoding += 1
        self.began_sum += now
        self.began_steps += leg.began_step

    def never_began(self, leg: PredictedLeg) -> None:
        """A lease was closed before its first token."""
        self.expected -= 1
        self.expected_tokens -= leg.tokens
        self.weight -= leg.weight
        if not leg.seconds:
            self.pulls -= 1
        self._order()

    def ended(self, leg: PredictedLeg, now: float, tokens: int | None) -> None:
        """An answer is over. `tokens`: of it, None if unknown."""
        self.advance(now)
        assert leg.began_at is not None
        self.decoding -= 1
        self.weight -= leg.weight
        self.prompts -= leg.tokens
        self.outputs -= leg.output
        self.began_sum -= leg.began_at
        self.began_steps -= leg.began_step
        predicted = self.steps - leg.began_step
        if tokens is not None and tokens > _ENOUGH_TOKENS and predicted > 0 and not leg.unseen:
            # What is left of its tokens without those of steps with prefill came in steps that only
            # decode. Where these were few, nothing is known.
            made = tokens - 1
            alone, expected = (
                made - (self.busy_steps - leg.began_busy),
                self.alone_steps - leg.began_alone,
            )
            if min(expected, alone) > _ENOUGH_ALONE * max(made, predicted):
                seconds = (now - leg.began_at) * alone / made
                if self.step.add(seconds, seconds * alone / expected) and self.corrects:
                    self.times.step_factor = self.step.value
        if not self.decoding:  # no rests of sums of floats
            self.outputs = self.began_sum = self.began_steps = self.steps = self.busy_steps = (
                self.alone_steps
            ) = 0.0
        self._order()

    def _order(self) -> None:
        sequences = self.decoding + self.expected
        self.prefill_order = self.free_at + _SEQUENCE_S * sequences
        context = self.prompts + self.expected_tokens
        self.decode_order = self.times.step_s(sequences, context) * (
            1.0 + _SHARE_STEPS * self.delay
        )
