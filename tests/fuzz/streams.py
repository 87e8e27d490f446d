"""What must hold for any bytes that an engine sends as a stream, however they are cut into reads.

The reference is a reader of server-sent events that goes line by line, as clients do; it shares no
code with the relay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pdproxy.kit.errors import EngineError, PdproxyError
from pdproxy.serving.stream.named_events import NamedTemplates
from pdproxy.serving.stream.phase import StreamStarted
from pdproxy.serving.stream.relay import Relay
from pdproxy.upstream.connection import ForwardRead
from pdproxy.wire.api_errors import Dialect
from pdproxy.wire.chunks import chunk, whole_chunks

NAMED_ENDS = (
    b"event: response.completed\n",
    b"event: response.incomplete\n",
    b"event: message_stop\n",
)
NAMED_FAILURES = (b"event: error\n", b"event: response.failed\n")
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]


class Output:
    """A client that reads as fast as it can."""

    def __init__(self) -> None:
        self.sent = b""
        self.begun = self.gone = self.paused = False

    def on_pressure(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Never slow."""

    def write(self, data: bytes) -> None:
        self.sent += data

    def chunk_writer(self) -> Callable[[bytes], None]:
        return self.write_chunk

    def write_chunk(self, frame: bytes) -> None:
        (payload,), end = whole_chunks(frame)
        assert end == len(frame)
        self.sent += payload

    def begin(self, headers: object) -> None:
        raise AssertionError("a relay does not begin an answer")

    whole = finish = break_off = begin


class _Leg:
    take: ForwardRead | None = None

    def pause(self) -> None:
        raise AssertionError("paused without reason")

    resume = close = pause

    def offer_reads(self, take: ForwardRead) -> None:
        self.take = take


@dataclass(frozen=True)
class Ended:
    """What became of a stream: what the client got, whether it was told a good end, how far it
    came.
    """

    sent: bytes
    good: bool
    started: bool


def events(stream: bytes) -> list[bytes]:
    """The data of each whole event, read line by line."""
    found, lines, rest = [], [], stream
    while b"\n" in rest:
        line, _, rest = rest.partition(b"\n")
        if line:
            lines.append(line)
        elif lines:
            data = [
                part.removeprefix(b"data:").removeprefix(b" ")
                for part in lines
                if part.startswith(b"data:")
            ]
            if data:
                found.append(b"\n".join(data))
            lines = []
    return found


async def relayed(
    pieces: Sequence[bytes], *, wants_usage: bool, at_once: bool, named: Dialect | None = None
) -> Ended:
    """Send reads through a relay, then the end of the connection; `at_once`: its caller is awake as
    soon as there is data. `named`: the API of a stream whose events have names.
    """
    templates = None if named is None else NamedTemplates()
    relay = Relay(wants_usage=wants_usage, named=named, templates=templates)
    output, leg = Output(), _Leg()
    relay.head(200, HEADERS)
    started = False

    def wake() -> None:
        nonlocal started
        if not started and relay.first.done() and relay.first.exception() is None:
            assert isinstance(relay.first.result(), StreamStarted)
            started = True
            relay.flow(output, leg)  # type: ignore[arg-type]

    for piece in pieces:
        if piece and (leg.take is None or not leg.take(chunk(piece))):
            relay.data(piece)
        if at_once:
            wake()
    relay.end()
    wake()
    if not started:
        error = relay.first.exception() if relay.first.done() else None
        assert isinstance(error, EngineError), f"nothing said why it did not start: {relay!r}"
        return Ended(output.sent, good=False, started=False)
    assert relay.done.done(), "it never ends"
    error = relay.done.exception()
    assert error is None or isinstance(error, PdproxyError)
    return Ended(output.sent, good=error is None, started=True)


async def check_stream(stream: bytes, cuts: Sequence[int]) -> None:
    """Assert what a client may rely on, for a stream cut at these offsets."""
    bounds = [0, *sorted({cut % (len(stream) + 1) for cut in cuts}), len(stream)]
    pieces = [stream[one:two] for one, two in pairwise(bounds)]
    for wants_usage in (True, False):
        whole = await relayed([stream], wants_usage=wants_usage, at_once=True)
        cut = await relayed(pieces, wants_usage=wants_usage, at_once=True)
        late = await relayed(pieces, wants_usage=wants_usage, at_once=False)
        for one in (whole, cut, late):
            _check(stream, one, wants_usage)
        assert whole.good == cut.good == late.good, "the cuts decide whether the end is good"
        *some, most = sorted((events(one.sent) for one in (whole, cut, late)), key=len)
        # what failed before it was passed on, is an error without data before it
        for fewer in some:
            assert fewer == (most if whole.good else most[: len(fewer)]), (
                "the cuts decide what the client gets"
            )


async def check_named(stream: bytes, cuts: Sequence[int], named: Dialect) -> None:
    """The same for a stream whose events have names."""
    bounds = [0, *sorted({cut % (len(stream) + 1) for cut in cuts}), len(stream)]
    pieces = [stream[one:two] for one, two in pairwise(bounds)]
    found = [
        await relayed(own, wants_usage=False, at_once=at_once, named=named)
        for own, at_once in (([stream], True), (pieces, True), (pieces, False))
    ]
    came, passed = _whole(stream), [_whole(one.sent) for one in found]
    for one, went in zip(found, passed, strict=True):
        assert one.sent == b"" or one.sent.endswith(b"\n\n"), "half an event"
        assert went == came[: len(went)], "events that the engine did not send"
        ends = [event for event in went if event.startswith(NAMED_ENDS)]
        assert ends == went[-1:] if one.good else not ends, "an end that is none"
        assert not any(event.startswith(NAMED_FAILURES) for event in went)
        assert b"\r" not in one.sent, "lines that only clients find"
    assert len({one.good for one in found}) == 1, "the cuts decide whether the end is good"
    *some, most = sorted(passed, key=len)
    assert all(most[: len(one)] == one for one in some), "the cuts decide what the client gets"


def _whole(stream: bytes) -> list[bytes]:
    """The whole events of a stream, without empty lines."""
    return [event for one in stream.split(b"\n\n")[:-1] if (event := one.strip(b"\n"))]


def _check(stream: bytes, ended: Ended, wants_usage: bool) -> None:
    came, went = events(stream), events(ended.sent)
    marks = [data for data in went if data.startswith(b"[DONE]")]
    if ended.good:
        assert went, "a good end of nothing"
        assert went[-1].startswith(b"[DONE]"), "a good end without its mark"
        assert not any(map(_is_error, went)), "an error in a stream that ended well"
    else:
        assert not marks, "an end mark before a bad end"
    assert len(marks) <= 1, "two end marks"
    if wants_usage:
        assert went == came[: len(went)], "events that the engine did not send"
        if b"\n\n\n" not in stream and not stream.startswith(b"\n"):
            assert stream.startswith(ended.sent), "bytes that the engine did not send"


def _is_error(data: bytes) -> bool:
    """Whether an event is an error as vLLM's streams have them."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return data.startswith(
        (b'{"error"', b'{"object":"error"', b'{"object": "error"')
    ) and isinstance(value, dict)
