"""What the comparison shows, in words. Pure.

Owns from which difference on one way is called better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pdproxy_lab.demo.comparison.fleet import Way
from pdproxy_lab.demo.comparison.scores import Score

ENOUGH = 16
"""Answers of each fleet before there is a verdict."""
CLEAR = 0.05
"""The least difference between two shares of requests in time that counts, if chance alone does not
make one that large: twice the standard error.
"""
KEPT = 0.9
"""The share of requests in time from which on limits count as kept."""

BUSY = 0.003
"""Seconds of engine time that this machine may add: with more, both fleets miss the limits."""

Kind = Literal["busy", "measuring", "better", "worse", "same", "neither"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`kind`: of the split engines against the plain ones."""

    kind: Kind
    text: str


def verdict(way: Way, split: Score, plain: Score, lag: float = 0.0) -> Verdict:
    """Return what the scores of both fleets show. `way`: of the engines that are not plain; `lag`:
    seconds of engine time by which this machine's event loop is late.
    """
    if lag > BUSY:
        return Verdict(
            "busy", f"No verdict: this machine is busy, and adds up to {_ms(lag)} ms to all times."
        )
    ended = min(split.ended, plain.ended)
    if ended < ENOUGH or split.share is None or plain.share is None:
        return Verdict("measuring", f"Measuring: {ended} of {ENOUGH} answers.")
    name = "Splitting" if way == "split" else "auto"
    shares = f"{split.share:.0%} of the requests are in time, {plain.share:.0%} on plain engines."
    mean = (split.share + plain.share) / 2
    clear = max(CLEAR, 2 * math.sqrt(2 * mean * (1 - mean) / ended))
    if split.share >= plain.share + clear:
        return Verdict("better", f"{name} pays here: {shares} {_why_better(split, plain)}")
    if plain.share >= split.share + clear:
        return Verdict("worse", f"{name} does not pay here: {shares} {_why_worse(split, plain)}")
    if min(split.share, plain.share) >= KEPT:
        return Verdict(
            "same",
            f"{name} gains no request here: {shares} Worst gap {_ms(split.worst_gap)} against "
            f"{_ms(plain.worst_gap)} ms, TTFT {_ms(split.ttft.p50)} against "
            f"{_ms(plain.ttft.p50)} ms.",
        )
    text = f"{name} makes no clear difference here: {shares}"
    if max(split.share, plain.share) < 0.5:
        text += " The load is too high for both."
    return Verdict("neither", text)


def _why_better(split: Score, plain: Score) -> str:
    if _later(plain.tpot.p99, split.tpot.p99) <= 1:
        return (
            f"First tokens come sooner: TTFT p99 {_ms(split.ttft.p99)} against "
            f"{_ms(plain.ttft.p99)} ms."
        )
    text = (
        f"There, prefill delays the tokens of others: TPOT p99 {_ms(plain.tpot.p99)} against "
        f"{_ms(split.tpot.p99)} ms"
    )
    if _later(plain.worst_gap, split.worst_gap) > 1:
        text += f", worst gap {_ms(plain.worst_gap)} against {_ms(split.worst_gap)} ms"
    return f"{text}."


def _why_worse(split: Score, plain: Score) -> str:
    late = _later(split.ttft.p99, plain.ttft.p99)
    slow = _later(split.tpot.p99, plain.tpot.p99)
    if late >= slow:
        return (
            f"Prompts wait for fewer engines: TTFT p99 {_ms(split.ttft.p99)} against "
            f"{_ms(plain.ttft.p99)} ms."
        )
    return (
        f"Answers share fewer engines: TPOT p99 {_ms(split.tpot.p99)} against "
        f"{_ms(plain.tpot.p99)} ms."
    )


def _later(one: float | None, other: float | None) -> float:
    return one / other if one is not None and other else 1.0


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.1f}" if seconds < 0.01 else f"{1000 * seconds:,.0f}"
