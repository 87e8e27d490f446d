"""Every connector through the real proxy, on simulated engines: the client sees what one engine
alone would say.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pdproxy.app.compose import Proxy
from pdproxy.engine_model.hardware import Hardware
from pdproxy.observe.events import HandleEnded, KvNoticed, KvWaited, ServedAlone
from pdproxy.settings.errors import SettingsError
from pdproxy_lab.sim.lmcache_pd import LMCachePD
from tests.fakes.client import request
from tests.fakes.clock import ManualClock
from tests.fakes.pool import Pair, pool
from tests.fakes.world import until
from tests.proxy import leaving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "import os\ndef main(argv):\n    for name in os.listdir(argv[1]):\n        print(name)\n" * 3
CONNECTORS = [
    "nixl",
    "nixl-push",
    "mooncake",
    "lmcache-pd",
    "lmcache-mp",
    "shared",
    "kvstore-keys",
    "cpu",
]


def completion(**fields: Any) -> dict[str, Any]:
    """A completion of several chunks' prompt."""
    return {"model": "tiny", "prompt": TEXT, "max_tokens": 6, "temperature": 0, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    """A chat of several chunks' prompt."""
    messages = [{"role": "user", "content": TEXT}]
    return {"model": "tiny", "messages": messages, "max_tokens": 6, "temperature": 0, **fields}


def bare(value: Any) -> Any:
    """An answer or event without what differs from request to request."""
    if isinstance(value, dict):
        own = ("id", "created", "system_fingerprint", "kv_transfer_params")
        return {name: bare(item) for name, item in value.items() if name not in own}
    return [bare(item) for item in value] if isinstance(value, list) else value


def events(body: bytes) -> list[Any]:
    """The events of a stream, without what differs."""
    lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    return [line if line == b"[DONE]" else bare(json.loads(line)) for line in lines]


async def same(pair: Pair, path: str, body: dict[str, Any]) -> Any:
    """Ask the pair and the plain engine; they must say the same."""
    ours, theirs = await pair.ask(path, body), await pair.asked_plain(path, body)
    assert (ours.status, theirs.status) == (200, 200), ours.body
    if body.get("stream"):
        assert events(ours.body) == events(theirs.body)
        return events(ours.body)
    assert bare(json.loads(ours.body)) == bare(json.loads(theirs.body))
    return json.loads(ours.body)


RUNNING = {"include_usage": True, "continuous_usage_stats": True}
SHAPES: list[tuple[str, dict[str, Any]]] = [
    (path, make(**fields))
    for path, make in ((COMPLETIONS, completion), (CHAT, chat))
    for fields in (
        {},
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": RUNNING},
        {"max_tokens": 1},
        {"max_tokens": 1, "stream": True, "stream_options": RUNNING},
        {"max_tokens": 1, "stream": True},
        {"max_tokens": 2, "stream": True, "return_token_ids": True},
        {"max_tokens": None, "min_tokens": 3, "stop": ["e"]},
        {"return_token_ids": True},
        {"stop": ["o"], "stream": True},
        {"frequency_penalty": 0.5, "stream": True},
    )
]
_BATCH = [[{"role": "user", "content": text}] for text in (TEXT, TEXT * 2, "short")]
SHAPES += [
    ("/v1/chat/completions/batch", chat(messages=_BATCH)),
    ("/v1/chat/completions/batch", chat(messages=_BATCH, max_tokens=1, return_token_ids=True)),
    ("/invocations", chat()),
    ("/invocations", completion(stream=True)),
]


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_the_client_cant_tell(connector: str) -> None:
    """Whatever the connector and the shape."""
    async with pool(connector) as pair:
        for path, body in SHAPES:
            await same(pair, path, body)
        await same(pair, COMPLETIONS, completion(prompt=[TEXT, TEXT[::-1]], stream=False))
        assert pair.loaded > 0, "nothing has moved"
        assert "no_pair" not in {event.reason for event in pair.world.events(ServedAlone)}


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_no_read_of_the_decode_engines_own_answer_reaches_the_client(connector: str) -> None:
    """Each event in a read of its own: completions teach the fast path a form in which D answers
    some chats, too.
    """
    slow = Hardware(prefill_tokens_per_s=1e9, decode_step_s=0.01, transfer_latency_s=0.0)
    async with pool(connector, everybody={"hardware": slow}) as pair:
        for _ in range(3):
            for fields in ({}, {"return_token_ids": True}):
                await same(pair, COMPLETIONS, completion(stream=True, max_tokens=12, **fields))
                await same(pair, CHAT, chat(stream=True, max_tokens=12, **fields))
        assert pair.loaded > 0, "nothing has moved"


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_usage_that_an_engine_forces_on_every_client_is_the_clients(connector: str) -> None:
    """In each event and at the end, whether it is asked for or not; also of a list, of several
    choices, of one token.
    """
    async with pool(connector, everybody={"enable_force_include_usage": True}) as pair:
        for path, body in SHAPES:
            if (
                connector == "lmcache-pd"
                and body["max_tokens"] == 1
                and "stream_options" not in body
            ):
                # the prefill engine's whole answer does not show whether it forces usage on streams
                continue
            found = await same(pair, path, body)
            assert not body.get("stream") or found[-2]["usage"]["completion_tokens"] > 0
        for stream_options in (None, {"include_usage": False}, {"include_usage": True}, RUNNING):
            given = {"stream": True, "stream_options": stream_options, "prompt": TEXT[:200]}
            several = await same(
                pair, COMPLETIONS, completion(**given, n=2, temperature=0.7, seed=1)
            )
            assert several[-2]["usage"]["completion_tokens"] == 12
            ours, theirs = [
                by_choice(
                    (
                        await ask(COMPLETIONS, completion(**given | {"prompt": [TEXT, TEXT[::-1]]}))
                    ).body
                )
                for ask in (pair.ask, pair.asked_plain)
            ]
            assert ours == theirs
            assert ours[None][0]["usage"]["completion_tokens"] == 12
        assert pair.loaded > 0, "nothing has moved"


def by_choice(body: bytes) -> dict[int | None, list[Any]]:
    """The events of each choice in their order; those of none under None."""
    found: dict[int | None, list[Any]] = {}
    for event in events(body)[:-1]:
        found.setdefault(event["choices"][0]["index"] if event["choices"] else None, []).append(
            event
        )
    return found


@pytest.mark.parametrize("connector", ["lmcache-pd", "lmcache-mp"])
@pytest.mark.parametrize("ranks", [1, 2])
async def test_each_rank_tells(connector: str, ranks: int) -> None:
    """One notice a rank is awaited, before the decode engine is asked."""
    async with pool(connector, ranks=ranks) as pair:
        await same(pair, CHAT, chat(stream=True))
        results = [event.result for event in pair.world.events(KvNoticed)]
        assert results == ["awaited"] * ranks
        assert [event.result for event in pair.world.events(KvWaited)] == ["ready"]


@pytest.mark.parametrize("connector", ["lmcache-pd", "lmcache-mp"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_silent_rank_is_not_waited_for_for_ever(connector: str, stream: bool) -> None:
    """At the deadline the decode engine computes, the answer is right, and the metric says which
    rank was silent.
    """
    clock = ManualClock()
    async with pool(connector, ranks=2, deadlines={"kv_ready": 7}, clock=clock) as pair:
        pair.p.faults.add("lost_notice:rank=1,rate=1")
        asked = asyncio.create_task(same(pair, COMPLETIONS, completion(stream=stream)))
        await until(lambda: pair.world.events(KvNoticed))
        await clock.reach(7)
        await asked
        rank = "1" if connector == "lmcache-mp" else "unnamed"
        assert pair.world.metric("pdproxy_kv_silent_ranks_total", node=pair.p.url, rank=rank) == 1
        assert pair.world.metric("pdproxy_deadline_total", wait="kv_ready") == 1


@pytest.mark.parametrize("connector", ["lmcache-pd", "lmcache-mp"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_silent_rank_fails_the_request_where_the_operator_wants_it(
    connector: str, stream: bool
) -> None:
    """A well-formed 504; the decode engine was not asked."""
    clock = ManualClock()
    async with pool(
        connector, ranks=2, deadlines={"kv_ready": 7}, kv_ready={"on_timeout": "fail"}, clock=clock
    ) as pair:
        pair.p.faults.add("lost_notice:rank=0,rate=1")
        asked = asyncio.create_task(pair.ask(COMPLETIONS, completion(stream=stream)))
        await until(lambda: pair.world.events(KvNoticed))
        await clock.reach(7)
        answer = await asked
        assert answer.status == 504
        error = json.loads(answer.body)["error"]
        assert "did not report in 7 s that the KV is ready" in error["message"]
        assert (pair.loaded, pair.computed) == (0, 0)
        # what was pushed is awaited as long again
        await clock.through(until(lambda: not pair.world.busy()))


@pytest.mark.parametrize(
    "fault",
    ["double_notice:rate=1", "late_notice:delay=0.2,rate=1", "garbage_notice:instead=false,rate=1"],
)
@pytest.mark.parametrize("connector", ["lmcache-pd", "lmcache-mp"])
async def test_notices_that_misbehave(connector: str, fault: str) -> None:
    """Twice, late, or among garbage: each answer is right."""
    async with pool(connector, ranks=2) as pair:
        pair.p.faults.add(fault)
        for _ in range(3):
            await same(pair, COMPLETIONS, completion())
        assert {event.result for event in pair.world.events(KvWaited)} == {"ready"}


async def test_prompts_under_a_chunk_go_to_one_engine() -> None:
    """They would move nothing, and LMCache would tell nobody."""
    async with pool("lmcache-pd") as pair:
        await same(pair, COMPLETIONS, completion(prompt="short and sweet, but over one block"))
        assert [event.reason for event in pair.world.events(ServedAlone)] == ["short_prompt"]
        assert pair.world.events(KvNoticed) == []


async def test_the_decode_engine_may_make_the_first_token() -> None:
    """With `first_token: decode` it gets the chat untouched."""
    async with pool("lmcache-pd", lmcache={"first_token": "decode"}) as pair:
        for path, body in SHAPES:
            await same(pair, path, body)
        assert pair.loaded > 0


async def test_a_first_token_that_is_the_last_is_the_prefill_engines() -> None:
    """One token, or a stop: the prefill engine's answer is the client's."""
    async with pool("lmcache-pd") as pair:
        await same(
            pair, CHAT, chat(max_tokens=1, stream=True, stream_options={"include_usage": True})
        )
        answer = json.loads(
            (await pair.asked_plain(COMPLETIONS, completion(return_token_ids=True))).body
        )
        first = answer["choices"][0]["token_ids"][0]
        stopped = await same(
            pair, COMPLETIONS, completion(stop_token_ids=[first], return_token_ids=True)
        )
        assert stopped["choices"][0]["finish_reason"] == "stop"
        assert stopped["choices"][0]["stop_reason"] == first
        await until(lambda: len(pair.world.events(HandleEnded)) == 2)
        assert {event.end for event in pair.world.events(HandleEnded)} == {"released"}


async def test_room_in_the_receive_buffer_is_waited_for() -> None:
    """More prompts than fit are all answered; no slot is left taken."""
    room = {"pd_buffer_size": 131_072 * 32 * 12, "kv_bytes_per_token": 131_072}
    async with pool("lmcache-pd", lmcache=room) as pair:
        bodies = [completion(prompt=f"{number} {TEXT}") for number in range(8)]
        answers = await asyncio.gather(*(pair.ask(COMPLETIONS, body) for body in bodies))
        assert [answer.status for answer in answers] == [200] * 8
        await until(lambda: set(pair.world.proxy.buffers.taken.values()) == {0})
        assert pair.loaded > 0


async def test_a_prompt_that_no_buffer_holds_goes_to_one_engine() -> None:
    """It would wait for ever."""
    room = {"pd_buffer_size": 131_072 * 32, "kv_bytes_per_token": 131_072}
    async with pool("lmcache-pd", lmcache=room) as pair:
        await same(pair, COMPLETIONS, completion())
        assert [event.reason for event in pair.world.events(ServedAlone)] == ["kv_buffer"]


async def test_an_lmcache_that_never_tells() -> None:
    """Its engines answer, healthy, and no notice is ever sent: the client gets its answer after the
    deadline.
    """
    async with pool(
        "lmcache-pd", deadlines={"kv_ready": 0.3}, sim_lmcache={"degraded": True}
    ) as pair:
        await same(pair, CHAT, chat(stream=True))
        assert pair.world.metric("pdproxy_deadline_total", wait="kv_ready") == 1
        assert pair.loaded == 0


def left_over(pair: Pair) -> int:
    """Chunks that lie in D's receive buffers."""
    core = pair.d.engine._core
    assert core is not None
    assert isinstance(core.connector, LMCachePD)
    return sum(len(buffer.held) for buffer in core.connector.buffers)


async def test_what_was_pushed_is_read_even_if_nobody_wants_it() -> None:
    """A first token that is the last one: the decode engine's buffer is empty all the same."""
    async with pool("lmcache-pd") as pair:
        for path, make in ((COMPLETIONS, completion), (CHAT, chat)):
            await same(pair, path, make(max_tokens=1))
        await until(lambda: not pair.world.busy())
        assert left_over(pair) == 0
        assert [event.end for event in pair.world.events(HandleEnded)] == ["released", "released"]


@pytest.mark.parametrize("ranks", [1, 2])
async def test_clients_that_leave_kill_nobody_and_fill_no_buffer(ranks: int) -> None:
    """LMCache's sender dies of a leg that is closed before its first token; its receiver keeps what
    nobody reads.
    """
    async with pool("lmcache-pd", ranks=ranks) as pair:
        await leaving.at_random(pair, 80, 16, seed=11)
        await until(lambda: not pair.world.busy())
        assert not pair.p.engine.dead
        await same(pair, COMPLETIONS, completion())
        await until(lambda: not pair.world.busy())
        await until(lambda: left_over(pair) == 0)
        assert "lost" not in {event.end for event in pair.world.events(HandleEnded)}


async def test_a_client_that_leaves_its_prefill_does_not_kill_the_engine() -> None:
    """LMCache's sender dies of an abort before its first token: its leg is left to end, and its
    lease with it.
    """
    room = {"pd_buffer_size": 131_072 * 32 * 12, "kv_bytes_per_token": 131_072}
    async with pool("lmcache-pd", lmcache=room) as pair:
        pair.p.engine.freeze()
        client = await pair.world.client()
        client.send(request("POST", COMPLETIONS, completion()))
        (asked,) = await _asked(pair)
        client.close()
        ended = await pair.world.ended()
        assert ended.outcome == "client_left"
        assert not asked.over, "P was at work when its client left"
        buffers = [one.buffers for one in pair.world.workers]
        assert any(any(one.taken.values()) for one in buffers), (
            "what is still pushed has its place in the buffer"
        )
        pair.p.engine.thaw()
        await until(lambda: not pair.world.busy())
        assert asked.over
        assert not asked.left.is_set()
        assert not pair.p.engine.dead
        await until(lambda: not any(any(one.taken.values()) for one in buffers), 10)
        await same(pair, COMPLETIONS, completion())


async def _asked(pair: Pair) -> list[Any]:
    await until(lambda: pair.p.requests)
    return list(pair.p.requests)


async def test_kv_is_released_behind_its_notice_though_the_client_has_left() -> None:
    """Whoever read it before would get memory that the prefill engine still writes to."""
    async with pool("lmcache-pd") as pair:
        pair.p.faults.add("late_notice:delay=0.5,rate=1")
        client = await pair.world.client()
        client.send(request("POST", COMPLETIONS, completion()))
        custodians = [one.custodian for one in pair.world.workers]
        await until(lambda: any(one._live for one in custodians))
        client.close()
        await until(lambda: pair.world.events(HandleEnded))
        assert [event.end for event in pair.world.events(HandleEnded)] == ["released"]
        assert [event.result for event in pair.world.events(KvNoticed)] == ["awaited"]
        assert left_over(pair) == 0


async def test_a_client_that_leaves_its_prefill_leaves_no_wait_for_notices() -> None:
    """Where nothing is held for anybody, the leg is closed, and its wait with it."""
    async with pool("lmcache-mp") as pair:
        pair.p.engine.freeze()
        client = await pair.world.client()
        client.send(request("POST", COMPLETIONS, completion()))
        await until(lambda: pair.p.requests)
        waits = [one.transfer.ready for one in pair.world.workers]
        assert sum(one.waiting for one in waits) == 1
        client.close()
        assert (await pair.world.ended()).outcome == "client_left"
        await until(lambda: not any(one.waiting for one in waits))
        pair.p.engine.thaw()


async def test_a_taken_port_stops_the_start() -> None:
    """Nothing is served where notices would go elsewhere: the setting is named."""
    async with pool("lmcache-pd") as pair:
        second = Proxy.build(pair.world.proxy.settings)
        with pytest.raises(
            SettingsError,
            match=r"can't bind kv_ready.host:kv_ready.port = .*: Address already in use",
        ):
            second.start()
        await second.stop()


async def test_a_client_that_leaves_before_its_turn_leaves_nothing_in_the_buffer() -> None:
    """A decode engine looks for a push when it schedules the request: one that is aborted before
    never reads it.
    """
    async with pool("lmcache-pd", d={"max_num_seqs": 1, "hardware": Hardware(speed=0.2)}) as pair:
        first, second = [await pair.world.client() for _ in range(2)]
        first.send(request("POST", COMPLETIONS, completion(stream=True, max_tokens=60)))
        await until(lambda: pair.loaded > 0)
        second.send(request("POST", COMPLETIONS, completion(prompt="x" + TEXT, stream=True)))
        await until(lambda: pair.d.engine.stats.waiting)
        clients = [one.engines[pair.d.url].client for one in pair.world.workers]
        await until(
            lambda: sum(leg._answering for client in clients for leg in client._all) == 2
        )  # it has sent both heads
        second.close()
        await until(lambda: len(pair.world.events(HandleEnded)) == 2, 40)
        assert [event.end for event in pair.world.events(HandleEnded)] == ["loaded", "released"]
        first.close()
        await until(lambda: not pair.world.busy())
        assert left_over(pair) == 0


async def test_what_nobody_told_of_is_not_read() -> None:
    """Chunks may be named and unwritten: whoever reads them gets memory that the prefill engine
    still writes to.
    """
    deadlines = {"kv_ready": 0.3}
    async with pool(
        "lmcache-pd", ranks=2, deadlines=deadlines, kv_ready={"on_timeout": "fail"}
    ) as pair:
        pair.p.faults.add("lost_notice:rank=0,rate=1")
        assert (await pair.ask(COMPLETIONS, completion())).status == 504
        await until(lambda: [event.end for event in pair.world.events(HandleEnded)] == ["lost"])
        assert not pair.d.requests


async def test_an_orderly_end_waits_for_prefills_that_must_not_be_closed() -> None:
    """The grace of other connectors is over long before: the prefill engine outlives the proxy."""
    deadlines = {"abandoned_prefill": 0.1, "release": 0.1}
    async with pool("lmcache-pd", deadlines=deadlines) as pair:
        pair.p.engine.freeze()
        client = await pair.world.client()
        client.send(request("POST", COMPLETIONS, completion()))
        (asked,) = await _asked(pair)
        client.close()
        await pair.world.ended()
        assert not asked.over
        drain = asyncio.gather(*(one.drain([]) for one in pair.world.workers))
        await asyncio.sleep(0.4)  # four times those deadlines
        assert not drain.done()
        pair.p.engine.thaw()
        await drain
        assert asked.over
        assert not asked.left.is_set()
        assert not pair.p.engine.dead
        assert left_over(pair) == 0


async def test_nobody_waits_for_room_that_would_not_help() -> None:
    """No engine serves the model: an engine says so at once, however full the buffers are."""
    room = {"pd_buffer_size": 131_072 * 32 * 12, "kv_bytes_per_token": 131_072}
    async with pool("lmcache-pd", lmcache=room) as pair:
        pair.world.proxy.buffers.take(pair.d.url, 12)
        ids = list(range(5, 5 + 32 * 4))
        answer = await asyncio.wait_for(
            pair.ask(COMPLETIONS, completion(prompt=ids, model="nobody")), 20
        )
        assert answer.status == 404
