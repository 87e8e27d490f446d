"""vLLM's serving benchmark over simulated engines, long version: runs only if this file is named,
as in `.ci/full`.
"""

import json
from pathlib import Path

import pytest

from tests.fakes.world import world

from .bench import bench_serve
from .build import ensure
from .engine import MODEL

REQUESTS, TOKENS = 500, 32

pytestmark = pytest.mark.timeout(900, func_only=True)


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
async def test_five_hundred_requests_over_two_pairs(tmp_path: Path, route: str) -> None:
    """32 clients, 500 random requests: none fails, every token arrives, every prompt's KV moved, no
    KV is left.
    """
    async with world(prefill=2, decode=2) as w:
        measured = await bench_serve(
            ensure(),
            f"http://127.0.0.1:{w.port}",
            f"/v1/{route}",
            tmp_path,
            requests=REQUESTS,
            tokens=TOKENS,
            clients=32,
        )
        print(
            json.dumps(
                {
                    key: measured[key]
                    for key in ("completed", "failed", "total_output_tokens", "duration")
                }
            )
        )
        assert (measured["completed"], measured["failed"]) == (REQUESTS, 0)
        assert measured["total_output_tokens"] == REQUESTS * TOKENS
        await w.quiet()
        assert w.metric("pdproxy_requests_total", model=MODEL, outcome="ok") >= REQUESTS
        assert w.metric("pdproxy_alone_total") == 0
        assert set(w.books.endings) == {"loaded"}
