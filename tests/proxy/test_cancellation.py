"""An exchange cancelled at every await: leases closed, handles ended, no task left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from pdproxy.observe.events import HandleEnded
from pdproxy.serving.access.clients import Client
from pdproxy.serving.access.keys import Head
from pdproxy.serving.request.incoming import Incoming
from pdproxy.wire.route import Route
from tests.fakes import answers, scripts
from tests.fakes.world import COMPLETIONS, World, completion, until, world


class _Output:
    """A client's end that keeps everything in memory."""

    def __init__(self) -> None:
        self.body = b""
        self.begun = self.gone = self.paused = self.over = False
        self.ended_by = None
        self.client = Client("a client")

    def drop_body(self) -> None:
        pass

    def whole(self, status: int, headers: object, body: bytes) -> None:
        self.body, self.over, self.begun = body, True, True

    def begin(self, headers: object) -> None:
        self.begun = True

    def write(self, data: bytes) -> None:
        self.body += data

    def chunk_writer(self) -> None:
        return None

    def finish(self) -> None:
        self.over = True

    def break_off(self) -> None:
        self.over = True

    def on_pressure(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        pass


class _Steps:
    """Drives a coroutine and counts how often it waits; at the steps `stops` it is cancelled
    instead of woken.
    """

    def __init__(self, coroutine: Any, stops: Sequence[int]) -> None:
        self._coroutine = coroutine
        self._stops = stops
        self.taken = 0

    def __await__(self) -> Any:
        thrown: BaseException | None = None
        while True:
            try:
                waited = (
                    self._coroutine.throw(thrown)
                    if thrown is not None
                    else self._coroutine.send(None)
                )
            except StopIteration as done:
                return done.value
            self.taken += 1
            if self.taken in self._stops:
                asyncio.current_task().cancel()  # type: ignore[union-attr]
            try:
                thrown = None
                yield waited
            except BaseException as error:
                thrown = error


_no_key = cast("Head", None)  # without keys nobody looks at the head


async def _serve(w: World, body: dict[str, Any], stops: Sequence[int]) -> tuple[int, _Output]:
    """Serve a request, cancelled at its waits `stops`; return how many waits there were."""
    incoming = Incoming(
        Route.COMPLETIONS, None, None, "application/json", (), answers.compact(body), _no_key
    )
    output = _Output()
    steps = _Steps(w.proxy.service.generate(incoming, output), stops)

    async def run() -> None:
        await steps

    task = asyncio.ensure_future(run())
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return steps.taken, output


BODIES = {
    "whole": completion(),
    "stream": completion(stream=True),
    "list": completion(prompt=["p" * 40, "q" * 40], stream=True),
    "alone": completion(echo=True, stream=True),
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("times", [1, 2])
async def test_cancelled_at_every_await(body: str, failing: bool, times: int) -> None:
    """For every k: after a cancel at the k-th wait, and another in the clean-up, nothing is left
    and handles ended once.
    """
    async with world(2, 2, limits={"breaker_failures": 1000}) as w:
        stop, given = 1, 0
        await w.ask(COMPLETIONS, completion())
        await w.quiet()
        idle = len(asyncio.all_tasks())
        while True:
            for engine in w.engines:
                engine.scripts.clear()
                if failing:
                    engine.script(scripts.whole(answers.INTERNAL_500, 500))
            before = len(w.events(HandleEnded))
            taken, output = await _serve(w, BODIES[body], range(stop, stop + times))
            await w.quiet()
            given = len(w.books.history)
            assert len(w.events(HandleEnded)) == given, f"after a cancel at wait {stop}"
            assert before <= given
            assert output.over
            if taken < stop:
                break  # it was over before that wait
            stop += 1
        assert stop > (1 if body == "list" else 2), (
            "a list may wait but once, for the tasks of its prompts"
        )
        assert output.body
        await until(lambda: len(asyncio.all_tasks()) <= idle)
        assert w.metric("pdproxy_inflight") == 0
