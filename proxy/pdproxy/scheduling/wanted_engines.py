"""How many engines of each role the load of a pool needs, whatever there are: for autoscalers, and
for operators without one. Pure.

Prefill is work: the engine-seconds of prompts that arrive, and of those that wait. Answers take
places and time: each engine holds as many sequences as its options, its KV cache and the SLO's TPOT
allow. What a role needs is measured where its engines do the work, so requests that a decode engine
serves whole count for decode engines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from pdproxy.scheduling.auto.demand import DemandMeter, MeanRequest
from pdproxy.scheduling.auto.times import WorkTimes
from pdproxy.scheduling.leases import GOOD, Lease, Verdict
from pdproxy.scheduling.ledger_engine import DECODE, ENCODE, PREFILL, LedgerEngine, Role
from pdproxy.scheduling.policy import Ask
from pdproxy.scheduling.slo import NO_SLO, Slo

MEMORY_S = 90.0
"""How long a request counts in the averages, and after which time they are shown."""
BUSY = 0.88
"""The part of the time in which an engine should prefill: prompts come unevenly, and wait beyond
it.
"""
FULL_SEQUENCES, FULL_KV = 0.8, 0.85
"""The parts of an engine's sequences and of its KV cache that should be in use."""
WAIT_S = 300.0
"""Within how many seconds the engines should have done the work that waits: those that are started
for it serve only after some minutes.
"""
TPOT_PART = 0.7
"""The part of what the SLO's TPOT leaves beyond the shortest step that the mean should take, so
that nearly all requests keep the SLO.
"""
_ENOUGH = 16
"""Legs from which on what they show is known."""
_BYTES_PER_TOKEN = 4
_MOST_TOKENS = 1 << 20
"""A prompt has no more: images in base64 are many bytes and few tokens."""
_GAIN = 0.02
"""What an event weighs in a mean: some 50 make one."""
_SLOW_S = 3600.0
"""How long it is remembered how slow answers have been: with fewer engines they will be so again.
"""
_SLOWER = 3.0
"""At most so many times as slow as now: an engine may have stood still."""


