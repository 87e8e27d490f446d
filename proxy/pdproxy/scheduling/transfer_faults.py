"""Whose fault it is that KV does not get from prefill engines to decode engines, as their pairs
show it. Pure: time is passed in.

A decode engine that can load no KV answers with an error at once. So it has the least load, and
gets the next prompt, too. Its error does not say whether it is the cause: the KV may be gone, or
the way to it. The pairs say so, and prompts that are tried again are sent where they show more:

    the decode engine fails with several prefill engines, and loads from none   the decode engine
    several decode engines fail with the prefill engine, and none loads         the prefill engine
    both engines move KV with others                                            the link between
                                                                                them

A fault needs so many failures in a row as a breaker. Then no prompt is split with that engine, or
over that link; an engine may still serve prompts whole. When its time is over, one prompt tries,
and one more each time that this passes without a result. A prompt that fails doubles the time, and
one whose KV arrives ends the fault. Only what fails has a row here: while nothing has failed,
nothing is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice

import msgspec

LONGEST = 60.0
"""Seconds after which a prompt tries again at the latest."""
REMEMBERED = 300.0
"""Seconds for which a fault that is over is remembered: one that comes back begins with the time
that it had.
"""
MAX_LINKS = 4096
"""Links with failures that are known at a time. The one that was noted first is forgotten for
another one.
"""
RECOMPUTES = 0.75
"""Of the prompt tokens that a decode engine should have got as KV: if it computes so many, it is at
fault. A prefill engine that is at fault, of two, has every decode engine compute half.
"""
MOST_TOLD = 256
"""Rows of each kind that other processes are told, the newest ones: of further links they only
choose worse which engine is left out.
"""
TWICE = 2
"""Looks at an engine's counters in a row that must show this: one may be a single prompt whose KV
was lost.
"""

KINDS = ("prefill", "decode", "link")
"""What `TransferFault.kind` can be."""


class TransferFault(msgspec.Struct):
    """An engine, or a link between two, over which KV does not move. `prefill`, `decode`: URLs, ""
    for whichever engine.

    `found`: when its last failure was; `until`: when a prompt may try again, both in monotonic
    seconds. `times`: how often it was found in a row. `by_counters`: the decode engine's own
    counters show it; answers do not. `trying`: the time is over, and no prompt has tried since.
    `tried`: a prompt tries, or has tried without a result. `again`: the last try has failed.
    """

    prefill: str
    decode: str
    why: str
    found: float
    until: float
    times: int = 1
    by_counters: bool = False
    trying: bool = False
    tried: bool = False
    again: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """By what it is known."""
        return self.prefill, self.decode

    @property
    def kind(self) -> str:
        """Return which of `KINDS` it is."""
        return "link" if self.prefill and self.decode else "prefill" if self.prefill else "decode"

    def tells(self, now: float) -> str:
        """Return what an operator should know of it."""
        what = (
            "no prompt is split over this link"
            if self.kind == "link"
            else "no prompt is split with this engine"
        )
        left = max(0.0, self.until - now)
        after = "the next one tries again" if self.trying else f"one tries again in {left:.1f} s"
        return f"{self.why}: {what} until one has its KV, {after}"


class Streak(msgspec.Struct, array_like=True):
    """Failures in a row of an engine or a link. `began`: when the first one was; `several`: with
    more than one `partner`.

    `partner`: "" where none took part yet.
    """

    began: float
    partner: str
    failed: int = 0
    several: bool = False

    def add(self, partner: str, first: bool) -> None:
        """Add a failure with this partner."""
        self.failed += first
        self.partner = self.partner or partner
        self.several = self.several or partner != self.partner


class KnownTransfers(msgspec.Struct, array_like=True, frozen=True):
    """What another process is told of transfers: the faults, and the streaks of prefill engines, of
    decode engines and of links, by their URLs.
    """

    faults: list[TransferFault] = []
    prefills: dict[str, Streak] = {}
    decodes: dict[str, Streak] = {}
    links: list[tuple[str, str, Streak]] = []


class TransferFaults:
    """The faults of one pool. `failures`, `cooldown`: as of `Breakers`. The caller names only
    engines of the pool.
    """

    def __init__(self, failures: int, cooldown: float) -> None:
        self.configure(failures, cooldown)
        self.faults: dict[tuple[str, str], TransferFault] = {}
        """Read only."""
        self.due = math.inf
        """When the next fault may be tried. Read only."""
        self.suspects = False
        """Whether anything has failed since all was well: only then `loaded` has to be called. Read
        only.
        """
        self.changed: Callable[[], None] = lambda: None
        """Called when something has changed, for the views of other processes."""
        self._prefills: dict[str, Streak] = {}
        self._decodes: dict[str, Streak] = {}
        self._links: dict[tuple[str, str], Streak] = {}
        self._computed: dict[str, int] = {}
        """Looks in a row by which a decode engine computed most of what it should have got."""
        self._past: dict[tuple[str, str], tuple[int, float]] = {}

    def configure(self, failures: int, cooldown: float) -> None:
        """Use these numbers from the next failure on."""
        self._failures, self._cooldown = failures, cooldown

    # -- what legs and counters show

    def failed(
        self,
        prefill: str,
        decode: str,
        now: float,
        *,
        more_prefills: bool,
        more_decodes: bool,
        first: bool = True,
    ) -> TransferFault | None:
        """Count a prompt whose KV did not get from one engine to the other. Return the fault that
        this shows, if new or longer.

        `more_prefills`, `more_decodes`: whether the other engine can be paired with others, too.
        `first`: whether it is the first such failure of its request: others say which engines are
        concerned, and are not counted, for it may be the cause itself.
        """
        known = [
            fault for key in _keys(prefill, decode) if (fault := self.faults.get(key)) is not None
        ]
        if known:
            # Prompts that were sent before the fault was found show nothing new.
            failing = next(
                (fault for fault in known if fault.tried and not fault.by_counters), None
            )
            return None if failing is None else self._found(failing.key, failing.why, now)
        self.suspects = True
        self.changed()
        of_decode = self._decodes.setdefault(decode, Streak(now, prefill))
        of_prefill = self._prefills.setdefault(prefill, Streak(now, decode))
        if (prefill, decode) not in self._links and len(self._links) >= MAX_LINKS:
            del self._links[next(iter(self._links))]
        of_link = self._links.setdefault((prefill, decode), Streak(now, decode))
        of_decode.add(prefill, first)
        of_prefill.add(decode, first)
        of_link.add(decode, first)
        enough = self._failures
        # An engine's failures in a row are fewer than the link's if it has moved KV with others in
        # between.
        decode_works, prefill_works = (
            of_decode.failed < of_link.failed,
            of_prefill.failed < of_link.failed,
        )
        by_decode = of_decode.failed >= enough and (
            of_decode.several or prefill_works or not more_prefills
        )
        by_prefill = of_prefill.failed >= enough and (
            of_prefill.several or decode_works or not more_decodes
        )
        # the one that has failed with several engines; with one each, nobody can tell
        if by_decode and by_prefill:
            by_decode, by_prefill = of_decode.several, of_prefill.several and not of_decode.several
        if by_decode:
            why = f"the KV of {of_decode.failed} prompts in a row could not be loaded there"
            return self._found(("", decode), why, now)
        if by_prefill:
            why = f"no decode engine could load the KV of its last {of_prefill.failed} prompts"
            return self._found((prefill, ""), why, now)
        if of_link.failed >= enough:
            why = f"the KV of {of_link.failed} prompts in a row did not get from one to the other"
            return self._found((prefill, decode), why, now)
        return None

    def left_out(
        self,
        prefill: str,
        decode: str,
        failed: Sequence[tuple[str, str]],
        *,
        more_prefills: bool,
        more_decodes: bool,
    ) -> str:
        """Return which of two engines is left out when a prompt that failed with both is tried
        again, so that this shows more.

        `failed`: the prefill and decode engines with which the prompt has failed so far. They are
        not counted yet.

        First the decode engine: the prefill engine has the prompt in its cache. Once that one is
        known to work, or not to, it is the one that is left out, and the decode engine gets the
        prompt again. So three prompts show whose fault it is, however engines take turns.
        """
        if ("", decode) in self.faults or not more_prefills:
            return decode
        if (prefill, "") in self.faults or not more_decodes:
            return prefill
        of_decode, of_prefill = self._decodes.get(decode), self._prefills.get(prefill)
        if _has_several(of_decode, [p for p, d in failed if d == decode]):
            return decode
        if _has_several(of_prefill, [d for p, d in failed if p == prefill]):
            return prefill
        of_link = _failed(self._links.get((prefill, decode)))
        prefill_works, decode_works = _failed(of_prefill) < of_link, _failed(of_decode) < of_link
        if of_link + 1 >= self._failures:  # with this one, it is known whose fault it is
            return prefill if decode_works and not prefill_works else decode
        return prefill if prefill_works else decode

    def not_made(self, prefill: str, now: float) -> TransferFault | None:
        """Count a prompt for which a prefill engine gave no KV that can be used, without an error.
        Return as `failed`.
        """
        if (known := self.faults.get((prefill, ""))) is not None:
            return self._found(known.key, known.why, now) if known.tried else None
        self.suspects = True
        self.changed()
        streak = self._prefills.setdefault(prefill, Streak(now, ""))
        streak.failed += 1
        if streak.failed < self._failures:
            return None
        why = f"it gave no KV that can be used for {streak.failed} prompts in a row"
        return self._found((prefill, ""), why, now)

    def loaded(self, prefill: str, decode: str, since: float) -> list[TransferFault]:
        """Count a prompt whose KV was loaded. `since`: when it was sent. Return the faults that are
        over.
        """
        is_news = False
        for streaks, name in ((self._prefills, prefill), (self._decodes, decode)):
            if (streak := streaks.get(name)) is not None and since >= streak.began:
                del streaks[name]
                is_news = True
        if (streak := self._links.get((prefill, decode))) is not None and since >= streak.began:
            del self._links[prefill, decode]
            is_news = True
        over = [
            fault
            for key in _keys(prefill, decode)
            if (fault := self.faults.get(key)) is not None
            and not fault.by_counters
            and since >= fault.found
        ]
        for fault in over:
            self._over(fault, since)
        if is_news or over:
            self._look()
        return over

    def counted(self, decode: str, moved: int, computed: int, now: float) -> TransferFault | None:
        """Take a decode engine's counts since the last look: prompt tokens that came as KV, and
        those that it computed again.

        Return the fault that this shows, if it is new, longer, or over: then it is not in `faults`
        any more.
        """
        if not moved + computed:
            return None
        known = self.faults.get(("", decode))
        if computed < RECOMPUTES * (moved + computed):
            self._computed.pop(decode, None)
            if known is None or not known.by_counters:
                return None
            self._over(known, now)
            self._look()
            return known
        looks = self._computed[decode] = self._computed.get(decode, 0) + 1
        if known is not None:
            return (
                self._found(known.key, known.why, now)
                if known.by_counters and known.tried
                else None
            )
        if looks < TWICE:
            return None
        why = (
            f"it computes again what it gets as KV: {computed} of the last {moved + computed} "
            f"prompt tokens"
        )
        return self._found(("", decode), why, now, by_counters=True)

    # -- what is avoided

    def try_due(self, now: float) -> bool:
        """Let prompts try the faults whose time is over. Return whether there are any."""
        found = [fault for fault in self.faults.values() if not fault.trying and now >= fault.until]
        for fault in found:
            fault.trying = True
        if found:
            self._look()
        return bool(found)

    def taken(self, prefill: str, decode: str, now: float) -> bool:
        """Note that a prompt is sent to these two. Return whether it tries a fault: then the others
        do not.
        """
        tried = [
            fault
            for key in _keys(prefill, decode)
            if (fault := self.faults.get(key)) is not None and fault.trying
        ]
        for fault in tried:
            fault.trying, fault.tried, fault.until = False, True, now + self._seconds(fault.times)
        if tried:
            self._look()
        return bool(tried)

    def apart(self, prefill: str, decode: str) -> TransferFault | None:
        """Return the fault for which two engines share no prompt now, None if there is none."""
        if not self.faults:
            return None
        known = (self.faults.get(key) for key in _keys(prefill, decode))
        return next((fault for fault in known if fault is not None and not fault.trying), None)

    def of(self, url: str) -> list[TransferFault]:
        """Return the faults of an engine itself, not those of its links."""
        return [
            fault for key in ((url, ""), ("", url)) if (fault := self.faults.get(key)) is not None
        ]

    # -- what others know

    def known(self) -> KnownTransfers:
        """Return what another process is told."""
        newest_links = islice(reversed(self._links.items()), MOST_TOLD)
        return KnownTransfers(
            list(islice(reversed(self.faults.values()), MOST_TOLD)),
            _newest(self._prefills),
            _newest(self._decodes),
            [(*link, streak) for link, streak in newest_links],
        )

    def told(self) -> None:
        """Note that another process is told of a failure: it has not answered yet."""
        self.suspects = True

    def follow(self, known: KnownTransfers) -> None:
        """Know what another process knows, and nothing else."""
        self.faults = {fault.key: fault for fault in known.faults}
        self._prefills, self._decodes = known.prefills, known.decodes
        self._links = {(prefill, decode): streak for prefill, decode, streak in known.links}
        self._look()

    def forget(self, url: str) -> list[TransferFault]:
        """Forget an engine: it was removed, or started again. Return the faults that are over."""
        over = [fault for key, fault in self.faults.items() if url in key]
        for key in [key for key in (*self.faults, *self._past) if url in key]:
            self.faults.pop(key, None)
            self._past.pop(key, None)
        for link in [link for link in self._links if url in link]:
            del self._links[link]
        self._prefills.pop(url, None)
        self._decodes.pop(url, None)
        self._computed.pop(url, None)
        self._look()
        return over

    # -- inside

    def _seconds(self, times: int) -> float:
        return min(max(LONGEST, self._cooldown), self._cooldown * 2.0 ** min(times - 1, 30))

    def _found(
        self, key: tuple[str, str], why: str, now: float, *, by_counters: bool = False
    ) -> TransferFault:
        known = self.faults.get(key)
        again = known is not None
        if known is None:
            times, ended = self._past.pop(key, (0, -math.inf))
            times = times if now - ended < REMEMBERED else 0
            if len(self.faults) >= MAX_LINKS:
                del self.faults[next(iter(self.faults))]
            known = self.faults[key] = TransferFault(*key, why, now, now, times, by_counters)
        known.times += 1
        known.found, known.until = now, now + self._seconds(known.times)
        known.trying = known.tried = False
        known.again = again
        self._forget_streaks(known)
        self._look()
        return known

    def _forget_streaks(self, fault: TransferFault) -> None:
        """Forget the failures that a fault explains: they are no faults of the engine's
        partners.
        """
        for link in [
            link
            for link in self._links
            if fault.prefill in ("", link[0]) and fault.decode in ("", link[1])
        ]:
            failed = self._links.pop(link).failed
            for streaks, name in ((self._prefills, link[0]), (self._decodes, link[1])):
                if (streak := streaks.get(name)) is not None:
                    streak.failed -= failed
                    if streak.failed <= 0:
                        del streaks[name]
        if not fault.decode:
            self._prefills.pop(fault.prefill, None)
        if not fault.prefill:
            self._decodes.pop(fault.decode, None)

    def _over(self, fault: TransferFault, now: float) -> None:
        del self.faults[fault.key]
        for key in [key for key, (_, ended) in self._past.items() if now - ended >= REMEMBERED]:
            del self._past[key]
        self._past[fault.key] = fault.times, now
        if not fault.prefill:
            self._computed.pop(fault.decode, None)

    def _look(self) -> None:
        self.due = min(
            (fault.until for fault in self.faults.values() if not fault.trying), default=math.inf
        )
        self.suspects = bool(self.faults or self._links or self._prefills or self._decodes)
        self.changed()


def _newest(rows: dict[str, Streak]) -> dict[str, Streak]:
    return dict(islice(reversed(rows.items()), MOST_TOLD))


def _failed(streak: Streak | None) -> int:
    return 0 if streak is None else streak.failed


def _has_several(streak: Streak | None, more: Sequence[str]) -> bool:
    """Return whether failures in a row are with several partners. `more`: those of failures that
    are not counted yet.
    """
    partners = {*more}
    if streak is not None:
        if streak.several:
            return True
        partners.add(streak.partner)
    return len(partners - {""}) > 1


def _keys(prefill: str, decode: str) -> tuple[tuple[str, str], ...]:
    """Return by what faults are known that keep two engines apart."""
    return ("", decode), (prefill, ""), (prefill, decode)
