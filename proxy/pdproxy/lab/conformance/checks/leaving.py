"""Checks with clients that leave: nothing that was made for them may stay, wherever they are on the way.

A moment can be missed: engines are fast. Then another client tries, and in the end it could not be judged.
"""

from __future__ import annotations

import asyncio

from pdproxy.lab.check.engines import Miss
from pdproxy.lab.conformance import questions
from pdproxy.lab.conformance.asking import Place
from pdproxy.lab.conformance.bench import Bench
from pdproxy.lab.conformance.check import Check
from pdproxy.lab.conformance.questions import COMPLETION, LENGTH, Question, Shape
from pdproxy.lab.conformance.results import FailedError, NotJudgedError
from pdproxy.observe.events import HandleEnded

_TRIES = 5
_LEFT = "client_left"
_UNHAPPY = ("lost", "expired")
"""Ends of a handle that nobody wants."""
MOST = 1024
"""Tokens of an answer that a client leaves in the middle of."""


async def prefill(bench: Bench) -> str:
    """A client that leaves while P is at work."""
    return await _leave(bench, COMPLETION, bench.prefill.url, "P answered before the client had left")


async def decode(bench: Bench) -> str:
    """A client that leaves when D has been asked and has said nothing yet."""
    shape = Shape(stream=True, max_tokens=LENGTH)
    return await _leave(bench, shape, bench.decode.url, "D answered before the client had left")


async def _leave(bench: Bench, shape: Shape, url: str, missed: str) -> str:
    tap, options = bench.stand.tap, bench.options
    before = await bench.usage()
    for _ in range(_TRIES):
        since = tap.mark()
        asked = bench.question(shape, questions.long(bench.mark(), bench.granule, bench.max_model_len))

        async def reached(since: int = since) -> bool:
            return await tap.until(lambda: tap.legs(since, url), options.timeout / _TRIES)

        said = await bench.client.leave_when(Place(bench.stand.url, bench.stand.key), asked, reached)
        if isinstance(said, Miss):
            raise FailedError(f"before the client could leave: {said.text}")
        outcome = await _outcome(bench, asked)
        later = url == bench.prefill.url and tap.legs(since, bench.decode.url)
        back = await bench.given_back(before)
        _none_lost(bench, since)
        if said is None and outcome == _LEFT and not later:
            return back
        if outcome not in (_LEFT, "ok"):
            raise FailedError(f"for the proxy a request whose client left ended as {outcome!r}")
    raise NotJudgedError(f"{missed}, {_TRIES} times")


async def stream(bench: Bench) -> str:
    """A client that leaves in the middle of its answer."""
    room = (bench.max_model_len or MOST) // 2
    shape = Shape(stream=True, max_tokens=max(min(MOST, room), LENGTH))
    before = await bench.usage()
    for _ in range(_TRIES):
        since = bench.stand.tap.mark()
        asked = bench.question(shape, questions.moving(bench.mark(), bench.granule, room))
        miss = await bench.client.leave_in_stream(Place(bench.stand.url, bench.stand.key), asked)
        if miss is not None:
            raise FailedError(f"before the client could leave: {miss.text}")
        outcome = await _outcome(bench, asked)
        back = await bench.given_back(before)
        _none_lost(bench, since)
        if outcome == _LEFT:
            return back
        if outcome != "ok":
            raise FailedError(f"for the proxy a request whose client left ended as {outcome!r}")
    raise NotJudgedError(f"the answer was over before the client had left, {_TRIES} times")


def _none_lost(bench: Bench, since: int) -> None:
    """See that the proxy has given back what was made: where a decode engine keeps it in a buffer, no counter tells.

    Raises:
        FailedError: it has not.
    """
    ends = [event.end for event in bench.stand.tap.events(HandleEnded, since)]
    if unhappy := [end for end in ends if end in _UNHAPPY]:
        raise FailedError(f"the proxy could not give the KV back: {', '.join(unhappy)}")


async def _outcome(bench: Bench, asked: Question) -> str:
    patience = bench.settings.deadlines.abandoned_prefill + bench.options.settle
    ended = await bench.stand.tap.ended(asked.request_id, patience)
    if ended is None:
        raise FailedError(f"the proxy has not noticed within {patience:g} s that the client left")
    await asyncio.sleep(0)  # its leases close right behind the report
    if ended.legs and (why := ended.legs[0].why_alone) is not None:
        raise FailedError(f"one engine alone served it: {why}")
    return ended.outcome


CHECKS = (
    Check("leave_prefill", "a client closed its connection as soon as P had its long prompt", prefill),
    Check("leave_decode", "a client closed its connection as soon as D had been asked, before any answer", decode),
    Check("leave_stream", "a client closed its connection at the first output of a long stream", stream),
)
