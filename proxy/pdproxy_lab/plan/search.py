"""Finds the arrangement with the highest capacity, with few simulations. Deterministic.

First with short runs: plain engines with each chunk size; then splits, from the number of prefill
engines that the bounds say is best, one engine more or less as long as it gets better, with each
chunk size of the prefill engines; then engines of role `any` with each chunk size, for the
placement `auto`. Then with long runs: those that were nearly the best. From the best one of each
kind on, what differs in one thing is tried at a rate just above, until nothing is better.
`exhaustive` tries all arrangements with long runs instead.

The simpler kind is the answer unless the other one is worth it: a split must serve more than 2 %
more than plain engines, and `auto` more than 2 % more than both. The search has chosen among many
with the same requests, so `auto` must show that with requests of other seeds, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import msgspec

from pdproxy_lab.plan.arrangement import (
    STATIC,
    Arrangement,
    ArrangementKind,
    any_role,
    everything,
    neighbours,
    plain,
    split,
)
from pdproxy_lab.plan.bounds import bound, work_of
from pdproxy_lab.plan.capacity import CapacitySearch, Level, place_of, rate_at
from pdproxy_lab.plan.question import Question, Traced

MAX_GPUS = 64
"""Larger fleets serve the same per GPU."""
MAX_REQUESTS = 20_000
"""Of one run."""
_TRACE_REQUESTS = 6_000
_RUN_S = 45.0
"""How long requests come in a long run, at the highest rate that any arrangement may serve."""
_PER_TOKEN_S, _LONG = 0.03, 2000
"""How much longer per token of the answers, up to so many tokens: until as many requests end as
begin.
"""
_LEAST_REQUESTS = 800
_CLOSE = 8
"""Steps of the grid below the best arrangement of short runs, within which long runs decide."""
_MAX_CLOSE = 6
WORTH = 2
"""Steps of the grid by which what is less simple must be better, or it is not worth it."""
_SLACK = 10
"""Steps of the grid by which a bound is not trusted."""


class FoundArrangement(msgspec.Struct, frozen=True):
    """An arrangement and the highest rate that it serves within the SLO, as a place in the grid;
    None: it never keeps it.
    """

    arrangement: Arrangement
    place: int | None
    exact: bool
    """Whether long runs found it."""

    @property
    def rate(self) -> float:
        """Requests per second; 0: none."""
        return 0.0 if self.place is None else rate_at(self.place)

    @property
    def rank(self) -> tuple[float, bool, tuple[int, int, int, int, str]]:
        """The best one is the smallest."""
        return (-self.rate, not self.exact, self.arrangement.rank)


class OtherSeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What the best of both serve in runs that the search has not seen."""

    auto: FoundArrangement
    static: FoundArrangement


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found. `best`: None if nothing keeps the SLO. `found`: all whose capacity is
    known, the best one first.
    """

    gpus: int
    best: FoundArrangement | None
    static: FoundArrangement | None = None
    """The best plain or split one; None: none keeps the SLO."""
    auto: FoundArrangement | None = None
    """The best one of role `any`; None: none keeps the SLO, or there is one GPU."""
    other_seeds: OtherSeeds | None = None
    """Of `auto` and `static`; None: `auto` was not worth it before."""
    found: tuple[FoundArrangement, ...]
    runs: int
    level: Level
    searched: int
    """Arrangements that were simulated."""


class SearchProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a search is."""

    gpus: int
    searched: int
    """Arrangements so far, with the one that begins."""
    runs: int
    """Simulations so far."""
    rate: float
    """The highest one so far, in requests per second, of short runs, too; 0: none."""


OnProgress = Callable[[SearchProgress], None]


def _nobody(_: SearchProgress) -> None:
    """Nobody is told."""


