"""From what a client saw to rows for the fit: how long steps took, and what was in them. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pdproxy_lab.calibrate.trials import Seen, Trial, TrialPrompt

MIN_STEPS = 8
"""A decode row needs so many steps of all its streams together."""
_LONG = 1.5
"""A step that takes so many times as long as those before has prompt tokens in it."""
_EARLY = 0.3
"""How much earlier than the stream's token of the same step a prompt's token may come, in usual
steps.
"""
_AT_ONCE = 0.2
"""Tokens that are nearer to each other, in usual steps, came at once: the client or the server was
late for the first ones.
"""
_AROUND = 2
"""Usual steps before and after those of a prompt that are timed with them: so it hardly matters
which token came with its end.
"""


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Steps that decode `streams` sequences with `context` tokens in sum: seconds of one."""

    streams: int
    context: float
    seconds: float


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """A prompt that was computed in `steps` steps beside `streams` decoding sequences: seconds of
    all of these steps.
    """

    tokens: int
    steps: int
    streams: int
    context: float
    """Tokens that the streams had, summed over the steps."""
    seconds: float


@dataclass(frozen=True, slots=True)
class AloneRow:
    """A prompt on an engine without other work: seconds from the client's request to its first
    token.
    """

    tokens: int
    seconds: float


def decode_row(trial: Trial, seen: Seen) -> DecodeRow | None:
    """Return a row of a trial without prompts beside; None: its streams did not run together for
    long enough.
    """
    begin = max(times[0] for times in seen.streams)
    end = min(times[-1] for times in seen.streams)
    steps, context = [], 0.0
    for times in seen.streams:
        first, last = bisect_right(times, begin) - 1, bisect_right(times, end) - 1
        if last - first < MIN_STEPS:
            return None
        steps.append(median(steps_of(times[first : last + 1])))
        context += trial.prompt_tokens + (first + last) / 2 + 0.5
    taken = median(steps)
    return DecodeRow(trial.streams, context, taken) if taken > 0 else None


def steps_of(times: Sequence[float]) -> list[float]:
    """Return seconds per step, by differences over half of all: one late event weighs little, a
    stall moves few of them.
    """
    half = len(times) // 2
    return [(times[i + half] - times[i]) / half for i in range(len(times) - half)]


def alone_row(trial: Trial, seen: Seen) -> AloneRow:
    """Return the row of a trial with one prompt and no streams."""
    return AloneRow(trial.beside[0], seen.beside[0].ttft)


def chunk_row(trial: Trial, seen: Seen, known: int | None = None) -> ChunkRow | None:
    """Return the row of a trial with one prompt beside streams.

    `known`: the number of steps that the prompt takes. Without, it is the last step and those long
    ones right before it. None: the streams ended before the prompt's token, or the steps can't be
    found.
    """
    times, prompt, tokens = seen.streams[0], seen.beside[0], trial.beside[0]
    usual = _usual(times, prompt)
    last = None if usual is None else _step_of(times, prompt.answered, usual)
    if usual is None or last is None or last < (known or 1):
        return None
    if known is not None:
        first = last - known + 1
    else:
        # All chunks but the last one have the same size. A stall beside them, such as of the API
        # server, is shorter.
        first, chunk = last, times[last] - times[last - 1]
        while first > 1 and times[first - 1] > prompt.sent:
            gap = times[first - 1] - times[first - 2]
            if gap <= max(_LONG * usual, chunk / 2):
                break
            first, chunk = first - 1, gap
    steps = last - first + 1
    before, after = 0, min(_AROUND, len(times) - 1 - last)
    # The first tokens of a stream may come at once, late: they are not timed.
    while (
        before < min(_AROUND, first - 1)
        and times[first - 1 - before] - times[first - 2 - before] > usual / 2
    ):
        before += 1
    taken = times[last + after] - times[first - 1 - before] - (before + after) * usual
    if taken <= 0:
        return None
    # The streams run together: each has as many tokens as the first one, but for the steps in which
    # they began.
    context = sum(
        trial.streams * (trial.prompt_tokens + place - 0.5) for place in range(first, last + 1)
    )
    return ChunkRow(tokens, steps, trial.streams, context, taken)


def _usual(times: tuple[float, ...], prompt: TrialPrompt) -> float | None:
    """Return the seconds of steps after the prompt was answered, or if these are few also of those
    before; None: too few.
    """
    before = times[: bisect_right(times, prompt.sent)]
    after = times[bisect_right(times, prompt.answered) :]
    parts = (after,) if len(after) > MIN_STEPS // 2 else (before, after)
    found = [step for part in parts if len(part) > 1 for step in steps_of(part)]
    return median(found) if len(found) >= 3 and median(found) > 0 else None


def _step_of(times: tuple[float, ...], when: float, usual: float) -> int | None:
    """Return the place of the stream's token that came with a prompt's token; None: the stream may
    have ended before.

    The prompt's token has a connection of its own, whose answer begins with it: it comes rather
    later than the stream's.
    """
    place = bisect_right(times, when + _EARLY * usual) - 1
    while place > 0 and times[place] - times[place - 1] < _AT_ONCE * usual:
        place -= 1
    return place if 0 <= place < len(times) - 1 else None
