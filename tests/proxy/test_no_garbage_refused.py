"""A request that is refused before it is served is freed by reference counts, its body first:
anybody may send such requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from tests.fakes import garbage
from tests.fakes.client import request
from tests.fakes.world import COMPLETIONS, World, completion, until, world

pytestmark = pytest.mark.timeout(120, method="thread")  # uvloop's own loop does not end by a signal

POST = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
GENERATING, PASSED = COMPLETIONS.encode(), b"/v1/embeddings"


async def sent(w: World, data: bytes, status: int) -> None:
    assert (await w.exchange(data)).status == status


async def no_key(w: World) -> None:
    await sent(w, request("POST", COMPLETIONS, completion()), 401)


async def no_key_for_a_passed_route(w: World) -> None:
    await sent(w, request("POST", PASSED.decode(), {"model": "tiny", "input": "x"}), 401)


def chunked(path: bytes, size: int) -> bytes:
    head = POST % path + b"authorization: Bearer key\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"%x\r\n" % 1000 + b" " * 1000 + b"\r\n" + b"%x\r\n" % size + b" " * size


async def too_large(w: World) -> None:
    await sent(w, chunked(GENERATING, 5000), 413)


async def too_large_for_a_passed_route(w: World) -> None:
    await sent(w, chunked(PASSED, 5000), 413)


async def no_space(w: World) -> None:
    await sent(w, chunked(GENERATING, 3000), 503)


async def no_host(w: World) -> None:
    await sent(w, b"GET /health HTTP/1.1\r\n\r\n", 400)


async def long_path(w: World) -> None:
    await sent(w, b"GET /" + b"x" * 1000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414)


@pytest.mark.parametrize(
    "act",
    [
        no_key,
        no_key_for_a_passed_route,
        too_large,
        too_large_for_a_passed_route,
        no_space,
        no_host,
        long_path,
    ],
)
def test_nothing_is_left_to_the_collector(act: Callable[[World], Awaitable[None]]) -> None:
    """Neither the request nor its connection waits for the collector."""

    async def over(w: World) -> None:
        await w.quiet()
        await until(lambda: w.open_connections == 0)

    limits = {"max_body_bytes": 4096, "max_buffered_bytes": 4096}
    garbage.check(world(limits=limits, auth={"api_keys": ("key",)}), act, over)
