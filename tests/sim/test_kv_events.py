"""Engines that publish which KV blocks they have, over real sockets: encoding, order, replays,
faults.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.cli import sim as command
from pdproxy_lab.sim.facts import KvEventsConfig, SimFacts
from pdproxy_lab.sim.kv_events import END
from pdproxy_lab.sim.server import SimServer
from tests.sim.raw import ask, completion, get, until
from tests.sim.test_sim_command import arguments

zmq = pytest.importorskip("zmq")

DATA = Path(__file__).parents[1] / "data" / "kv_events.jsonl"
FAST = Hardware(speed=0)
EVENTS = KvEventsConfig(
    enable_kv_cache_events=True,
    endpoint="tcp://*:0",
    replay_endpoint="tcp://*:0",
    topic="t",
    buffer_steps=8,
)
PROMPT = list(range(300, 400))


class Subscriber:
    """A SUB socket and a DEALER, and what came in: topic, number, events."""

    def __init__(self, source: KvEventsConfig, topic: str = "") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(topic.encode())
        self._socket.connect(source.endpoint)
        self._dealer = self._context.socket(zmq.DEALER)
        if source.replay_endpoint:
            self._dealer.connect(source.replay_endpoint)
        self.messages: list[tuple[str, int, list[Any]]] = []

    async def subscribed(self, publisher: Any) -> None:
        """Wait until a publisher has the subscription. ZMQ says nowhere when: messages are sent
        until one comes, and dropped.
        """
        while not self._socket.poll(0):
            publisher.send_multipart([b"t", b"not yet"])
            await asyncio.sleep(0.01)
        publisher.send_multipart([b"t", b"the last"])
        await until(
            lambda: self._socket.poll(0) and self._socket.recv_multipart()[1] == b"the last"
        )

    def collect(self) -> list[tuple[str, int, list[Any]]]:
        while self._socket.poll(0):
            topic, number, payload = self._socket.recv_multipart()
            self.messages.append(
                (topic.decode(), int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)[1])
            )
        return self.messages

    async def got(self, count: int) -> list[tuple[str, int, list[Any]]]:
        """Wait for so many messages; return all."""
        await until(lambda: len(self.collect()) >= count)
        return self.messages

    async def replay(self, start: int) -> list[int]:
        """The numbers that a replay brings."""
        self._dealer.send_multipart([b"", start.to_bytes(8, "big")])
        found: list[int] = []
        while True:
            await until(lambda: bool(self._dealer.poll(0)))
            empty, topic, number, payload = self._dealer.recv_multipart()
            assert empty == b""
            if number == END:
                assert (topic, payload) == (b"", b"")
                return found
            assert topic == b"t"
            found.append(int.from_bytes(number, "big"))

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as made:
        yield made


async def engine(stack: AsyncExitStack, **facts: Any) -> SimServer:
    """An engine that publishes."""
    made = SimFacts(hardware=FAST, eos_every=0, connector="none", kv_events=EVENTS, **facts)
    return await stack.enter_async_context(SimServer(made, chance=3))


async def subscriber(stack: AsyncExitStack, sim: SimServer, rank: int = 0) -> Subscriber:
    """One whose subscription the engine has."""
    made = Subscriber(sim.engine.kv_events.sources[rank], "t")
    stack.callback(made.close)
    await made.subscribed(sim.engine.kv_events.ranks[rank]._publisher)
    return made


async def complete(sim: SimServer, prompt: list[int] = PROMPT, **fields: Any) -> None:
    found = await ask(sim.port, completion(prompt=prompt, **{"max_tokens": 1, **fields}))
    assert found.answer.status == 200, found.data
    found.leave()


async def sources(sim: SimServer) -> Any:
    found = await ask(sim.port, get("/kv_event_sources"))
    assert found.answer.status == 200
    found.leave()
    return found.answer.json


def shape(value: Any) -> Any:
    """The names, types and order of what was decoded."""
    if isinstance(value, dict):
        return {name: shape(one) for name, one in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


async def test_events_have_the_shape_of_recorded_ones(stack: AsyncExitStack) -> None:
    sim = await engine(stack, num_gpu_blocks=20, max_model_len=256)
    reader = await subscriber(stack, sim)
    for first in (0, 1000, 2000, 3000):
        await complete(sim, list(range(first, first + 100)))
    assert sim.engine.reset_prefix_cache()
    await complete(sim, list(range(50)))
    found: dict[tuple[str, bool], Any] = {}
    for _, _, events in await reader.got(5):
        for event in events:
            found.setdefault((event["type"], event.get("parent_block_hash") is None), event)
    recorded: dict[tuple[str, bool], Any] = {}
    for line in DATA.read_text().splitlines():
        one = json.loads(line)
        if one["topic"] != "bytes":
            for event in msgspec.msgpack.decode(bytes.fromhex(one["hex"]))[1]:
                recorded.setdefault((event["type"], event.get("parent_block_hash") is None), event)
    assert {kind for kind, _ in found} == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    for kind, event in found.items():
        assert list(event) == list(recorded[kind])
        assert shape(event) == shape(recorded[kind])


async def test_numbers_begin_at_0_and_blocks_follow_each_other(stack: AsyncExitStack) -> None:
    sim = await engine(stack)
    reader = await subscriber(stack, sim)
    await complete(sim, max_tokens=20)
    messages = await reader.got(2)
    assert [number for _, number, _ in messages] == [0, 1]
    first, second = messages[0][2][0], messages[1][2][0]
    assert (first["token_ids"], len(first["block_hashes"])) == (PROMPT[:96], 6)
    assert second["parent_block_hash"] == first["block_hashes"][-1]
    assert second["token_ids"][:4] == PROMPT[96:]


async def test_a_block_that_is_written_again_is_reported_as_removed_before(
    stack: AsyncExitStack,
) -> None:
    sim = await engine(stack, num_gpu_blocks=9, max_model_len=112)
    reader = await subscriber(stack, sim)
    await complete(sim)
    await complete(sim, [7] * 100)
    (_, _, first), (_, _, second) = await reader.got(2)
    assert [event["type"] for event in second] == ["BlockRemoved"] * (len(second) - 1) + [
        "BlockStored"
    ]
    removed = [event["block_hashes"][0] for event in second[:-1]]
    assert set(removed) <= set(first[0]["block_hashes"])
    assert len(removed) == len(set(removed)) >= 5


async def test_an_emptied_cache_is_reported_with_the_next_step(stack: AsyncExitStack) -> None:
    sim = await engine(stack)
    reader = await subscriber(stack, sim)
    await complete(sim)
    assert sim.engine.reset_prefix_cache()
    await asyncio.sleep(0.1)
    assert len(await reader.got(1)) == 1
    await complete(sim)
    (_, _, events) = (await reader.got(2))[1]
    assert [event["type"] for event in events] == ["AllBlocksCleared", "BlockStored"]


async def test_blocks_are_announced_again_only_for_a_request_that_wants_it(
    stack: AsyncExitStack,
) -> None:
    sim = await engine(stack)
    reader = await subscriber(stack, sim)
    await complete(sim)
    await complete(sim)
    await complete(sim, vllm_xargs={"kv_cache_report_mode": "full"})
    messages = await reader.got(2)
    assert len(messages) == 2
    assert messages[1][2] == messages[0][2]


async def test_the_caches_salt_is_in_the_first_blocks_extra_keys(stack: AsyncExitStack) -> None:
    sim = await engine(stack)
    reader = await subscriber(stack, sim)
    await complete(sim, cache_salt="s")
    ((_, _, (event,)),) = await reader.got(1)
    assert event["extra_keys"] == [["s"], *[None] * 5]


async def test_a_replay_has_the_last_messages_also_those_that_were_lost(
    stack: AsyncExitStack,
) -> None:
    sim = await engine(stack)
    reader = await subscriber(stack, sim)
    sim.faults.add("lost_kv_events:next=1")
    for first in range(12):
        await complete(sim, [first] * 20)
    assert [number for _, number, _ in await reader.got(11)] == list(range(1, 12))
    assert await reader.replay(0) == list(range(4, 12))  # buffer_steps
    assert await reader.replay(10) == [10, 11]
    assert await reader.replay(12) == []
    assert sim.engine.kv_events.ranks[0].counts["lost"] == 1


async def test_a_replay_may_stay_unanswered(stack: AsyncExitStack) -> None:
    sim = await engine(stack)
    reader = await subscriber(stack, sim)
    sim.faults.add("silent_replay")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await reader.replay(0)
    assert await reader.replay(0) == []


async def test_a_restart_begins_at_0_with_sockets_of_its_own(stack: AsyncExitStack) -> None:
    """The system may give it the port that it had."""
    sim = await engine(stack)
    before = sim.engine.kv_events.sources[0]
    await complete(sim)
    await sim.restart()
    after = sim.engine.kv_events.sources[0]
    assert after is not before
    reader = await subscriber(stack, sim)
    assert await reader.replay(0) == []
    await complete(sim)
    assert [number for _, number, _ in await reader.got(1)] == [0]


async def test_sources_name_each_ranks_addresses(stack: AsyncExitStack) -> None:
    sim = await engine(stack, data_parallel_size=2)
    found = await sources(sim)
    assert sorted(found) == ["0", "1"]
    assert found["0"]["endpoint"] != found["1"]["endpoint"]
    assert set(found["0"]) == {
        "enable_kv_cache_events",
        "publisher",
        "endpoint",
        "replay_endpoint",
        "buffer_steps",
        "hwm",
        "max_queue_size",
        "topic",
    }


async def test_an_engine_without_the_option_has_no_sources(stack: AsyncExitStack) -> None:
    sim = await stack.enter_async_context(SimServer(SimFacts(hardware=FAST, connector="none")))
    assert await sources(sim) == {}


def test_the_option_takes_vllms_json() -> None:
    given = '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5559", "topic": "p"}'
    facts = command.facts_from(arguments("--kv-events-config", given))  # type: ignore[arg-type]
    assert facts.kv_events is not None
    assert (facts.kv_events.publisher, facts.kv_events.hwm) == ("zmq", 100_000)
    for wrong in ("{", "[]", '{"endpoint": "http://x"}', '{"hwm": -1}', '{"unknown": 1}'):
        with pytest.raises(ValueError, match="--kv-events-config must be JSON as for vLLM"):
            command.facts_from(arguments("--kv-events-config", wrong))  # type: ignore[arg-type]


async def test_a_cache_with_blocks_in_use_is_not_emptied(stack: AsyncExitStack) -> None:
    sim = await engine(stack)
    pool = sim.engine._cores[0].pool
    held = pool.take(1)
    assert not sim.engine.reset_prefix_cache()
    assert sim.engine._cores[0].kv_events.take() == []
    pool.release(held)
    assert sim.engine.reset_prefix_cache()