def levels(question: Question, gpus: int, requests: int | None, seeds: int) -> tuple[Level, Level]:
    """Return those of short and of long runs."""
    demand = question.demand
    if requests is None:
        if isinstance(demand, Traced):
            requests, most = len(demand.entries), _TRACE_REQUESTS
        else:
            work, most = work_of(question), MAX_REQUESTS
            rate = max(bound(one, work) for one in _balanced(question, gpus))
            requests = int(rate * (_RUN_S + _PER_TOKEN_S * min(work.output, _LONG)))
        requests = min(max(requests, _LEAST_REQUESTS), most)
    return Level(max(requests // 2, 1), 1, 3), Level(requests, seeds if demand.random else 1, 1)


def search(
    question: Question,
    gpus: int,
    *,
    requests: int | None = None,
    seeds: int = 3,
    on_progress: OnProgress = _nobody,
) -> Result:
    """Find the best arrangement of so many GPUs, one engine on each."""
    return _Search(question, gpus, requests, seeds, on_progress).smart()


def exhaustive(
    question: Question,
    gpus: int,
    *,
    requests: int | None = None,
    seeds: int = 3,
    on_progress: OnProgress = _nobody,
) -> Result:
    """Find it by trying all arrangements, with long runs."""
    return _Search(question, gpus, requests, seeds, on_progress).everything()


def gpus_for(
    question: Question,
    rate: float,
    *,
    requests: int | None = None,
    seeds: int = 3,
    on_progress: OnProgress = _nobody,
) -> Result:
    """Find the smallest number of GPUs that serves a rate, and their best arrangement. `best` is
    None if nothing keeps the SLO.

    Raises:
        ValueError: it needs more than `MAX_GPUS`.
    """
    work = work_of(question)
    per_gpu = max(bound(one, work) for one in _balanced(question, 8)) / 8
    least = max(math.ceil(rate / per_gpu / 1.1), 1)
    _enough(least, rate)
    known: dict[int, Result] = {}

    def at(gpus: int) -> Result:
        if gpus not in known:
            known[gpus] = search(
                question, gpus, requests=requests, seeds=seeds, on_progress=on_progress
            )
        return known[gpus]

    gpus = 2 if at(least).best is None and least == 1 else least  # only one that splits may keep it
    while (result := at(gpus)).best is not None and result.best.rate < rate:
        guess = math.ceil(gpus * rate / result.best.rate * 0.97)
        gpus = max(gpus + 1, min(guess, 2 * gpus))
        _enough(gpus, rate)
    while (
        gpus > least
        and result.best is not None
        and (fewer := at(gpus - 1)).best is not None
        and fewer.best.rate >= rate
    ):
        gpus, result = gpus - 1, fewer
    return msgspec.structs.replace(result, runs=sum(one.runs for one in known.values()))


def _enough(gpus: int, rate: float) -> None:
    if gpus > MAX_GPUS:
        raise ValueError(
            f"{rate:g} requests per second need more than {MAX_GPUS} GPUs: plan for a part of them"
        )


def _balanced(question: Question, gpus: int) -> list[Arrangement]:
    """Return an arrangement of each kind, whose bounds are the highest."""
    work, chunk, policy = work_of(question), question.chunks[-1], question.policies[0]
    splits = [split(n, gpus - n, chunk, chunk, policy) for n in range(1, gpus)]
    return [
        plain(gpus, chunk, policy),
        *([max(splits, key=lambda one: bound(one, work))] if splits else []),
    ]


class _Search:
    def __init__(
        self,
        question: Question,
        gpus: int,
        requests: int | None,
        seeds: int,
        on_progress: OnProgress,
    ) -> None:
        self._question, self._gpus = question, gpus
        self._on_progress = on_progress
        self._best_rate = 0.0
        self._prober = CapacitySearch(question, work_of(question))
        self._short, self._long = levels(question, gpus, requests, seeds)
        self._found: dict[Arrangement, FoundArrangement] = {}
        self._searched: set[Arrangement] = set()

    def smart(self) -> Result:
        """See the module."""
        self._coarse_plain()
        if self._gpus > 1:
            self._coarse_split()
        static = sorted((one for one in self._found.values() if one.place is not None), key=_rank)
        top = (static[0].place or 0) if static else 0
        close = [one for one in static if one.place is not None and one.place > top - _CLOSE]
        first = {one.arrangement.kind: one for one in reversed(static)}
        if self._gpus > 1:
            first["auto"] = self._coarse_auto(static[0] if static else None)
        best: dict[ArrangementKind, FoundArrangement | None] = {}
        for one in dict.fromkeys([*first.values(), *close[:_MAX_CLOSE]]):
            if one.place is not None:
                kind = one.arrangement.kind
                best[kind] = self._raced(one.arrangement, best.get(kind), one.place)
        for found in best.values():
            self._climb(found)
        return self._result()

    def everything(self) -> Result:
        """See `exhaustive`."""
        best: dict[ArrangementKind, FoundArrangement | None] = {}
        for one in everything(self._gpus, self._question.chunks, self._question.policies):
            best[one.kind] = self._raced(one, best.get(one.kind))
        return self._result()

    def _note(self, one: Arrangement) -> None:
        self._searched.add(one)
        self._on_progress(
            SearchProgress(
                gpus=self._gpus,
                searched=len(self._searched),
                runs=self._prober.runs,
                rate=self._best_rate,
            )
        )

    # -- short runs

    def _coarse_plain(self) -> None:
        guess = None
        for chunk in self._question.chunks:
            found = self._short_run(plain(self._gpus, chunk, self._question.policies[0]), guess)
            guess = found.place if found.place is not None else guess

    def _coarse_split(self) -> None:
        question = self._question
        start = _balanced(question, self._gpus)[1]
        best = self._short_run(start, None)
        improved = True
        while improved:
            before = best
            for more in (1, -1):
                best = self._walk(best, more)
            for chunk in question.chunks:
                one = msgspec.structs.replace(best.arrangement, prefill_chunk=chunk)
                best = min(best, self._short_run(one, best.place), key=_rank)
            improved = best is not before

    def _coarse_auto(self, static: FoundArrangement | None) -> FoundArrangement:
        """Return the best one of role `any`. First is the chunk size of the best static one; others
        are looked at if they serve more.
        """
        chunks, guess = self._question.chunks, None
        chunk = chunks[-1]
        if static is not None:
            chunk, guess = (
                static.arrangement.prefill_chunk or static.arrangement.chunk,
                static.place,
            )
        best = self._short_run(any_role(self._gpus, chunk), guess)
        for other in chunks:
            one = any_role(self._gpus, other)
            more = None if best.place is None else best.place + self._short.step
            if one != best.arrangement and (more is None or self._serves(one, more)):
                best = min(best, self._short_run(one, more), key=_rank)
        return best

    def _serves(self, one: Arrangement, place: int) -> bool:
        self._note(one)
        return self._prober.passes(one, self._short, place)

    def _walk(self, best: FoundArrangement, more: int) -> FoundArrangement:
        """Go on with more or fewer prefill engines as long as it gets better; where it is as good,
        look one further.
        """
        worse, one = 0, best.arrangement
        while worse < 2 and 1 <= one.prefill + more < self._gpus:
            one = msgspec.structs.replace(one, prefill=one.prefill + more, decode=one.decode - more)
            if (
                best.place is not None
                and place_of(bound(one, self._prober.work)) + _SLACK < best.place
            ):
                break
            found = self._short_run(one, best.place)
            if found.rank < best.rank:
                best, worse = found, 0
            else:
                worse += 1
        return best

    def _short_run(self, one: Arrangement, guess: int | None) -> FoundArrangement:
        found = self._found.get(one)
        if found is None:
            self._note(one)
            found = self._found[one] = FoundArrangement(
                one, self._prober.capacity(one, self._short, guess), False
            )
            self._best_rate = max(self._best_rate, found.rate)
        return found

    # -- long runs

    def _long_run(self, one: Arrangement, guess: int | None) -> FoundArrangement:
        found = self._found.get(one)
        if found is None or not found.exact:
            self._note(one)
            found = self._found[one] = FoundArrangement(
                one, self._prober.capacity(one, self._long, guess), True
            )
            self._best_rate = max(self._best_rate, found.rate)
        return found

    def _climb(self, best: FoundArrangement | None) -> None:
        """Try what differs from the best one of a kind in one thing, until nothing is better."""
        tried: set[Arrangement] = set()
        while best is not None:
            before = best
            for one in neighbours(best.arrangement, self._question.chunks, self._question.policies):
                if one not in tried:
                    tried.add(one)
                    best = self._raced(one, best)
            if best is before:
                return

    def _raced(
        self, one: Arrangement, best: FoundArrangement | None, guess: int | None = None
    ) -> FoundArrangement:
        """Return the better one. The capacity of what is not better is not looked for: it is at
        most the best one's.
        """
        self._note(one)
        if best is None:
            return self._long_run(one, guess)
        if best.place is not None and not self._prober.passes(one, self._long, best.place + 1):
            known = self._found.get(one)
            if known is not None and not known.exact and known.place is not None:
                self._found[one] = FoundArrangement(one, min(known.place, best.place), False)
            return best
        return min(best, self._long_run(one, (best.place or 0) + 1), key=_rank)

    def _with_other_seeds(self, auto: FoundArrangement, static: FoundArrangement) -> OtherSeeds:
        """Return the capacities of both in runs that the search has not seen."""
        level = msgspec.structs.replace(self._long, first=self._long.seeds)

        def again(one: FoundArrangement, shift: int) -> FoundArrangement:
            place = self._prober.capacity(one.arrangement, level, (one.place or 0) + shift)
            return FoundArrangement(one.arrangement, place, True)

        fixed = again(static, 0)
        shift = 0 if fixed.place is None else fixed.place - (static.place or 0)
        return OtherSeeds(auto=again(auto, shift), static=fixed)

    def _result(self) -> Result:
        found = sorted(self._found.values(), key=_rank)
        whole, parted = (best_of(found, kind) for kind in STATIC)
        static = parted if _is_worth(parted, whole) else whole
        auto, others = best_of(found, "auto"), None
        best = auto if _is_worth(auto, static) else static
        if best is auto and auto is not None and static is not None:
            others = self._with_other_seeds(auto, static)
            best = auto if _is_worth(others.auto, others.static) else static
        return Result(
            gpus=self._gpus,
            best=best,
            static=static,
            auto=auto,
            other_seeds=others,
            found=tuple(found),
            runs=self._prober.runs,
            level=self._long,
            searched=len(self._searched),
        )


def _rank(one: FoundArrangement) -> tuple[float, bool, tuple[int, int, int, int, str]]:
    return one.rank


def _is_worth(one: FoundArrangement | None, simpler: FoundArrangement | None) -> bool:
    """Return whether an arrangement is better than a simpler one by enough."""
    if one is None or one.place is None:
        return False
    return simpler is None or simpler.place is None or one.place - simpler.place > WORTH


def best_of(found: Iterable[FoundArrangement], kind: ArrangementKind) -> FoundArrangement | None:
    """Return the best arrangement of a kind, of long runs; None: none keeps the SLO."""
    known = (one for one in found if one.exact and one.place is not None)
    return min((one for one in known if one.arrangement.kind == kind), key=_rank, default=None)