class EngineSize(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine can do, as far as it is known. `times`: by its profile, None without one.

    `max_num_seqs`: how many sequences it runs at once; `kv_tokens`: of how many tokens it holds the
    KV; None where unknown.
    """

    times: WorkTimes | None = None
    max_num_seqs: int | None = None
    kv_tokens: int | None = None


UNKNOWN = EngineSize()


class Wanted(msgspec.Struct, frozen=True):
    """How many engines of a role the load needs. `because`: what needs them: `prompts`,
    `sequences`, `KV` or `TPOT`.
    """

    engines: float
    because: str


class _Mean:
    """A ratio of two sums that forget. `value`: as long as there are none."""

    __slots__ = ("_of", "_sum", "count", "value")

    def __init__(self, value: float = 0.0) -> None:
        self._sum = self._of = 0.0
        self.value = value
        self.count = 0
        """Of what was added."""

    def add(self, one: float, of: float, count: int = 1) -> None:
        """Add to both sums what came of so many events."""
        kept = (1.0 - _GAIN) ** count
        self._sum, self._of = self._sum * kept + one, self._of * kept + of
        self.count += count
        if self._of > 0.0:
            self.value = self._sum / self._of


class _Come:
    """What has come since the last look: prompts, and the sums of their tokens and of the squares
    of these. `meter`: what came before.
    """

    __slots__ = ("count", "meter", "squares", "tokens")

    def __init__(self) -> None:
        self.meter = DemandMeter(MEMORY_S, MEMORY_S)
        self.count = self.tokens = self.squares = 0

    def add(self, count: int, tokens: int) -> None:
        """Note one prompt (`count` 1), or that one was noted that will come again (-1)."""
        self.count += count
        self.tokens += count * tokens
        self.squares += count * tokens * tokens

    def mean(self, now: float) -> MeanRequest | None:
        """Return the mean request and the rate, None if there was none lately."""
        self.meter.add_all(now, self.count, self.tokens, self.squares)
        self.count = self.tokens = self.squares = 0
        return self.meter.mean(now)


class _Gone:
    """What has ended since the last look: how many, the sum of their prompts' tokens, and how long
    they took.
    """

    __slots__ = ("count", "seconds", "tokens")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin again."""
        self.count = self.tokens = 0
        self.seconds = 0.0


class _Work:
    """What is known of the engines of one role. A request costs some additions; the rest is done
    at each look.
    """

    __slots__ = (
        "answered",
        "answers",
        "cached",
        "lost_answers",
        "lost_prefills",
        "made",
        "open",
        "output",
        "prefilled",
        "prefills",
        "prompts",
        "seconds",
        "silent",
        "size",
        "slowest",
        "slowest_at",
        "speed",
        "waiting",
        "waiting_tokens",
        "wholes",
    )

    def __init__(self) -> None:
        self.size = UNKNOWN
        self.prefills = _Come()
        """Prompts that are prefilled for other engines, and media that are encoded."""
        self.answers = _Come()
        """Prompts that come with another engine's KV."""
        self.wholes = _Come()
        """Prompts that one engine serves."""
        self.prefilled, self.lost_prefills = _Gone(), _Gone()
        """Of `prefills`: those that have ended well, with the time for which engines had worked for
        them; and the others.
        """
        self.answered, self.lost_answers = _Gone(), _Gone()
        """Of the others: the same, with the time from when their prompts were prefilled."""
        self.made = self.silent = 0
        """Tokens of the answers that have ended well since the last look; and how many of these
        have shown no tokens.
        """
        self.waiting = self.waiting_tokens = 0
        """Open legs of `prefills`."""
        self.open = self.prompts = 0
        """Sequences that decode, or wait for that; and their prompts' tokens."""
        self.speed = _Mean()
        """Seconds per token of prefill."""
        self.output = _Mean()
        """Tokens of an answer."""
        self.seconds = _Mean()
        """The time of an answer."""
        self.slowest = self.slowest_at = 0.0
        """The most seconds per token lately, at that time: it is forgotten from then on."""
        self.cached = _Mean()
        """The part of the prompts' tokens that engines find in their caches."""

    def look(self, *, are_full: bool) -> None:
        """Take over what has come and ended since the last look; what has come is also asked for
        behind this, by `_Come.mean`.

        `are_full`: whether the engines that answer were full: prompts may have waited until these
        had read the KV of others, and say nothing of what engines can do.
        """
        done, lost, come = self.prefilled, self.lost_prefills, self.prefills
        self.waiting += come.count - done.count - lost.count
        self.waiting_tokens += come.tokens - done.tokens - lost.tokens
        if done.count and not are_full and 0.0 < done.seconds < math.inf:
            self.speed.add(done.seconds, done.tokens, done.count)
        ended, gone = self.answered, self.lost_answers
        for one in (self.answers, self.wholes):
            self.open += one.count
            self.prompts += one.tokens
        self.open -= ended.count + gone.count
        self.prompts -= ended.tokens + gone.tokens
        if ended.count and 0.0 <= ended.seconds < math.inf:
            self.seconds.add(ended.seconds, ended.count, ended.count)
        if spoken := ended.count - self.silent:
            self.output.add(self.made, spoken, spoken)
        for part in (done, lost, ended, gone):
            part.clear()
        self.made = self.silent = 0

    @property
    def mean_output(self) -> float | None:
        """The mean tokens of an answer, None while unknown."""
        if self.output.count >= _ENOUGH:
            return self.output.value
        # such as embeddings: no answer has tokens
        return 0.0 if self.seconds.count >= _ENOUGH and not self.output.count else None

    def answer_s(self, now: float) -> float:
        """Return how long an answer takes at engines that have as much to do as they had lately."""
        output = self.mean_output
        if not output:
            return self.seconds.value
        pace, passed = self.seconds.value / output, now - self.slowest_at
        kept = self.slowest * math.exp(-passed / _SLOW_S) if passed > 0.0 else self.slowest
        self.slowest, self.slowest_at = max(pace, kept), now
        return min(self.slowest, _SLOWER * pace) * output


class WantedEngines:
    """Knows what a pool's requests ask of its engines. The ledger tells it of each lease, and it
    keeps in these what it needs: a prompt's expected `tokens`; of a prefill leg, the lease of the
    engine that is to answer (`answering`); of an answer, since when its prompt is prefilled, or is
    not to be elsewhere (`begun_at`).

    `size_of`: what an engine can do. Engines of one role are taken to be alike: the first one's
    size counts. `slo`: the pool's.
    """

    def __init__(self, size_of: Callable[[LedgerEngine], EngineSize], slo: Slo = NO_SLO) -> None:
        self._size_of, self.slo = size_of, slo
        self._work = {role: _Work() for role in Role}
        self._engines: Sequence[LedgerEngine] = ()
        self._present: frozenset[LedgerEngine] = frozenset()
        self._done_at: dict[LedgerEngine, float] = {}
        """When engines have ended a prefill leg last."""
        self._split_tokens, self._whole_tokens = _Mean(1.0), _Mean(1.0)
        """The prompts' tokens as engines count them, by those that were expected."""
        self._since: float | None = None
        self._roles: set[Role] = set()
        """Those that the pool has, or has had."""
        self._are_full = False
        """Whether the engines that answer were full at the last look."""
        self.rate = 0.0
        """Requests per second, at the last look. Read only."""

    def __repr__(self) -> str:
        busy = ", ".join(
            f"{role.value}: {work.waiting} prefills, {work.open} answers"
            for role, work in self._work.items()
            if role in self._roles
        )
        return f"<WantedEngines {busy}>"

    def configure(self, slo: Slo) -> None:
        """Have another objective."""
        self.slo = slo

    def engines_changed(self, engines: Iterable[LedgerEngine]) -> None:
        """An engine came, went or changed. `engines`: all of the pool."""
        self._engines = tuple(engines)
        self._roles.update([engine.role for engine in self._engines])
        self._present = frozenset(self._engines)
        for gone in self._done_at.keys() - self._present:
            del self._done_at[gone]

    # -- what the ledger tells

    def opened(self, leases: Sequence[Lease], ask: Ask) -> None:
        """Engines were leased for a request: one alone, or first the one that prefills."""
        if self._since is None:
            self._begin(ask.now)
        first = leases[0]
        tokens = ask.tokens or ask.prompt_bytes // _BYTES_PER_TOKEN or 1
        if tokens > _MOST_TOKENS:
            tokens = _MOST_TOKENS
        first.tokens = tokens
        work, role = self._work[first.engine.role], first.role
        if role is PREFILL or role is ENCODE:
            come = work.prefills
            if len(leases) > 1:
                first.answering = leases[1]
        else:
            come = work.wholes
            first.begun_at = ask.now
        come.count += 1
        come.tokens += tokens
        come.squares += tokens * tokens

    def restored(self, lease: Lease) -> None:
        """A lease was opened that an earlier ledger had given: its request has come before."""
        tokens = lease.tokens = min(lease.prompt_bytes // _BYTES_PER_TOKEN, _MOST_TOKENS)
        work = self._work[lease.engine.role]
        if lease.role is PREFILL or lease.role is ENCODE:
            work.waiting += 1
            work.waiting_tokens += tokens
        else:
            work.open += 1
            work.prompts += tokens
            lease.begun_at = lease.since

    def never_sent(self, lease: Lease) -> None:
        """A lease is given up in the step that has opened it, and its request will come again. Told
        before `closed`.
        """
        work, role, tokens = self._work[lease.engine.role], lease.role, lease.tokens
        if role is DECODE:
            return
        is_prefill = role is PREFILL or role is ENCODE
        (work.prefills if is_prefill else work.wholes).add(-1, tokens)
        gone = work.lost_prefills if is_prefill else work.lost_answers
        gone.count -= 1  # it will be added as it is closed
        gone.tokens -= tokens

    def closed(self, lease: Lease, verdict: Verdict, now: float, tokens: int | None) -> None:
        """A lease was closed. `tokens`: of the answer, None where unknown."""
        role, engine, prompt = lease.role, lease.engine, lease.tokens
        work, is_good = self._work[engine.role], verdict is GOOD
        if role is PREFILL or role is ENCODE:
            gone = work.prefilled if is_good else work.lost_prefills
            gone.count += 1
            gone.tokens += prompt
            answering, lease.answering = lease.answering, None
            if not is_good:
                return
            # Engines prefill one prompt after the other: it began when the one before had ended.
            done_at, begun_at = self._done_at, lease.since
            since = done_at.get(engine, begun_at)
            gone.seconds += now - max(since, begun_at)
            if engine in self._present:  # it may have been removed meanwhile
                done_at[engine] = now
            if answering is not None and not answering.closed:
                answering.tokens, answering.begun_at = prompt, now
                come = self._work[answering.engine.role].answers
                come.count += 1
                come.tokens += prompt
        elif (begun := lease.begun_at) is not None:
            gone = work.answered if is_good else work.lost_answers
            gone.count += 1
            gone.tokens += prompt
            if is_good:
                gone.seconds += now - begun
                if tokens is None:
                    work.silent += 1
                else:
                    work.made += min(tokens, _MOST_TOKENS)

    def counted(self, lease: Lease, prompt: int) -> None:
        """An engine says how many tokens a prompt has, before its lease is closed."""
        if prompt > 0 and (expected := lease.tokens):
            mean = self._split_tokens if lease.role is PREFILL else self._whole_tokens
            mean.add(min(prompt, _MOST_TOKENS), expected)

    def found_cached(self, role: Role, cached: float, tokens: float) -> None:
        """Engines of a role have begun prompts with so many tokens, and found so many of these in
        their caches.
        """
        if 0.0 <= cached <= tokens < math.inf:
            self._work[role].cached.add(cached, tokens)

    # -- what is needed

    def has(self, role: Role) -> int:
        """Return how many engines of a role can be used now."""
        return sum(engine.role is role and engine.available for engine in self._engines)

    def needed(self, now: float, waiting: float = 0.0) -> Mapping[Role, Wanted]:
        """Return how many engines the load needs, by their role. A role is left out while that is
        not known: within `MEMORY_S` of the beginning, and until enough was learned of engines
        without a profile.

        `waiting`: requests that wait for a place. They count for the role whose engines are full,
        and not if none are.
        """
        if self._since is None:
            self._begin(now)
        ratios, tpot = (self._split_tokens.value, self._whole_tokens.value), self.slo.tpot
        for role in dict.fromkeys([engine.role for engine in self._engines]):
            self._work[role].size = self._size(role)
        loads: dict[Role, _Load] = {}
        for role, work in self._work.items():
            if role in self._roles:
                work.look(are_full=self._are_full)
                loads[role] = _Load(role, work, now, self.has(role), ratios, tpot)
        self.rate = sum(load.rate for load in loads.values())
        full = {role for role, load in loads.items() if load.is_full}
        self._are_full = bool(full)
        if self._since is None or not now - self._since >= MEMORY_S:
            return {}
        found = {role: load.wanted(0.0, late=not full) for role, load in loads.items()}
        if waiting > 0.0:
            # What waits for decode engines must not count for prefill engines, nor the reverse.
            short = {
                role: wanted.engines / load.has
                for role, load in loads.items()
                if (wanted := found[role]) is not None
                and 0 < load.has <= wanted.engines
                and (role in full or not full)
            }
            if short:
                role = max(short, key=short.__getitem__)
                found[role] = loads[role].wanted(waiting, late=not full)
        return {role: wanted for role, wanted in found.items() if wanted is not None}

    def _begin(self, now: float) -> None:
        self._since = now
        for work in self._work.values():
            for come in (work.prefills, work.answers, work.wholes):
                come.meter.begin(now)

    def _size(self, role: Role) -> EngineSize:
        engines = [engine for engine in self._engines if engine.role is role]
        known = [engine for engine in engines if engine.evidence is not None]
        size = self._size_of((known or engines)[0])
        # no profile says how long an engine encodes
        return msgspec.structs.replace(size, times=None) if role is ENCODE else size


class _Load:
    """What is asked of the engines of one role at a moment, and how many of them that needs.

    `has`: how many there are; `ratios`: how many times the expected tokens engines count, of
    prompts that are split and of others; `tpot`: the SLO's, in seconds.
    """

    def __init__(
        self,
        role: Role,
        work: _Work,
        now: float,
        has: int,
        ratios: tuple[float, float],
        tpot: float | None,
    ) -> None:
        self._work, self._now, self.has = work, now, has
        self._ratios, self._tpot = ratios, tpot
        self._only_prefills = role is PREFILL or role is ENCODE
        self._prefills = work.prefills.mean(now)
        self._answers, self._wholes = work.answers.mean(now), work.wholes.mean(now)
        tokens = counted = self.rate = 0.0
        for mean, ratio in zip((self._answers, self._wholes), ratios, strict=True):
            if mean is not None:
                self.rate += mean.rate
                tokens += mean.rate * mean.tokens
                counted += mean.rate * mean.tokens * ratio
        ratio = counted / tokens if tokens else 1.0
        self._prompt = work.prompts / work.open * ratio if work.open else counted / (self.rate or 1)
        """The mean prompt of a sequence, in tokens."""
        held = self._held(work.open)
        self.is_full = work.open > 0 and held is not None and held.engines >= has
        """Whether the engines have as many sequences as they should, as far as that is known."""

    def wanted(self, waiting: float, *, late: bool) -> Wanted | None:
        """Return how many engines are needed, None while that is not known.

        `waiting`: requests that wait for them; `late`: whether prompts that wait at engines count.
        """
        to_prefill, to_answer = (waiting, 0.0) if self._only_prefills else (0.0, waiting)
        prefill, answering = self._prefill(to_prefill, late=late), self._answering()
        if prefill is None or answering is None:
            return None
        held = self._held(to_answer)
        engines = prefill + answering.engines + (0.0 if held is None else held.engines)
        if not 0.0 <= engines < math.inf:
            return None
        return Wanted(engines, "prompts" if prefill > answering.engines else answering.because)

    def _prefill(self, waiting: float, *, late: bool) -> float | None:
        """Return how many engines are needed to prefill for others."""
        work, mean = self._work, self._prefills
        if mean is None:
            return 0.0
        if (times := work.size.times) is not None:
            alone, _ = self._prefill_s(mean, times, self._ratios[0])
        elif work.speed.count >= _ENOUGH:
            alone = mean.tokens * work.speed.value
        else:
            return None
        backlog = waiting * alone
        if late and work.waiting > self.has:  # each engine works for one of them
            part = (work.waiting - self.has) / work.waiting
            backlog += part * work.waiting_tokens / mean.tokens * alone
        return mean.rate * alone / BUSY + backlog / WAIT_S

    def _prefill_s(self, mean: MeanRequest, times: WorkTimes, ratio: float) -> tuple[float, float]:
        """Return how long a mean prompt takes, and how much longer sequences wait for that."""
        cached = self._work.cached.value
        new = mean.tokens * ratio * (1.0 - cached)
        pairs = 0.5 * mean.squares * ratio * ratio * (1.0 - cached * cached)
        return times.queued_s(new, pairs)

    def _answering(self) -> Wanted | None:
        """Return how many engines are needed to answer clients."""
        work = self._work
        if not self.rate and not work.open:
            return Wanted(0.0, "sequences")
        held, output, times = self._held(work.open), work.mean_output, work.size.times
        if times is None or output is None:
            if held is None or (come := self._held(self.rate * work.answer_s(self._now))) is None:
                return None
            return max(held, come, key=_engines)
        # A step takes a time that is always the same (`base`), and what each sequence adds. Without
        # the first, the load would keep so many engines `busy`.
        base, tokens = times.step_s(0, 0), self.rate * output
        busy, options = 0.0, [held] if held is not None else []
        if (mean := self._answers) is not None:
            prompt = mean.tokens * self._ratios[0]
            step = times.per_sequence_s(prompt + output / 2)
            busy += mean.rate * (output * step + times.pull_s(prompt))
        if (mean := self._wholes) is not None:
            prompt = mean.tokens * self._ratios[1]
            step = times.per_sequence_s(prompt + output / 2)
            alone, longer = self._prefill_s(mean, times, self._ratios[1])
            busy += mean.rate * (output * step + longer)
            options.append(Wanted(mean.rate * alone / BUSY, "prompts"))
        # The fewer sequences an engine holds, the more often it spends `base` on a token.
        one = self._held(1.0)
        if one is None:
            options.append(Wanted(busy, "sequences"))
        else:
            engines = busy + tokens * base * min(one.engines, 1.0)
            options.append(Wanted(engines, one.because))
        if self._tpot is not None and base < self._tpot:  # else no number of engines keeps it
            tpot = base + TPOT_PART * (self._tpot - base)
            # With one sequence per engine at the most, these would be `tokens * tpot`.
            engines = min(busy / (1.0 - base / tpot), busy + tokens * tpot)
            options.append(Wanted(engines, "TPOT"))
        return max(options, key=_engines)

    def _held(self, sequences: float) -> Wanted | None:
        """Return how many engines can hold so many sequences, None if that is not known."""
        size, options = self._work.size, []
        if size.max_num_seqs:
            options.append(Wanted(sequences / (size.max_num_seqs * FULL_SEQUENCES), "sequences"))
        if size.kv_tokens:
            context = self._prompt + (self._work.mean_output or 0.0) / 2
            options.append(Wanted(sequences * context / (size.kv_tokens * FULL_KV), "KV"))
        return max(options, key=_engines, default=None)


def _engines(wanted: Wanted) -> float:
    return wanted.engines
