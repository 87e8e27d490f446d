"""NIXL with the notifier on real engines behind the proxy: 200 requests whose clients leave at
random times.
"""

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from .client import ask
from .engine import MODEL
from .long_notifier import Pair, pair
from .proxy import Proxy
from .shapes import COMPLETIONS, story
from .test_load import USED, _leave, _until

__all__ = ["pair"]  # a fixture

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600, func_only=True)]

REQUESTS = 200


@pytest.mark.parametrize("early", [False, True], ids=["on the answer", "on the notice"])
async def test_every_handle_ends_known(pair: Pair, tmp_path: Path, early: bool) -> None:
    """The engines report each handle as loaded or released; none is lost, none expires, and no KV
    is left on either engine.
    """
    port = int(pair.address.rpartition(":")[2])
    settings = {"kv_ready": {"port": port, "notifier": True, "early": early}}
    proxy = Proxy.start([pair.prefill], [pair.decode], tmp_path, settings=settings)
    try:
        chance, gate = random.Random(3), asyncio.Semaphore(8)

        async def one(number: int) -> str:
            async with gate:
                return await _leave(proxy, random.Random(number))

        for number in range(4):  # until both engines have connected to the socket
            body = {
                "model": MODEL,
                "prompt": story(f"warm {number}"),
                "max_tokens": 4,
                "temperature": 0,
            }
            assert (await ask(proxy.url, COMPLETIONS, body)).status == 200
            await asyncio.sleep(0.5)
        went = Counter(
            await asyncio.gather(*(one(chance.randrange(1 << 30)) for _ in range(REQUESTS)))
        )
        assert went["closed"] + went["reset"] > REQUESTS / 4, went
        await _until(
            lambda: not any(proxy.counters().by("pdproxy_kv_handles", "state").values()),
            60,
            "handles are held",
        )
        engines = (pair.prefill, pair.decode)
        await _until(
            lambda: not any(engine.counters().sum(USED) for engine in engines),
            10,
            "KV is still held",
        )
        ended = proxy.counters().by("pdproxy_kv_handles_ended_total", "end")
        notices = proxy.counters().by("pdproxy_kv_notices_total", "event")
        print(f"\n{dict(went)}; handles ended {dict(ended)}; engines reported {dict(notices)}")
        assert set(ended) <= {"loaded", "released", "refused", "aborted"}
        assert ended["loaded"] > REQUESTS / 10
        assert not notices.get("expired")
        assert notices["loaded"] > REQUESTS / 10
        assert proxy.counters().sum("pdproxy_kv_transfer_bytes_total") > 0
    finally:
        proxy.stop()
