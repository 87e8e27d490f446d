"""Which trials are carried out, in which order, and what they show of `--max-num-batched-tokens`.
Knows no sockets.

All kinds of trials are carried out once, then again: a slow change of the machine meets all of
them. The time for all may end after any of them.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from pdproxy_lab.calibrate.rows import (
    AloneRow,
    ChunkRow,
    DecodeRow,
    alone_row,
    chunk_row,
    decode_row,
)
from pdproxy_lab.calibrate.trials import MergedError, OutOfTimeError, Runner, Seen, Trial

SHORT = 32
"""Tokens of the short prompts of streams."""
_SMALLEST = 48
"""Tokens of the shortest prompts. Lengths are doubled, and none is a power of two, as budgets are:
the last step of a prompt that is just over a budget has few tokens, and hardly shows.
"""
_LADDER = 2
_ROUNDS = 3
_DECODE_OUTPUT = 48
_AFTER = 10
"""Tokens of a stream after a prompt beside it should have been answered."""
_STREAMS = (1, 2, 4, 8, 16, 32, 64)
_LONG_STREAMS = (1, 2, 4, 8)
_LONGEST = 4096
"""Tokens of the long prompts of streams, if the engine takes them."""
_TRIES = 3
_MOST_MERGED = 12
"""Trials without times, after which the engine is taken for one whose tokens never come one by
one.
"""
_MOST_OUTPUT = 1024
_NO_STEPS = "the steps of prompts can't be told apart"
_SHARE = 0.02
"""The share of the whole time that one prompt may take."""
_MANY = 4
"""How many times as long a trial with many prompts or streams may take."""
_STREAM_TOKENS = 256
"""Tokens that are left for the stream beside the longest prompt."""


@dataclass(frozen=True, slots=True)
class ExperimentLimits:
    """What the engine takes, and how long all may last."""

    max_model_len: int
    kv_tokens: int | None = None
    """Tokens whose KV it holds; None: not known."""
    max_num_seqs: int | None = None
    budget: int | None = None
    """`--max-num-batched-tokens`, where the user says it."""
    seconds: float = 300.0


@dataclass(slots=True)
class Measured:
    """All that was carried out."""

    trials: list[tuple[Trial, Seen]] = field(default_factory=list)
    decodes: list[DecodeRow] = field(default_factory=list)
    chunks: list[ChunkRow] = field(default_factory=list)
    alone: list[AloneRow] = field(default_factory=list)
    budget: int | None = None
    budget_note: str = ""
    """How the budget was found, or why not."""
    budget_most: int | None = None
    """It is at most so much, if it was not found; None: not known."""
    complete: bool = False
    """Whether the time was enough for all trials."""
    notes: list[str] = field(default_factory=list)
    """What does not agree with the options."""


class Experiments:
    """Carries out the trials. `on_trial` is called with a trial's name before each."""

    def __init__(
        self, run: Runner, limits: ExperimentLimits, on_trial: Callable[[str], None] | None = None
    ) -> None:
        self._run = run
        self._limits = limits
        self._on_trial = on_trial
        self.measured = Measured()
        if limits.budget is not None:
            self.measured.budget, self.measured.budget_note = limits.budget, "given"
        self._step = 0.0
        """Seconds of a decode step, as far as known."""
        self._slope = 0.0
        """Seconds per prompt token, as far as known."""
        self._one_step = 0
        """The longest prompt that was computed in one step, beside a stream."""
        self._merged = 0
        self._longest: int | None = None
        """The longest prompt of all; None: not known yet."""

    async def all(self) -> Measured:
        """Carry out everything, or what the time is enough for.

        Raises:
            TrialError: one failed.
        """
        try:
            await self._warm_up()
            for number in range(_ROUNDS):
                await self._decode()
                await self._ladder()
                if number == 1:
                    await self._find_budget()
            self.measured.complete = True
        except OutOfTimeError:
            pass
        return self._counted()

    def _counted(self) -> Measured:
        """Keep the prompts whose number of steps is what the budget says, or the usual one: a stall
        looks like a step.
        """
        found = self.measured
        if found.budget is not None:
            found.chunks = []
            for trial, seen in found.trials:
                if trial.streams and trial.beside:
                    chunk = found.budget - trial.streams
                    if trial.beside[0] > chunk and trial.beside[0] % chunk == 1:
                        continue  # a chunk of one token is as a decoding sequence
                    row = chunk_row(trial, seen, -(-trial.beside[0] // chunk))
                    found.chunks += [row] if row is not None else []
        else:
            usual = self._usual_steps()
            found.chunks = [row for row in found.chunks if row.steps == usual[row.tokens]]
        if not found.budget_note:
            found.budget_note = "the time ended before it was found"
        return found

    def _usual_steps(self) -> dict[int, int]:
        """Return the usual number of steps for each length of a prompt; of two equally frequent
        ones the lower.
        """
        counts: dict[int, Counter[int]] = {}
        for row in self.measured.chunks:
            counts.setdefault(row.tokens, Counter())[row.steps] += 1
        return {
            tokens: min(one, key=lambda steps: (-one[steps], steps))
            for tokens, one in sorted(counts.items())
        }

    async def _do(self, trial: Trial) -> Seen | None:
        """Carry out a trial. None: its tokens' times are not known, as it happens when the machine
        is busy.
        """
        if self._on_trial is not None:
            self._on_trial(trial.name)
        try:
            seen = await self._run(trial)
        except MergedError:
            self._merged += 1
            if self._merged >= _MOST_MERGED:
                raise
            return None
        self.measured.trials.append((trial, seen))
        return seen

    def _fits(self, trial: Trial) -> bool:
        limits = self._limits
        longest = max(
            (trial.prompt_tokens + trial.output_tokens, *(one + 1 for one in trial.beside))
        )
        return (
            longest <= limits.max_model_len
            and (limits.kv_tokens is None or trial.tokens <= limits.kv_tokens * 0.8)
            and (
                limits.max_num_seqs is None
                or trial.streams + len(trial.beside) <= limits.max_num_seqs
            )
        )

    async def _warm_up(self) -> None:
        for _ in range(2):
            with contextlib.suppress(MergedError):
                await self._run(Trial("warm-up", 1, SHORT, 12, (_SMALLEST,)))
        await self._alone(8 * _SMALLEST)  # how slow it is, before many prompts are sent at once

    # -- decode

    async def _decode(self) -> None:
        for streams in _STREAMS:
            if not await self._streams(streams, SHORT):
                break
        long = int(min(_LONGEST, self._limits.max_model_len // 2, self._affordable()))
        if long >= 4 * SHORT:
            for streams in _LONG_STREAMS:
                if not await self._streams(streams, long):
                    break

    async def _streams(self, streams: int, tokens: int) -> bool:
        """Carry out a trial of streams. Return whether more of them make sense."""
        # The first streams decode while the others' prompts are computed: they need so many more
        # tokens.
        steps = self._waits(streams * tokens)
        for _ in range(_TRIES):
            output = min(_DECODE_OUTPUT + steps, _MOST_OUTPUT)
            trial = Trial(
                f"{streams} stream{'s' if streams > 1 else ''} of {tokens} tokens",
                streams,
                tokens,
                output,
            )
            if not self._fits(trial) or (
                self._slope and streams * tokens * self._slope > self._most_s * _MANY
            ):
                return False
            seen = await self._do(trial)
            if seen is None:
                continue
            row = decode_row(trial, seen)
            if row is not None:
                self.measured.decodes.append(row)
                self._step = self._step or row.seconds
                return True
            steps = max(2 * steps, _DECODE_OUTPUT)
            taken = max(times[-1] for times in seen.streams) - min(
                times[0] for times in seen.streams
            )
            if taken * (_DECODE_OUTPUT + steps) / output > self._most_s * _MANY:
                break
        note = (
            f"{streams} streams of {tokens} tokens did not run together for long enough "
            f"(--max-num-seqs of the engine?)"
        )
        self.measured.notes += [note] if note not in self.measured.notes else []
        return False

    def _waits(self, tokens: int) -> int:
        """Return how many decode steps may pass while so many prompt tokens are computed beside
        them.
        """
        return 4 + -(-tokens // max(self._one_step, 256))

    @property
    def _most_s(self) -> float:
        return self._limits.seconds * _SHARE

    def _affordable(self) -> float:
        return self._most_s / self._slope if self._slope else 1024

    # -- prompts

    async def _ladder(self) -> None:
        tokens = _SMALLEST
        while tokens <= self._most_tokens():
            await self._alone(tokens)
            if await self._beside(tokens) is None:
                return
            tokens *= _LADDER
        # The longest one, too: it may be the only one that is cut.
        longest = self._longest = self._longest or self._most_tokens()
        if longest > tokens // _LADDER:
            await self._alone(longest)
            await self._beside(longest)

    def _most_tokens(self) -> int:
        limits = self._limits
        room = (
            limits.max_model_len
            if limits.kv_tokens is None
            else int(limits.kv_tokens * 0.8) - _STREAM_TOKENS
        )
        return int(min(limits.max_model_len - 2, room, max(self._affordable(), 8 * _SMALLEST)))

    async def _alone(self, tokens: int) -> None:
        trial = Trial(f"a prompt of {tokens} tokens", beside=(tokens,))
        if self._fits(trial):
            seen = await self._do(trial)
            if seen is None:
                return
            row = alone_row(trial, seen)
            self.measured.alone.append(row)
            if tokens >= 256:
                self._slope = row.seconds / tokens

    async def _beside(self, tokens: int) -> ChunkRow | None:
        """Return how a prompt was computed beside one stream. None: it can't be, or the stream
        ended before.
        """
        waits = self._waits(tokens)
        if self._step:
            first = min((row.seconds for row in self.measured.alone), default=0.0)
            waits += math.ceil(first / self._step)
        for _ in range(_TRIES):
            trial = Trial(
                f"a prompt of {tokens} tokens beside a stream",
                1,
                SHORT,
                6 + waits + _AFTER,
                (tokens,),
            )
            if not self._fits(trial) or trial.output_tokens > _MOST_OUTPUT:
                return None
            seen = await self._do(trial)
            row = None if seen is None else chunk_row(trial, seen)
            if row is not None:
                if row.steps == 1:
                    self._one_step = max(self._one_step, tokens)
                self.measured.chunks.append(row)
                return row
            waits *= 2
        return None

    # -- the token budget

    async def _find_budget(self) -> None:
        """Find the longest prompt that is computed in one step beside a stream: the budget less one
        token.
        """
        if self._limits.budget is not None:
            self._check_given(self._limits.budget)
            return
        usual = self._usual_steps()
        cut = [tokens for tokens, steps in usual.items() if steps > 1]
        whole = [
            tokens
            for tokens, steps in usual.items()
            if steps == 1 and (not cut or tokens < max(cut))
        ]
        if not cut or not whole:
            longest = max(usual, default=0)
            self.measured.budget_note = (
                f"no prompt of up to {longest} tokens was cut" if not cut else _NO_STEPS
            )
            return
        # The longest prompt that takes one step is in [low, high]. What several steps say narrows
        # it further.
        low, high = max(whole), min([tokens for tokens in cut if tokens > max(whole)]) - 1
        # One step more or less may have been counted.
        for tokens in cut:
            least, most = (
                -(-tokens // (usual[tokens] + 1)),
                (tokens - 1) // max(usual[tokens] - 2, 1),
            )
            if max(low, least) <= min(high, most):
                low, high = max(low, least), min(high, most)
        powers = [1 << bits for bits in range(24) if low <= (1 << bits) - 1 <= high]
        between, self.measured.budget_most = f"it is {low + 1} to {high + 1}", high + 1
        if powers and await self._one(powers[0] - 1) and not await self._one(powers[0]):
            low = high = powers[0] - 1
        while low < high:
            middle = (low + high + 1) // 2
            fits = await self._one(middle)
            if fits is None:
                break
            low, high = (middle, high) if fits else (low, middle - 1)
        # Both sides once more: one stall would have led the search astray.
        if low == high and await self._one(low) and await self._one(low + 1) is False:
            self.measured.budget = low + 1
            self.measured.budget_note = (
                f"prompts of {low} tokens take one step beside a stream, of {low + 1} two"
            )
        elif len(powers) == 1:
            self.measured.budget = powers[0]
            self.measured.budget_note = (
                f"assumed: {between}, and this is the only power of two there"
            )
        else:
            self.measured.budget_note = f"{between}: {_NO_STEPS}"

    def _check_given(self, budget: int) -> None:
        """Note it if most prompts that were cut, or should have been, took other numbers of steps
        than the budget says.
        """
        said = {tokens: -(-tokens // (budget - 1)) for tokens in self._usual_steps()}
        cut = {
            tokens: steps
            for tokens, steps in self._usual_steps().items()
            if max(steps, said[tokens]) > 1
        }
        wrong = [tokens for tokens, steps in cut.items() if steps != said[tokens]]
        if 2 * len(wrong) > len(cut):
            one = wrong[-1]
            self.measured.notes.append(
                f"--max-num-batched-tokens {budget} does not seem to be the engine's: prompts of "
                f"{one} tokens took {cut[one]}"
                f" steps beside a stream, not {said[one]}"
            )

    async def _one(self, tokens: int) -> bool | None:
        """Return whether a prompt is computed in one step beside a stream, as most of up to three
        trials say.
        """
        votes: list[bool] = []
        while len(votes) < 3 and votes.count(True) < 2 and votes.count(False) < 2:
            row = await self._beside(tokens)
            if row is None:
                return None
            votes.append(row.steps == 1)
        return votes.count(True) >= 2
