"""The watch over one engine: whether its silence means that its core stands still.

An engine is silent while legs to it are open and none has shown a sign. Silence alone proves
nothing: a long prompt, or KV that another engine must send, is a silence too. So it raises a
suspicion, and then the engine is asked (`health_canary`):

    silent for 3/8 of the time allowed      its metrics are read, and it is asked for a token, as
                                            well as an engine whose KV its silent legs wait for:
                                            that one may be to blame, and has no leg any more
    a sign of it                            it works; the length of the silence is learned
                                            (`scheduling.pace`)
    silent for all of the time allowed      it stands still: it gets no more requests, and its legs
                                            end. (The longest time is allowed to one without metrics
                                            whose legs have shown nothing yet; to one for prefills
                                            with a long prompt, before the pace of such is known.)
    ... with a request under which another  the request may be the cause, and would stop the next
                                            engine, too. So it stays, up to
    engine has stood still                  the longest time: a plain engine would answer behind its
                                            long step. So do streams that flow; the others go to
                                            other engines
    a sign of it behind that                one request shows whether it serves again; also without
                                            a sign, after 30 s and ever more, if it can't be asked
                                            for a token: nothing else may show it. Soon after the
                                            verdict, its silence is learned, too: it may only have
                                            been slow

Times allowed are looked at eight times, so that all of this is over within them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from pdproxy.fleet.engine import Engine
from pdproxy.fleet.health_canary import Enquiry
from pdproxy.fleet.open_legs import OpenLeg
from pdproxy.kit.errors import StandstillError
from pdproxy.scheduling.pace import LARGE, Pace
from pdproxy.settings.health import Health
from pdproxy.settings.limits import Deadlines

LOOKS = 8
"""Looks in the time that is allowed at least."""
SUSPECT = 3 / LOOKS
"""Of that time: a silence from which on the engine is asked, and for so long it is asked before the
verdict.
"""
VERDICT = 7 / LOOKS
"""Of that time: the silence of the verdict. The next look comes at its end."""
SOON = 60.0
"""Seconds: an engine that stands still again so soon after it was let in is let in later."""
FIRST_HOLD, LONGEST_HOLD = 5.0, 300.0
"""Seconds until such an engine is let in, doubled each time."""
FIRST_BLIND = 30.0
"""The same without a sign, for one that can't be asked for a token: without requests its metrics do
not move, so that one which has only lost an answer looks like one that stands still.
"""
LAST_STEP = 1.0
"""Seconds behind the last data of an engine: what it was sent later is not in the step that does
not end.
"""
THAWED = 2.0
"""An engine that shows a sign when it has been silent for no more than so many times the silence of
the verdict may only have been slow: next time it is allowed to be silent for longer.
"""
LONGEST_PAUSE = 30.0
"""Seconds between two canaries to an engine that stands still, at most."""


class Verdicts(Protocol):
    """What a watch needs of all."""

    health: Health
    """The pauses between canaries to an engine that stands still are doubled each time."""
    deadlines: Deadlines
    """An engine may be silent for `prefill` at most, whatever was learned."""

    def can_ask(self, engine: Engine) -> bool:
        """Return whether an engine may be asked for a token."""

    def enquire(self, engine: Engine, results: Counter[str]) -> Enquiry:
        """Begin to ask an engine."""

    def suspect(self, url: str, since: float) -> None:
        """Legs at other engines wait for an engine's KV, in silence since then."""

    def is_last(self, engine: Engine) -> bool:
        """Return whether no other engine of its role can get requests."""

    def stalled(self, engine: Engine, why: str) -> bool:
        """Take an engine out of use. Return whether it was in use."""

    def let_in(self, engine: Engine) -> None:
        """Let an engine show by one request that it works again."""

    def legs_waiting_for(self, url: str) -> Iterable[OpenLeg]:
        """Return the legs at other engines that wait for KV of this one."""


