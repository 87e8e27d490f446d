"""Checks with clients that leave: no KV and no request of theirs may stay, whenever they leave.

A moment can be missed, because engines are fast. Then another client tries; after all tries the
check could not be judged.
"""

from __future__ import annotations

import asyncio
from functools import partial

from pdproxy.check.engines import NoAnswer
from pdproxy.observe.events import HandleEnded
from pdproxy.wire.route_form import Alone
from pdproxy_lab.conformance import requests
from pdproxy_lab.conformance.api_client import Endpoint
from pdproxy_lab.conformance.check import Check
from pdproxy_lab.conformance.pair_under_test import PairUnderTest
from pdproxy_lab.conformance.requests import COMPLETION, LENGTH, Request, Shape
from pdproxy_lab.conformance.results import FailedError, NotJudgedError

_TRIES = 5
_LEFT = "client_left"
_BAD_ENDS = ("lost", "expired")
"""Ends of a handle that count as a failure."""
MAX_TOKENS = 1024
"""The longest answer in the middle of which a client leaves."""


async def prefill(pair: PairUnderTest) -> str:
    """A client that leaves while P works."""
    return await _leave(pair, COMPLETION, pair.prefill.url, "P answered before the client had left")


async def decode(pair: PairUnderTest) -> str:
    """A client that leaves when D has been asked and has not answered."""
    shape = Shape(stream=True, max_tokens=LENGTH)
    return await _leave(pair, shape, pair.decode.url, "D answered before the client had left")


async def _leave(pair: PairUnderTest, shape: Shape, url: str, missed: str) -> str:
    tap, options = pair.stand.tap, pair.options
    before = await pair.usage()
    for _ in range(_TRIES):
        since = tap.mark()
        asked = pair.request(
            shape,
            partial(
                requests.long_text,
                transfer_unit=pair.transfer_unit,
                max_model_len=pair.max_model_len,
            ),
        )

        async def reached(since: int = since) -> bool:
            return await tap.until(lambda: tap.legs(since, url), options.timeout / _TRIES)

        answer = await pair.client.leave_when(
            Endpoint(pair.stand.url, pair.stand.key), asked, reached
        )
        if isinstance(answer, NoAnswer):
            raise FailedError(f"before the client could leave: {answer.text}")
        outcome = await _outcome(pair, asked)
        # Where both are asked at once, D can't have an answer before P has made its KV.
        one_by_one = url == pair.prefill.url and pair.contract.order == "sequential"
        later = one_by_one and tap.legs(since, pair.decode.url)
        back = await pair.wait_released(before)
        _none_lost(pair, since)
        if answer is None and outcome == _LEFT and not later:
            return back
        if outcome not in (_LEFT, "ok"):
            raise FailedError(f"the proxy counted a request whose client left as {outcome!r}")
    raise NotJudgedError(f"{missed}, {_TRIES} times")


async def stream(pair: PairUnderTest) -> str:
    """A client that leaves in the middle of its answer."""
    max_prompt = (pair.max_model_len or MAX_TOKENS) // 2
    shape = Shape(stream=True, max_tokens=max(min(MAX_TOKENS, max_prompt), LENGTH))
    before = await pair.usage()
    for _ in range(_TRIES):
        since = pair.stand.tap.mark()
        asked = pair.request(
            shape,
            partial(
                requests.multi_block_text,
                transfer_unit=pair.transfer_unit,
                max_model_len=max_prompt,
            ),
        )
        no_answer = await pair.client.leave_in_stream(
            Endpoint(pair.stand.url, pair.stand.key), asked
        )
        if no_answer is not None:
            raise FailedError(f"before the client could leave: {no_answer.text}")
        outcome = await _outcome(pair, asked)
        back = await pair.wait_released(before)
        _none_lost(pair, since)
        if outcome == _LEFT:
            return back
        if outcome != "ok":
            raise FailedError(f"the proxy counted a request whose client left as {outcome!r}")
    raise NotJudgedError(f"the answer was complete before the client had left, {_TRIES} times")


def _none_lost(pair: PairUnderTest, since: int) -> None:
    """Check that the proxy has released its handles: a decode engine's receive buffer has no
    counter.

    Raises:
        FailedError: a handle was not released.
    """
    ends = [event.end for event in pair.stand.tap.events(HandleEnded, since)]
    if bad := [end for end in ends if end in _BAD_ENDS]:
        raise FailedError(f"the proxy could not release the KV: {', '.join(bad)}")


async def _outcome(pair: PairUnderTest, asked: Request) -> str:
    timeout = pair.settings.deadlines.abandoned_prefill + pair.options.settle
    ended = await pair.stand.tap.ended(asked.request_id, timeout)
    if ended is None:
        raise FailedError(f"the proxy has not noticed within {timeout:g} s that the client left")
    await asyncio.sleep(0)  # its leases close right after the event
    why = ended.legs[0].why_alone if ended.legs else None
    if why == Alone.FIRST_TOKEN.value:
        return "ok"  # this prompt was not split
    if why is not None:
        raise FailedError(f"one engine alone served it: {why}")
    return ended.outcome


CHECKS = (
    Check(
        "leave_prefill",
        "a client closed its connection as soon as P had received its long prompt",
        prefill,
    ),
    Check(
        "leave_decode",
        "a client closed its connection as soon as D had been asked, before any answer",
        decode,
    ),
    Check(
        "leave_stream",
        "a client closed its connection at the first output of a long stream",
        stream,
    ),
)
