"""What a profile was fitted to, and what asks for more than that. Pure.

A profile predicts well within the ranges that its measurements had. The formula goes on outside of
them, where nobody has looked whether it is right. Where somebody has, the profile says how wrong it
was.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

import msgspec

MOST = 1e9
_NEAR = 1.1
"""A value that is so many times beyond a range's end, at most, is still in the range."""
_LEFT_OUT = 20
"""One of so many values is left out at each end of the usual ones."""
_WIDTH = 100
"""Letters of a report's line."""

Range = tuple[float, float]
"""The least and the greatest value."""


class Ranges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ranges of what predictions depend on. None: nothing is known of it, or nothing is asked."""

    prompt_tokens: Range | None = None
    """Of one prompt, those of a cached prefix included."""
    answer_tokens: Range | None = None
    """Of one answer."""
    sequences: Range | None = None
    """That decode at once at an engine: the mean of a run."""
    context_tokens: Range | None = None
    """Of all sequences of an engine together, prompts and answers: the mean of a run."""
    chunk: Range | None = None
    """The most tokens of a step (`--max-num-batched-tokens`)."""

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        for name, one in self.each():
            if not 0 <= one[0] <= one[1] <= MOST:
                raise ValueError(
                    f"{name} must be two numbers from 0 to {MOST:g}, the lower one first, "
                    f"got {one[0]:g} and {one[1]:g}"
                )

    @property
    def said(self) -> str:
        """The ranges in words."""
        return ", ".join(_SAID[name].format(_said(one)) for name, one in self.each())

    def with_(self, other: Ranges) -> Ranges:
        """Return the ranges that hold those of both."""
        found = dict(self.each())
        for name, (low, high) in other.each():
            mine = found.get(name, (low, high))
            found[name] = min(mine[0], low), max(mine[1], high)
        return Ranges(**found)

    def each(self) -> Iterable[tuple[str, Range]]:
        """Yield the known ranges by their names."""
        for name in Ranges.__struct_fields__:
            one = getattr(self, name)
            if one is not None:
                yield name, one


class Compared(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A comparison of predictions with measurements that the fit does not contain."""

    where: Ranges
    off: dict[str, float]
    """By `ttft` and `tpot`: the largest deviation of a median from what was measured, as a part of
    it; above 0: the prediction is too long.
    """

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        for name, value in self.off.items():
            if name not in _NAMES or not -1 <= value <= 100:
                raise ValueError(
                    f"off must have ttft or tpot, each from -1 to 100, got {name[:20]!r}: {value:g}"
                )


class FittedRanges(Ranges, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ranges of the measurements to which a profile was fitted."""

    compared: list[Compared] = []


class Outside(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is asked for beyond its range."""

    name: str
    """A field of `Ranges`."""
    asked: Range
    fitted: Range

    def __str__(self) -> str:
        """Such as `prompts of 200 to 30000 tokens (fitted to 256 to 8000)`."""
        return f"{_SAID[self.name].format(_said(self.asked))} (fitted to {_said(self.fitted)})"


class Extrapolated(msgspec.Struct, frozen=True, kw_only=True):
    """What lies outside: one thing at least. `off`: as in `Compared`; empty: unknown."""

    outside: tuple[Outside, ...]
    off: dict[str, float]

    def __str__(self) -> str:
        """One sentence: what lies outside, and how wrong predictions may be there."""
        things = ", ".join(str(one) for one in self.outside)
        return f"the profile was not fitted to {things}: {self.error}"

    @property
    def lines(self) -> list[str]:
        """The sentence as lines of a report."""
        said = str(self)
        return textwrap.wrap(f"{said[0].upper()}{said[1:]}.", _WIDTH)

    @property
    def error(self) -> str:
        """How wrong predictions may be, as a part of the sentence."""
        if not self.off:
            return "how wrong predictions are there is unknown"
        parts = [
            f"{_NAMES[name]} by {100 * abs(value):.0f} % too {'long' if value > 0 else 'short'}"
            for name, value in self.off.items()
        ]
        return f"measured there, predictions were wrong: {' and '.join(parts)} at worst"


_NAMES = {"ttft": "TTFT", "tpot": "TPOT"}
_SAID = {
    "prompt_tokens": "prompts of {} tokens",
    "answer_tokens": "answers of {} tokens",
    "sequences": "{} sequences at once per engine",
    "context_tokens": "{} tokens of all sequences of an engine",
    "chunk": "steps of at most {} tokens",
}


def _said(one: Range) -> str:
    low, high = (str(round(end if end == int(end) else float(f"{end:.2g}"))) for end in one)
    return low if low == high else f"{low} to {high}"


def usual(values: Iterable[float]) -> Range | None:
    """Return the range of the middle nine tenths of some values, None without any: single requests
    beyond a range change no prediction.
    """
    ordered = sorted(values)
    if not ordered:
        return None
    left_out = len(ordered) // _LEFT_OUT
    return ordered[left_out], ordered[-1 - left_out]


def extrapolated(fitted: FittedRanges | None, asked: Ranges) -> Extrapolated | None:
    """Return what is asked for beyond what a profile was fitted to, None if nothing is.

    Of what the profile says no range (`fitted` is None: of anything), nothing is said.
    """
    if fitted is None:
        return None
    known = dict(fitted.each())
    outside = tuple(
        Outside(name=name, asked=one, fitted=known[name])
        for name, one in asked.each()
        if name in known and not _within(one, known[name])
    )
    if not outside:
        return None
    off: dict[str, float] = {}
    measured = dict(known)
    for one in fitted.compared:
        there = dict(one.where.each())
        if all(_meet(thing.asked, there.get(thing.name)) for thing in outside):
            measured = dict(Ranges(**measured).with_(one.where).each())
            for name, value in one.off.items():
                off[name] = max(off.get(name, 0.0), value, key=abs)
    if not all(_within(thing.asked, measured[thing.name]) for thing in outside):
        off = {}  # some of it was compared with nothing
    return Extrapolated(outside=outside, off=off)


def _meet(one: Range, other: Range | None) -> bool:
    return other is not None and one[0] <= other[1] * _NEAR and one[1] * _NEAR >= other[0]


def _within(one: Range, other: Range) -> bool:
    return one[0] * _NEAR >= other[0] and one[1] <= other[1] * _NEAR
