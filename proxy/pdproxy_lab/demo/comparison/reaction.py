"""What the proxies have done since the last key that changed something, in words. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pdproxy_lab.demo.comparison.controls import Pressed
from pdproxy_lab.demo.counted import counted
from pdproxy_lab.demo.figures import Recovery


@dataclass(frozen=True, slots=True)
class Seen:
    """One fleet: what its proxy has done, how many of its requests failed, the URL of the engine
    that the key was about. `guarded`: see `Scores`.
    """

    recovery: Recovery
    failed: int
    url: str
    guarded: int = 0


def reaction(pressed: Pressed, before: tuple[Seen, Seen], now: tuple[Seen, Seen]) -> str:
    """Return the key's text with what has become of it: of the split fleet and of the plain one."""
    match pressed.change:
        case "kill" | "start":
            failed = sum(other.failed - one.failed for one, other in zip(before, now, strict=True))
            done = "; ".join(
                _done(*fleet) for fleet in zip(("Split", "plain"), before, now, strict=True)
            )
            guarded = sum(
                other.guarded - one.guarded for one, other in zip(before, now, strict=True)
            )
            why = f" ({guarded} was alone there: it may be why, and there is one engine left)"
            told = f"{counted(failed, 'request')} failed{why if guarded else ''}"
            return f"{pressed.text} {told}. {done}."
        case "slow":
            return f"{pressed.text} {_excluded(before, now)}"
        case "way":
            split = now[0].recovery.split - before[0].recovery.split
            whole = now[0].recovery.whole - before[0].recovery.whole
            if split + whole:
                return f"{pressed.text} So far {split} were split, {whole} served whole."
    return pressed.text


def _done(name: str, before: Seen, now: Seen) -> str:
    went_on = now.recovery.continued - before.recovery.continued
    again = now.recovery.failed_legs - before.recovery.failed_legs - went_on
    streams, requests = counted(went_on, "stream"), counted(max(again, 0), "request")
    were = "was" if again == 1 else "were"
    return f"{name}: {streams} went on elsewhere, {requests} {were} tried again"


def _excluded(before: tuple[Seen, Seen], now: tuple[Seen, Seen]) -> str:
    names = [
        name
        for name, one, other in zip(("split", "plain"), before, now, strict=True)
        if other.recovery.exclusions.get(other.url, 0) > one.recovery.exclusions.get(one.url, 0)
    ]
    if not names:
        return (
            "The proxies compare engines every few seconds, and exclude one that is 3 times as "
            "slow as its peers."
        )
    return (
        f"The proxy of the {' and the '.join(names)} fleet has excluded it for 30 s: it is more "
        f"than 3 times as slow as its peers."
    )
