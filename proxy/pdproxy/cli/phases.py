"""The phases of one request, one behind the other, by the times that the admin API shows of it.

Owns their order, and where time goes that no phase has.
"""

from __future__ import annotations

from typing import NamedTuple

from pdproxy.observe.recent import RUNNING, RecentPrompt, RecentRequest
from pdproxy.observe.requests import phases_of_prompt

OTHER = "other"
"""Time of no phase: earlier attempts, waits for an engine, the proxy itself."""
_SMALL = 0.0005
"""Seconds. Times are rounded: less than this is no time of its own."""


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
    before: list[tuple[str, str | None, float]] = [("queue", None, request.queue_s)]
    known = [] if prompt is None else list(phases_of_prompt(prompt))
    if known and known[0][0] == "tokenize":
        before.append(known.pop(0))
    rest = request.total_s - sum(seconds for _, _, seconds in [*before, *known])
    if request.prompt_count > 1 or rest < _SMALL:
        rest = 0.0
    if is_running and rest:
        known.append((_now(request, prompt), None if prompt is None else _busy(prompt), rest))
    elif rest:
        # The times are those of the last attempt, which ends with the request.
        known.insert(0, (OTHER, None, rest))
    found, at = list[Phase](), 0.0
    for name, engine, seconds in [*before, *known]:
        found.append(Phase(name, at, seconds, engine))
        at += seconds
    if is_running and rest:
        found[-1] = found[-1]._replace(goes_on=True)
    return found


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
