"""A stream that engines parse: whose fault it is if one can't, and what is bounded."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import EngineError, EngineTimeoutError, UnparsedError, Wait
from pdproxy.observe.events import Observers
from pdproxy.scheduling.leases import Verdict
from pdproxy.serving.dispatch.continuing import finish
from pdproxy.serving.dispatch.decode_leg import DecodeLeg
from pdproxy.serving.dispatch.derendering import Derendering
from pdproxy.serving.dispatch.failure_class import verdict_of
from pdproxy.serving.dispatch.parsed_stream import ParsedStream
from pdproxy.serving.stream.relay import Relay
from pdproxy.settings.limits import Deadlines
from pdproxy.wire.engine import Usage
from tests.unit.test_in_turn import NOBODY
from tests.unit.test_parsed_events import answer, event, made

HEAD = [(b"content-type", b"text/event-stream")]


class Output:
    """The client's end."""

    def __init__(self) -> None:
        self.sent = b""

    def write(self, data: bytes) -> None:
        self.sent += data


def stream(answers: list[Any], most: int = 1000) -> tuple[ParsedStream, Output]:
    """A stream whose calls are answered by these, in order; exceptions are raised."""

    async def derender(body: bytes, max_bytes: int) -> bytes | None:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return cast("bytes | None", found)

    output = Output()
    return ParsedStream(cast("Any", output), made(most=most), derender), output


async def test_engines_that_do_not_parse_are_not_the_one_that_answers() -> None:
    for bad in (None, b"{}"):
        found, output = stream([bad])
        found.write(event([20]))
        with pytest.raises(UnparsedError):
            await found.end()
        with pytest.raises(UnparsedError) as caught:
            found.write(event([21]))
        assert verdict_of(caught.value) is Verdict.NEUTRAL
        assert output.sent == b""


async def test_an_answer_that_becomes_too_long_is_no_fault_of_its_engine() -> None:
    found, _ = stream([], most=10)
    with pytest.raises(UnparsedError, match="max_parsed_tokens"):
        found.write(event([1] * 20))
    with pytest.raises(UnparsedError):
        await found.end()


async def test_what_is_no_completion_is_a_fault_of_its_engine() -> None:
    found, _ = stream([])
    with pytest.raises(EngineError) as caught:
        found.write(b"data: {}\n\n")
    assert verdict_of(caught.value) is Verdict.FAILED


async def test_nothing_is_left_out_behind_an_unexpected_error() -> None:
    found, output = stream([ValueError("a defect"), answer(content="b")])
    found.write(event([20]))
    with pytest.raises(ValueError, match="a defect"):
        await found.end()
    with pytest.raises(UnparsedError):
        found.write(event([21]))
    assert output.sent == b""


async def test_a_stream_that_was_not_written_is_not_finished() -> None:
    """The engine's last events may be what could not be parsed."""
    found, _ = stream([])
    with pytest.raises(EngineError):
        found.write(b"data: {}\n\n")
    relay = Relay(wants_usage=False, wants_done=False)
    relay.output, relay.filter.finished, relay.filter.usage = cast("Any", found), True, Usage()
    assert not finish(relay, None)


async def test_calls_at_a_time() -> None:
    """Many streams are cut at once, and the engines parse slowly: a probe still gets a connection,
    and each call its turn.
    """
    now = most = 0

    async def ask(
        url: str, path: str, body: bytes, authorization: bytes | None, max_bytes: int
    ) -> bytes:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await asyncio.sleep(0)
        now -= 1
        return b"x"

    engine = SimpleNamespace(
        url="http://e",
        requests=0,
        usable=lambda _: True,
        evidence=SimpleNamespace(derenders=True),
        serves=lambda _: True,
    )
    engines = {"http://e": SimpleNamespace(in_ledger=engine)}
    derendering = Derendering(
        ask,
        cast("Any", engines),
        Observers([]),
        Clock(),
        deadlines=Deadlines(between_tokens=60),
        most=8192,
    )
    found = await asyncio.gather(
        *(
            derendering.answer("/", None, b"", None, without="", max_bytes=9, asked_for=NOBODY)
            for _ in range(300)
        )
    )
    assert found == [b"x"] * 300
    assert 1 < most < 100


@pytest.mark.parametrize(
    ("error", "has_it"),
    [
        (EngineError("closed"), False),
        (EngineTimeoutError("no data in 30 s", wait=Wait.FIRST_TOKEN), True),
        (EngineTimeoutError("stalled", wait=Wait.STALLED), True),
    ],
)
async def test_a_deadline_while_the_engine_shows_that_it_has_a_request(
    error: EngineError, has_it: bool
) -> None:
    """The client has left, the engine has sent headers: its silence is no refusal, whatever ends
    it.
    """
    relay = Relay(wants_usage=False)
    relay.head(200, list(HEAD))
    relay.first.cancel()
    request = SimpleNamespace(parsed=SimpleNamespace(stream=True))
    leg = SimpleNamespace(
        relay=relay, _resources=SimpleNamespace(clock=Clock()), _request=request, _sent_at=0.0
    )
    asked = asyncio.ensure_future(DecodeLeg._is_accepted(cast("Any", leg)))
    while relay.first.cancelled():
        await asyncio.sleep(0)
    relay.failed(error)
    assert await asked is has_it
