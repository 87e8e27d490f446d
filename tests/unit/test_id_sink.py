"""The client's id in an answer whose leg had another one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.kit.errors import EngineError
from pdproxy.serving.stream.id_sink import IdSink, RenamedReads

NAMED = "0d5f3a" + "b1" * 12 + "70"
"""It ends as it begins: a part of it may be a beginning of it."""


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.ended = False
        self.error: EngineError | None = None

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.headers = headers

    def data(self, chunk: bytes) -> None:
        assert chunk
        self.body += chunk

    def end(self) -> None:
        self.ended = True

    def failed(self, error: EngineError) -> None:
        self.error = error


@given(
    st.lists(
        st.sampled_from(
            [NAMED.encode(), b"0d5", b"0", b"d", b"\n", b"}", b'data: {"id":"cmpl-', b"x"]
        ),
        max_size=12,
    ),
    st.lists(st.integers(1, 40), max_size=30),
    st.sampled_from(["c", "client-1", "f" * 32, "e" * 100]),
)
def test_however_the_answer_is_cut(parts: list[bytes], cuts: list[int], shown: str) -> None:
    """The same bytes as if the whole answer had been changed at once."""
    whole = b"|".join(parts)
    kept = Kept()
    sink = IdSink(kept, NAMED, shown)
    rest = whole
    for cut in cuts:
        if rest[:cut]:
            sink.data(rest[:cut])
        rest = rest[cut:]
    if rest:
        sink.data(rest)
    sink.end()
    assert kept.ended
    assert kept.body == whole.replace(NAMED.encode(), shown.encode())


def test_a_beginning_of_the_id_is_held_back_and_nothing_else() -> None:
    kept = Kept()
    sink = IdSink(kept, NAMED, "client")
    sink.data(b'data: {"id":"cmpl-' + NAMED[:20].encode())
    assert kept.body == b'data: {"id":"cmpl-'
    sink.data(NAMED[20:].encode() + b'"}\n\n')
    assert kept.body == b'data: {"id":"cmpl-client"}\n\n'


def test_headers_show_the_client_s_id() -> None:
    kept = Kept()
    IdSink(kept, NAMED, "client").head(200, [(b"x-request-id", NAMED.encode()), (b"a", b"b")])
    assert kept.headers == [(b"x-request-id", b"client"), (b"a", b"b")]


def test_a_failure_at_the_end_is_the_sink_s() -> None:
    class Full(Kept):
        def data(self, chunk: bytes) -> None:
            raise EngineError("too large")

    kept = Full()
    sink = IdSink(kept, NAMED, "client")
    sink.data(NAMED[:3].encode())
    sink.end()
    assert not kept.ended
    assert kept.error is not None
    assert kept.error.message == "too large"


@pytest.mark.parametrize("pressure", ["pause", "resume"])
def test_reads_past_the_relay_show_the_client_s_id(pressure: str) -> None:
    class Leg:
        def __init__(self) -> None:
            self.calls: list[str] = []
            self.forward: Any = None

        def pause(self) -> None:
            self.calls.append("pause")

        def resume(self) -> None:
            self.calls.append("resume")

        def offer_reads(self, forward: Any) -> None:
            self.forward = forward

    leg = Leg()
    reads = RenamedReads(leg, NAMED, "f" * 32)  # type: ignore[arg-type]
    getattr(reads, pressure)()
    assert leg.calls == [pressure]
    seen: list[bytes] = []

    def forward(read: bytes) -> int:
        seen.append(read)
        return len(read)

    reads.offer_reads(forward)
    assert leg.forward(b"<" + NAMED.encode() + b">") == 34
    assert seen == [b"<" + b"f" * 32 + b">"]
