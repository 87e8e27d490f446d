"""The phases of one request, one behind the other, by the times that the admin API shows of it.

Owns their order, and where time goes that no phase has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pdproxy.observe.recent import RUNNING, RecentPrompt, RecentRequest

OTHER = "other"
"""Time of no phase: earlier attempts, waits for an engine, the proxy itself."""
_SMALL = 0.0005
"""Seconds. Times are rounded: less than this is no time of its own."""


_Times = tuple[str, float, str | None]
"""A phase's name, its seconds, and the URL of its engine."""


class Phase(NamedTuple):
    """A phase of a request: when it began, in seconds since the request came, and for how long.

    `name`: as in pdproxy_phase_seconds, `tokenize`, or `OTHER`. `engine`: its URL, None where none
    has it. `goes_on`: whether it is not over.
    """

    name: str
    begin: float
    seconds: float
    engine: str | None = None
    goes_on: bool = False


def phases(request: RecentRequest, prompt: RecentPrompt | None) -> list[Phase]:
    """Return the phases of one prompt of a request, None for a request without one so far.

    Of a list of prompts each has its own phases, and when these began is not known: they are shown
    as if they began with the request.
    """
    is_running = request.outcome == RUNNING
    if is_running and request.phase == "waiting":
        return [Phase("queue", 0.0, request.total_s, goes_on=True)]
    before: list[_Times] = [("queue", request.queue_s, None)]
    known = [] if prompt is None else list(_of(prompt))
    if known and known[0][0] == "tokenize":
        before.append(known.pop(0))
    rest = request.total_s - sum(seconds for _, seconds, _ in [*before, *known])
    if request.prompt_count > 1 or rest < _SMALL:
        rest = 0.0
    if is_running and rest:
        known.append((_now(request, prompt), rest, None if prompt is None else _busy(prompt)))
    elif rest:
        # The times are those of the last attempt, which ends with the request.
        known.insert(0, (OTHER, rest, None))
    found, at = list[Phase](), 0.0
    for name, seconds, engine in [*before, *known]:
        found.append(Phase(name, at, seconds, engine))
        at += seconds
    if is_running and rest:
        found[-1] = found[-1]._replace(goes_on=True)
    return found


def _of(prompt: RecentPrompt) -> Iterator[_Times]:
    is_split = prompt.prefill is not None
    first, whole = ("kv", "decode_whole") if is_split else ("alone", "alone_whole")
    for name, seconds, engine in (
        ("tokenize", prompt.tokenize_s, None),
        ("encode", prompt.encode_s, None),
        ("prefill", prompt.prefill_s, prompt.prefill),
        (first, prompt.first_s, prompt.decode),
        ("decode", prompt.decode_s, prompt.decode),
        (whole, prompt.whole_s, prompt.decode),
    ):
        if seconds is not None and (seconds >= _SMALL or engine is not None):
            yield name, seconds, engine


def _now(request: RecentRequest, prompt: RecentPrompt | None) -> str:
    """Return the phase in which a request is that has its place."""
    if prompt is None:
        return OTHER
    if request.phase == "streaming":
        return "decode"
    if prompt.prefill is None:
        return OTHER if prompt.decode is None else "alone" if request.stream else "alone_whole"
    if prompt.prefill_s is None:
        return "prefill"
    return "kv" if request.stream else "decode_whole"


def _busy(prompt: RecentPrompt) -> str | None:
    if prompt.prefill is not None and prompt.prefill_s is None:
        return prompt.prefill
    return prompt.decode
