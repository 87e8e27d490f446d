"""The simulator's faults at their moments as cases of tables, and what a client may see of one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable

from pdproxy_lab.sim.faults.kinds import KINDS
from pdproxy_lab.sim.faults.moments import MESSAGES as NO_ANSWERS
from pdproxy_lab.sim.faults.moments import Moment
from pdproxy_lab.sim.server import SimServer
from tests.fakes import named
from tests.fakes.client import Answer
from tests.fakes.named import ENDS
from tests.fakes.passed import MESSAGES, RESPONSES
from tests.fakes.world import COMPLETIONS

PASSING = ("slow", "split", "join", "lease_expiry", "load_failure")
"""Kinds that delay an answer or cut it elsewhere, or that the proxy can go round."""
SILENT = ("stall", "freeze", "no_fin")
ALL = os.environ.get("PDPROXY_TEST_MOMENTS") == "all"
STREAM_ONLY: tuple[Moment, ...] = ("before_first_token", "mid_stream", "before_done")
Case = tuple[str, str, Moment, bool]
"""The role of the engine, the fault, its moment, and whether the client streams."""
Kept = tuple[str, str, Moment, bool, bool]
"""A case, and whether the proxy has a kept connection to each engine when the fault comes."""


def cases() -> list[Case]:
    """All that go together; every second, `.ci/full` takes all."""
    found: list[Case] = []
    for kind, facts in KINDS.items():
        if kind == "core_freeze":
            continue  # what the API server has already is sent: tests/proxy/test_stalls.py
        for moment in facts.moments:
            if moment in NO_ANSWERS:
                # no answer's: tests/proxy/test_connectors.py, test_notifier.py and
                # test_kv_events.py
                continue
            for stream in (False, True):
                if not stream and (moment in STREAM_ONLY or facts.streams):
                    continue
                if stream and facts.replaces and moment != "queued":
                    continue  # its head is out by then
                found.append(("decode", kind, moment, stream))
            # A prefill leg is never streamed.
            if moment not in STREAM_ONLY and not facts.streams:
                found.append(("prefill", kind, moment, True))
    return found if ALL else found[::2]


def with_connections() -> list[Kept]:
    """The cases with new and with kept connections, one of the two for each; `.ci/full` takes both.

    There are faults that only new connections have.
    """
    found: list[Kept] = []
    for number, case in enumerate(cases()):
        only_new = case[1] == "refuse" or case[2] == "accept"
        ways = (False,) if only_new else (False, True) if ALL else (number % 2 == 1,)
        found += [(*case, kept) for kept in ways]
    return found


def half(*, second: bool) -> list[Kept]:
    """One half of these, of each kind at each engine; `.ci/full` takes all."""
    found = with_connections()
    if ALL:
        return found
    return [
        case
        for at, cases in enumerate(_alike(found))
        for case in (cases[(at + second) % 2 :: 2] or cases)
    ]


def few(path: str, *, second: bool) -> list[Kept]:
    """One case of every second kind at an engine, the other kinds for the other route of named
    events; with `second` the other way round, for engines that hand nothing over. `.ci/full` takes
    all.
    """
    # responses have no mark behind their last event
    lacking = {"handed_over"} if second else set()
    lacking |= {"before_done"} if path == RESPONSES else set()
    found: list[Kept] = []
    for at, alike in enumerate(_alike(with_connections())):
        cases = [case for case in alike if case[2] not in lacking]
        if ALL:
            found += cases
        elif cases and at % 2 == (second != (path == MESSAGES)):
            found.append(cases[at // 2 % len(cases)])
    return found


def _alike(found: list[Kept]) -> list[list[Kept]]:
    """Put the cases of each kind at each engine together."""
    kinds = dict.fromkeys(case[:2] for case in found)
    return [[case for case in found if case[:2] == one] for one in kinds]


def silent(kind: str, moment: Moment) -> bool:
    """Whether an engine says nothing more, so that only a deadline ends the wait for it."""
    return kind in SILENT or (kind, moment) == ("garbage", "head")


def expected(role: str, kind: str, moment: Moment, stream: bool, path: str = COMPLETIONS) -> str:
    """What the client sees: errors only where nobody says anything."""
    if role == "prefill" or moment == "after" or kind in PASSING:
        return "right"
    if kind == "abort_finish" and path == RESPONSES:
        # an aborted response looks complete: nobody can tell
        return "right" if moment == "last_chunk" else "cut short"
    if stream and path in ENDS and moment in ("mid_stream", "last_chunk", "before_done"):
        return "error event"  # no other engine can go on with it
    if stream:
        return "right"  # another engine goes on, where something was sent
    # A whole answer has no deadline but the request's own: an engine may think for long.
    return "error" if silent(kind, moment) else "right"


def left_to_the_lease(role: str, kind: str, moment: Moment) -> bool:
    """Whether P's blocks may be freed by nothing but the end of their lease: its answer is lost, or
    D fell silent with it.
    """
    if kind in ("slow", "split", "join", "load_failure") or (
        moment == "after" and kind != "garbage"
    ):
        return False
    lost = role == "prefill" and moment not in ("accept", "queued")
    return lost or kind == "lease_expiry" or silent(kind, moment)


def seen(answer: Answer, text: str, path: str = COMPLETIONS) -> str:
    """Which it is: the right answer; an error with a status and the API's body; or a stream that
    was right as far as it came and ends in an error event. Anything else fails. `text`: the right
    one. A response may also be `cut short`.
    """
    if answer.status != 200:
        error = answer.json["error"]
        assert isinstance(error["message"], str)
        assert error["message"]
        if path == MESSAGES:
            assert (answer.json["type"], error["type"]) == ("error", error["type"])
        else:
            assert error["code"] == answer.status
        assert answer.status in (500, 502, 503, 504), answer.body
        return "error"
    assert answer.ended, "a body without its end"
    if path in ENDS:
        return _seen_named(answer, text, path)
    whole = answer.header("content-type") == "application/json"
    if whole or (answer.events[-1] == b"data: [DONE]\n\n" and b'"error"' not in answer.body):
        assert answer.text == text
        return "right"
    error = json.loads(answer.events[-1].removeprefix(b"data: "))["error"]
    assert isinstance(error["message"], str)
    before = b"".join(answer.events[:-1])
    assert b"[DONE]" not in before
    assert text.startswith(Answer(200, answer.headers, before, [], True).text if before else "")
    return "error event"


def _seen_named(answer: Answer, text: str, path: str) -> str:
    if answer.header("content-type") == "application/json":
        found, failed = named.text_of(answer), False
    else:
        failed = named.failure(path, answer) is not None
        found = named.text_of_events(answer.events)
    if failed or found != text:
        assert text.startswith(found)
        assert failed or path == RESPONSES
        return "error event" if failed else "cut short"
    return "right"


async def revive(engines: Iterable[SimServer]) -> None:
    """Bring engines back to life."""
    for engine in engines:
        engine.faults.clear()
        if engine.life == "frozen":
            await engine.thaw()
        if engine.life != "up" or engine.engine.dead:
            await engine.restart()


def usage(engine: SimServer) -> float:
    """The share of an engine's blocks that are in use, summed over its ranks."""
    return sum(core.pool.usage for core in engine.engine._cores)