class StallWatch:
    """The watch over one engine. `look` is called at intervals."""

    def __init__(self, engine: Engine, verdicts: Verdicts, now: float) -> None:
        self.engine = engine
        self.stalls = 0
        """How often it stood still."""
        self.canaries: Counter[str] = Counter()
        self._verdicts = verdicts
        self._let_in_at = -SOON
        self._hold, self._blind = 0.0, FIRST_BLIND
        self._begin(now)

    def __repr__(self) -> str:
        return f"<Watch over {self.engine.url}, {self._enquiry!r}>"

    def _begin(self, now: float) -> None:
        """Begin with a run of which nothing is known."""
        self._run = self.engine.in_ledger.run_number
        self._life = self.engine.open_legs.life = now
        self.engine.open_legs.shows_nothing = self.engine.open_legs.waits_out = False
        self._suspected: float | None = None
        self._enquiry: Enquiry | None = None
        self._silent_from = now
        """Since when it had been silent as the enquiry began."""
        self._stalled_at: float | None = None
        self._has_learned = False
        """Whether its pace knows how long it has stood still."""
        self._pause = self._verdicts.health.canary_interval
        self._next_canary = 0.0
        self.engine.open_legs.pace = Pace()

    def close(self) -> None:
        """Ask no more."""
        if self._enquiry is not None:
            self._enquiry.close()
            self._enquiry = None

    def excuse(self, now: float) -> None:
        """Begin to count its silence again: the proxy itself was held up, and has not read what
        came.
        """
        if self._stalled_at is None:
            self.close()  # nothing is learned of that silence
            self._life = now

    def suspect(self, since: float) -> None:
        """Legs at other engines wait for its KV, in silence since then."""
        if self._stalled_at is None and since >= self._life and self._suspected is None:
            self._suspected = since

    def look(self, now: float) -> None:
        """Look at it once."""
        engine = self.engine.in_ledger
        if not engine.up or engine.run_number != self._run:
            self.close()
            self._begin(now)
        elif engine.stalled is not None:
            self._look_at_stalled(now)
        else:
            if self._stalled_at is not None:
                self._was_let_in(now)
            self._look_at_silence(now)

    # -- while it is in use

    def _look_at_silence(self, now: float) -> None:
        legs = [*self.engine.open_legs.legs]
        self._note_signs(legs, now)
        since = self._silent_since(legs)
        open_legs = self.engine.open_legs
        open_legs.life = self._life
        if since is None:
            open_legs.shows_nothing = False
            self.close()
            return
        size = max((leg.prompt_bytes for leg in legs), default=0)
        pace, most = self.engine.open_legs.pace, self._verdicts.deadlines.prefill
        allowed, silence = (
            pace.allowed(self._verdicts.health.stalled_after, most, size, now),
            now - since,
        )
        open_legs.shows_nothing = open_legs.shows_nothing and silence >= VERDICT * allowed
        if silence < SUSPECT * allowed:
            self.close()
            return
        enquiry = self._enquiry
        if enquiry is None:
            enquiry = self._enquiry = self._verdicts.enquire(self.engine, self.canaries)
            self._silent_from = since
        enquiry.ask()
        for leg in legs:
            if (url := leg.waits_for) is not None and now - leg.since >= SUSPECT * allowed:
                self._verdicts.suspect(url, max(leg.since, since))
        if not self._is_telling(enquiry, legs):
            allowed = max(allowed, most)
        if silence >= VERDICT * allowed and now - enquiry.began >= SUSPECT * allowed:
            open_legs.shows_nothing = True
            self._stall(legs, silence, now)

    def _is_telling(self, enquiry: Enquiry, legs: list[OpenLeg]) -> bool:
        """Return whether its silence says more than that it is busy.

        One without metrics may be full, for minutes, of answers that are not streamed: then a
        canary waits, too.
        """
        engine = self.engine.in_ledger
        # The number of blocks comes from the same metrics, at an earlier time: it may not answer
        # now.
        has_metrics = enquiry.shows_progress or (
            engine.evidence is not None and engine.evidence.kv_blocks is not None
        )
        # one long step of an engine of which no pace is known
        if engine.for_others and not has_metrics:
            return self.engine.open_legs.pace.knows_large or all(
                leg.prompt_bytes < LARGE for leg in legs
            )
        return has_metrics or any(leg.last_sign() > leg.since for leg in legs)

    def _note_signs(self, legs: list[OpenLeg], now: float) -> None:
        """Note the last sign of the engine; learn from a silence that has ended."""
        enquiry = self._enquiry
        # of several ranks, the signs of one say nothing about the others
        if self.engine.ranks == 1:
            own = max(self.engine.open_legs.last_sign, *(leg.last_sign() for leg in legs), 0.0)
            self._life = max(self._life, own)
        if enquiry is not None:
            self._life = max(self._life, enquiry.last_sign)
            if self._life - enquiry.began >= self._verdicts.health.stalled_after / LOOKS:
                # It was not the legs alone that were silent: the engine could not answer either.
                self.engine.open_legs.pace.came_back(self._life - self._silent_from, now)
        if self._suspected is not None and self._life > self._suspected:
            self._suspected = None

    def _silent_since(self, legs: list[OpenLeg]) -> float | None:
        """Return since when the engine is silent, None if nothing is expected of it."""
        if not self._can_ask:
            self._suspected = None  # it can't be cleared of that
            found = [leg.since for leg in legs if leg.must_progress]
        else:
            if self.engine.ranks > 1:
                found = [max(leg.since, leg.last_sign()) for leg in legs]
            else:
                # clients may leave again and again
                found = [self.engine.open_legs.busy_since] if legs else []
            if self._suspected is not None:
                found.append(self._suspected)
        return max(self._life, min(found)) if found else None

    @property
    def _can_ask(self) -> bool:
        enquiry = self._enquiry
        return self._verdicts.can_ask(self.engine) if enquiry is None else not enquiry.refused

    def _stall(self, legs: list[OpenLeg], silence: float, now: float) -> None:
        # Without a prefill engine, the others compute prompts themselves.
        answers = not self.engine.in_ledger.for_others
        if (answers or not self._can_ask) and self._verdicts.is_last(self.engine):
            # silence alone takes no role its last engine: requests wait for it, each until its own
            # deadline
            return
        why = f"stands still: no sign of its core for {silence:.1f} s"
        if not self._verdicts.stalled(self.engine, why):
            return
        self.stalls += 1
        self._was_taken_out(now)
        self._fail(legs, now)

    def _was_taken_out(self, now: float) -> None:
        """Note that it stands still."""
        if now - self._let_in_at < SOON:
            self._hold = min(LONGEST_HOLD, max(FIRST_HOLD, 2 * self._hold))
            self._blind = min(LONGEST_HOLD, 2 * self._blind)
        else:
            self._hold, self._blind = 0.0, FIRST_BLIND
        self._stalled_at, self._suspected = now, None
        self._has_learned = False
        self._pause, self._next_canary = (
            self._verdicts.health.canary_interval,
            now + self._verdicts.health.canary_interval,
        )

    # -- while it stands still

    def _was_let_in(self, now: float) -> None:
        """It is in use again."""
        self.close()
        self._life = self._let_in_at = now
        self._stalled_at = None
        self.engine.open_legs.waits_out = False

    def _look_at_stalled(self, now: float) -> None:
        if self._stalled_at is None:  # it was found before this watch began
            self.close()
            self._was_taken_out(now)
            self._has_learned = True  # for how long it had been silent is not known
            self._silent_from = now
        assert self._stalled_at is not None
        self._fail([*self.engine.open_legs.legs], now)  # also one that was leased before
        enquiry = self._enquiry
        if enquiry is None:
            enquiry = self._enquiry = self._verdicts.enquire(self.engine, self.canaries)
        shown = enquiry.last_sign > self._stalled_at
        if shown and not self._has_learned:
            self._has_learned = True
            silence, before = (
                enquiry.last_sign - self._silent_from,
                self._stalled_at - self._silent_from,
            )
            # else it stands still again and again
            if silence <= THAWED * before and not self._hold:
                self.engine.open_legs.pace.was_judged(silence, now)
        if shown or (enquiry.refused and now >= self._stalled_at + self._blind):
            if now >= self._stalled_at + self._hold:
                self._was_let_in(now)
                self._verdicts.let_in(self.engine)
            return
        due = now >= self._next_canary
        if due:
            self._next_canary = now + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        enquiry.ask(canary=due, again=True)

    def _causes(self, legs: list[OpenLeg]) -> dict[OpenLeg, None]:
        """Return the legs whose request may have brought the standstill about: it may stop the next
        engine, too.

        Those that were sent before it began, and have no data: what has data is done with its
        prompt. If an engine has stood still under one of these before, that one is the cause; of
        several, the one with the longest prompt.
        """
        assert self._stalled_at is not None
        flowing = [leg for leg in legs if leg.last_sign() > leg.since]
        # Without data of any leg, it may have worked in silence until it was asked.
        asked = (
            self._stalled_at
            - SUSPECT * self._verdicts.health.stalled_after
            + self._verdicts.health.stalled_after / LOOKS
        )
        latest = max(leg.last_sign() for leg in flowing) + LAST_STEP if flowing else asked
        early = [leg for leg in legs if leg.since <= latest]
        found = [leg for leg in early if leg.last_sign() <= leg.since] or early
        again = [leg for leg in found if leg.stalled_before]
        if not again:
            return dict.fromkeys(found)
        return {
            max(again, key=lambda leg: (leg.stalled_before, leg.prompt_bytes, -leg.since)): None
        }

    def _fail(self, legs: list[OpenLeg], now: float) -> None:
        """End the legs to it, and those that wait for its KV in silence.

        Those whose request may be the cause end first: the others avoid the engines that these go
        to.
        """
        causes, least = self._causes(legs), SUSPECT * self._verdicts.health.stalled_after
        legs = [*causes, *[leg for leg in legs if leg not in causes]]
        waits_out = now < self._silent_from + self._verdicts.deadlines.prefill and any(
            leg.stalled_before for leg in legs
        )
        self.engine.open_legs.waits_out = waits_out
        if waits_out:
            legs = [leg for leg in legs if leg.last_sign() <= leg.since and not leg.stalled_before]
        for leg in legs:
            if self.engine.ranks == 1 or now - max(leg.since, leg.last_sign()) >= least:
                leg.fail(
                    StandstillError(f"{self.engine.url} stands still", may_be_cause=leg in causes)
                )
        for leg in self._verdicts.legs_waiting_for(self.engine.url):
            if now - leg.since >= least:
                leg.source_lost(f"{self.engine.url} stands still, and has the KV")
