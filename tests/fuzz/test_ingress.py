"""The HTTP entry: recorded requests at every cut, mutated ones, several on one connection."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.fuzz.ingress import Ingress, check_ingress, requests_by_h11
from tests.fuzz.mutations import mutated
from tests.fuzz.seeds import recorded_requests

REQUESTS = recorded_requests()
SHORT = sorted(name for name in REQUESTS if len(REQUESTS[name]) < 400)
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n"
    b"0\r\nx: y\r\n\r\n"
)
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
TWO = CHUNKED + GET
MUTATED = st.sampled_from(SHORT).map(REQUESTS.__getitem__).flatmap(mutated)
CUTS = st.lists(st.integers(0, 1000), max_size=4)


def run(data: bytes, cuts: list[int]) -> None:
    async def check() -> None:
        await check_ingress(Ingress(), data, cuts)

    asyncio.run(check())


@pytest.mark.parametrize("name", ["agg_completion", "err_chat_bad_json", "chunked", "two"])
async def test_requests_at_every_cut(name: str) -> None:
    """Cut in two at each byte, requests are served as if they came at once."""
    data = {"chunked": CHUNKED, "two": TWO}.get(name) or REQUESTS[name]
    ingress = Ingress()
    for at in range(len(data)):
        await check_ingress(ingress, data, [at])
        assert ingress.seen.statuses
        assert len(ingress.seen.served) == len(requests_by_h11(data)[0])


@settings(max_examples=80, deadline=None)
@given(MUTATED, CUTS)
@example(GET.replace(b"host: x", b"host: x\r\nconnection: upgrade\r\nupgrade: h2c") + GET, [])
@example(
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nexpect: 100-continue\r\n"
    b"\r\n{}",
    [60],
)
@example(CHUNKED.replace(b"chunked", b"chunked\r\ncontent-length: 3"), [])
@example(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: \r\n\r\n", [])
@example(GET * 70, [])
@example(
    GET.replace(b"host: x", b"host: x\r\nconnection: close") + CHUNKED,
    [len(GET) + 10, len(GET) + 80],
)
def test_mutated_requests(data: bytes, cuts: list[int]) -> None:
    """One answer to each request or the end of the connection; nothing smuggled, logged or left."""
    run(data, cuts)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.one_of(MUTATED, st.sampled_from([GET, CHUNKED, b"\r\n", b"x"])), max_size=4), CUTS
)
@example(
    [
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n",
        CHUNKED.replace(b"/v1/completions", b"/x")[:-9] + b"\x01",
    ],
    [],
)
def test_several_on_one_connection(parts: list[bytes], cuts: list[int]) -> None:
    """What is wrong with one request spoils none before it, and is not read as another."""
    run(b"".join(parts), cuts)
