"""The sockets that connect to engines for their KV events."""

import asyncio

import pytest

from pdproxy.upstream.kv_events import KvEventSockets
from tests.fakes.ports import free_port


async def test_a_replay_that_waits_is_watched_no_more_once_the_sockets_are_closed() -> None:
    """uvloop ends the process, without a word, where it begins to watch a descriptor that has been
    closed in the same turn.
    """
    sockets = KvEventSockets()
    async with sockets.replay(f"tcp://127.0.0.1:{free_port()}") as replay:
        waiting = asyncio.create_task(replay.next())
        await asyncio.sleep(0)
        descriptor = replay._socket.fileno()
        sockets.close()
        assert not asyncio.get_running_loop().remove_reader(descriptor)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert not sockets._replays
