"""Every fault at every moment, on the prefill and on the decode engine: what the client sees through the proxy.

A client sees one of three things, and never anything else: the right answer; an error with a status and an OpenAI body; a
stream that was right as far as it came and ends in an error event. After it no block, task or lease is left.
"""

from __future__ import annotations

import json
import os

import pytest

from pdproxy_lab.sim.faults.book import Fault
from pdproxy_lab.sim.faults.kinds import KINDS
from pdproxy_lab.sim.faults.moments import MESSAGES, Moment
from tests.fakes.client import Answer
from tests.fakes.clock import STEP, ManualClock
from tests.fakes.world import COMPLETIONS, TEXT, World, completion, until, world

PASSING = ("slow", "split", "join", "lease_expiry", "load_failure")
"""Kinds that delay an answer or cut it elsewhere, or that the proxy can go round."""
SILENT = ("stall", "freeze", "no_fin")
ALL = os.environ.get("PDPROXY_TEST_MOMENTS") == "all"
STREAM_ONLY: tuple[Moment, ...] = ("before_first_token", "mid_stream", "before_done")


def cases() -> list[tuple[str, str, Moment, bool]]:
    """Engine, kind, moment and whether the client streams, as far as they go together; every second, `.ci/full` takes all."""
    found: list[tuple[str, str, Moment, bool]] = []
    for kind, facts in KINDS.items():
        if kind == "core_freeze":
            continue  # what the API server has already is sent: tests/proxy/test_stalls.py
        for moment in facts.moments:
            if moment in MESSAGES:
                continue  # no answer's: tests/proxy/test_connectors.py, test_notifier.py and test_kv_events.py
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


def with_connections() -> list[tuple[str, str, Moment, bool, bool]]:
    """The cases, and whether the proxy has a kept connection to each engine when the fault comes: in every second one.

    `.ci/full` takes both ways. There are faults that only new connections have.
    """
    found: list[tuple[str, str, Moment, bool, bool]] = []
    for number, case in enumerate(cases()):
        only_new = case[1] == "refuse" or case[2] == "accept"
        ways = (False,) if only_new else (False, True) if ALL else (number % 2 == 1,)
        found += [(*case, kept) for kept in ways]
    return found


def half(*, second: bool) -> list[tuple[str, str, Moment, bool, bool]]:
    """One half of these, of each kind at each engine; `.ci/full` takes all.

    Other orders of the legs have tables of their own, which take half of the cases each.
    """
    found = with_connections()
    if ALL:
        return found
    alike = [[case for case in found if case[:2] == one] for one in dict.fromkeys(case[:2] for case in found)]
    return [case for at, cases in enumerate(alike) for case in (cases[(at + second) % 2 :: 2] or cases)]


def seen(answer: Answer) -> str:
    """Which of the three it is; anything else fails."""
    if answer.status != 200:
        error = answer.json["error"]
        assert isinstance(error["message"], str)
        assert error["message"]
        assert error["code"] == answer.status
        assert answer.status in (500, 502, 503, 504), answer.body
        return "error"
    assert answer.ended, "a body without its end"
    if answer.header("content-type") == "application/json":
        assert answer.text == TEXT
        return "right"
    if answer.events[-1] == b"data: [DONE]\n\n" and b'"error"' not in answer.body:
        assert answer.text == TEXT
        return "right"
    error = json.loads(answer.events[-1].removeprefix(b"data: "))["error"]
    assert isinstance(error["message"], str)
    before = b"".join(answer.events[:-1])
    assert b"[DONE]" not in before
    text = Answer(200, answer.headers, before, [], True).text if before else ""
    assert TEXT.startswith(text)
    return "error event"


async def lives_again(w: World, clock: ManualClock) -> None:
    """Bring every engine back to life, and see that all is well."""
    for engine in w.engines:
        engine.sim.faults.clear()
        if engine.sim.life == "frozen":
            await engine.sim.thaw()
        if engine.sim.life != "up" or engine.sim.engine.dead:
            await engine.sim.restart()
    await w.probe()
    await clock.through(w.quiet(), STEP)


def expected(role: str, kind: str, moment: Moment, stream: bool) -> str:
    """What the client sees: errors only where nobody says anything."""
    if role == "prefill" or moment == "after" or kind in PASSING or stream:
        return "right"  # another engine goes on with a stream
    # A whole answer has no deadline but the request's own: an engine may think for long.
    return "error" if kind in SILENT or (kind, moment) == ("garbage", "head") else "right"


def left_to_the_lease(role: str, kind: str, moment: Moment) -> bool:
    """Whether P's blocks may be freed by nothing but the end of their lease: its answer is lost, or D fell silent with it."""
    if kind in ("slow", "split", "join", "load_failure") or (moment == "after" and kind != "garbage"):
        return False
    lost = role == "prefill" and moment not in ("accept", "queued")
    return lost or kind in ("lease_expiry", *SILENT) or (kind, moment) == ("garbage", "head")


@pytest.mark.parametrize("second", [True, False])
def test_a_half_has_every_kind_and_every_moment(second: bool) -> None:
    """Whatever the order of the legs is, each of them is seen, on connections that are kept and on new ones."""
    found, every = half(second=second), with_connections()
    assert {case[:2] for case in found} == {case[:2] for case in every}
    for column in (2, 3, 4):
        assert {case[column] for case in found} == {case[column] for case in every}


@pytest.mark.parametrize(("role", "kind", "moment", "stream", "kept"), with_connections())
async def test_what_a_client_sees(role: str, kind: str, moment: Moment, stream: bool, kept: bool) -> None:
    prefills, decodes = (2, 1) if role == "prefill" else (1, 3)  # the last decode engine would not be risked
    clock = ManualClock()
    # Only what nobody else ends may wait for a deadline.
    waits = kind in SILENT or (kind, moment) == ("garbage", "head")
    async with world(prefills, decodes, leaves=True, clock=clock) as w:
        engine = (w.prefill if role == "prefill" else w.decode)[1]
        for _ in range(max(prefills, decodes) if kept else 0):
            assert seen(await w.ask(COMPLETIONS, completion(stream=stream))) == "right"
            await w.quiet()
        assert all(one.requests for one in w.engines) == kept
        engine.sim.faults.add(Fault(kind=kind, at=moment))
        for _ in range(max(prefills, decodes)):  # ties go round: one of these requests is this engine's
            asked = w.ask(COMPLETIONS, completion(stream=stream))
            answer = await (clock.through(asked, STEP) if waits else asked)
            if engine.sim.faults.happened or kind == "refuse":
                break
            assert seen(answer) == "right"
        assert seen(answer) == expected(role, kind, moment, stream), (answer.status, answer.body)
        assert engine.sim.faults.happened or kind == "refuse", "the fault came to nothing"
        await lives_again(w, clock)
        assert seen(await w.ask(COMPLETIONS, completion(stream=stream))) == "right"
        await clock.through(w.quiet(), STEP)
        if left_to_the_lease(role, kind, moment):
            for one in w.prefill:
                one.sim.engine.expire_leases()
        await w.freed()
        await until(lambda: all(one.core().pool.usage == 0 for one in w.engines))
