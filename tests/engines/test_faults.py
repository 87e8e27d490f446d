"""Engines that die or freeze at the worst times: a client gets the right answer, or soon a correct
error.
"""

# Each test restarts what an earlier one killed (a few seconds per engine) and runs its own proxy
# with short deadlines. A prompt that was tried twice may be cached on P, so cached tokens are not
# compared here.

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdproxy.scheduling.losses import SOON
from pdproxy.settings.limits import Deadlines

from .client import Answer, Progress, ask
from .compare import differs
from .engine import MODEL, Engine
from .fleet import Fleet
from .proxy import Proxy
from .shapes import COMPLETIONS, USAGE, story

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300, func_only=True)]

BETWEEN_TOKENS, FIRST_TOKEN, PREFILL, STALLED = 3.0, 15.0, 15.0, 4.0
SETTINGS = {
    "deadlines": {
        "connect": 2,
        "prefill": PREFILL,
        "first_token": FIRST_TOKEN,
        "between_tokens": BETWEEN_TOKENS,
        "drain": 5,
    }
}
START = Callable[[list[Engine], list[Engine]], Proxy]


@pytest.fixture
def serve(fleet: Fleet, tmp_path: Path) -> Iterator[START]:
    """Start proxies in front of healthy engines; the proxies end with the test."""
    fleet.heal()
    started: list[Proxy] = []

    def start(prefills: list[Engine], decodes: list[Engine]) -> Proxy:
        started.append(Proxy.start(prefills, decodes, tmp_path, settings=SETTINGS))
        return started[-1]

    yield start
    for proxy in started:
        assert proxy.stop() == 0, proxy.tail()


def _body(**fields: Any) -> dict[str, Any]:
    base = {
        "model": MODEL,
        "prompt": story(secrets.token_hex(6)),
        "temperature": 0,
        "max_tokens": 12,
    }
    return base | fields


async def _prefilled(engines: list[Engine], before: list[float]) -> Engine:
    """Return the engine that has just finished a prompt."""
    deadline = time.monotonic() + PREFILL
    while time.monotonic() < deadline:
        for engine, old in zip(engines, before, strict=True):
            if engine.counters().sum("vllm:request_success_total") > old:
                return engine
        await asyncio.sleep(0.02)
    raise AssertionError("no prefill engine finished the prompt")


def _successes(engines: list[Engine]) -> list[float]:
    return [engine.counters().sum("vllm:request_success_total") for engine in engines]


def broke_honestly(plain: Answer, seen: Answer) -> None:
    """Check a stream that ended in an error event: the text before it is right, and nothing after
    it signals success.
    """
    assert (seen.status, seen.streamed) == (200, True)
    assert "error" in seen.chunks[-1], seen.events[-3:]
    error = seen.chunks[-1]["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert error["code"] in {500, 502, 503, 504}
    assert "[DONE]" not in seen.events
    chunks = [chunk for chunk in seen.chunks[:-1] if chunk["choices"]]
    assert chunks
    assert not any(chunk["choices"][0]["finish_reason"] for chunk in chunks)
    assert plain.text.startswith("".join(chunk["choices"][0]["text"] for chunk in chunks))


@pytest.mark.parametrize("fields", [{}, USAGE], ids=["whole", "streamed"])
async def test_prefill_killed_between_the_legs(
    fleet: Fleet, serve: START, fields: dict[str, Any]
) -> None:
    """P dies with the KV before D has fetched it: the client gets the whole right answer through
    the other P.
    """
    proxy = serve(fleet.prefills, fleet.decodes[:1])
    body, decode = _body(**fields), fleet.decodes[0]
    plain = await ask(fleet.plain.url, COMPLETIONS, body)
    await ask(proxy.url, COMPLETIONS, _body())
    before = _successes(fleet.prefills)
    decode.signal(signal.SIGSTOP)  # the kernel accepts D's leg, and D does not answer
    try:
        asked = asyncio.create_task(ask(proxy.url, COMPLETIONS, body))
        victim = await _prefilled(fleet.prefills, before)
        await asyncio.sleep(0.1)  # the proxy has sent D's leg
        victim.kill()
    finally:
        decode.signal(signal.SIGCONT)
    seen = await asked
    assert not differs(plain, seen, strict=False, warm=True)
    assert seen.seconds < FIRST_TOKEN + 5


async def test_prefill_killed_before(fleet: Fleet, serve: START) -> None:
    """P is killed before the proxy notices: the other P serves every client. After its restart, P
    gets work again.
    """
    proxy = serve(fleet.prefills, fleet.decodes)
    bodies = [_body(max_tokens=5) for _ in range(6)]
    plain = [await ask(fleet.plain.url, COMPLETIONS, body) for body in bodies]
    fleet.prefills[0].kill()
    seen = await asyncio.gather(*(ask(proxy.url, COMPLETIONS, body) for body in bodies))
    assert [differs(one, two, warm=True) for one, two in zip(plain, seen, strict=True)] == [
        ""
    ] * len(bodies)
    assert max(answer.seconds for answer in seen) < 10

    await asyncio.to_thread(fleet.heal)
    before = _successes(fleet.prefills[:1])
    deadline = time.monotonic() + 30
    while _successes(fleet.prefills[:1]) == before:
        assert time.monotonic() < deadline, "a restarted P gets no work"
        body = _body(max_tokens=3)
        assert not differs(
            await ask(fleet.plain.url, COMPLETIONS, body), await ask(proxy.url, COMPLETIONS, body)
        )


async def test_decode_killed_before_its_first_token(fleet: Fleet, serve: START) -> None:
    """D freezes with a request and dies: the other D answers it, and clients see only a delay.

    The request has been there for longer than it would take to be the cause: else the last D would
    not get it.
    """
    proxy = serve(fleet.prefills, fleet.decodes)
    bodies = [_body(**USAGE) for _ in range(2)]  # least load gives one to each D
    plain = [await ask(fleet.plain.url, COMPLETIONS, body) for body in bodies]
    victim = fleet.decodes[0]
    victim.signal(signal.SIGSTOP)
    asked = [asyncio.create_task(ask(proxy.url, COMPLETIONS, body)) for body in bodies]
    done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == len(waiting) == 1, "both were answered: none of them went to the frozen D"
    await asyncio.sleep(1.5 * SOON)
    victim.kill()
    killed = time.monotonic()
    seen = await asyncio.gather(*asked)
    assert time.monotonic() - killed < 10
    assert [differs(one, two, warm=True) for one, two in zip(plain, seen, strict=True)] == ["", ""]


async def test_decode_killed_mid_stream(fleet: Fleet, serve: START) -> None:
    """The only D dies while it streams: at once an error event in OpenAI's form, then the end,
    without [DONE].
    """
    proxy = serve(fleet.prefills[:1], fleet.decodes[1:])
    body = _body(stream=True, ignore_eos=True, max_tokens=400)
    plain = await ask(fleet.plain.url, COMPLETIONS, body)
    progress = Progress(events=5)
    asked = asyncio.create_task(ask(proxy.url, COMPLETIONS, body, progress=progress))
    await progress.wait()
    fleet.decodes[1].kill()
    killed = time.monotonic()
    broke_honestly(plain, await asked)
    assert time.monotonic() - killed < 2


@pytest.mark.parametrize("end", [Engine.kill, Engine.terminate], ids=["killed", "terminated"])
async def test_decode_ends_before_the_whole_answer(
    fleet: Fleet, serve: START, end: Callable[[Engine], None]
) -> None:
    """D dies before it has answered a request that is not streamed: the other D gives the whole
    answer.

    A terminated engine may answer 200 with half the text and `finish_reason: "abort"`, or not at
    all: it closes its port and leaves the connection open. The request has been there for longer
    than it would take to be the cause.
    """
    proxy = serve(fleet.prefills, fleet.decodes)
    bodies = [_body(ignore_eos=True, max_tokens=1200) for _ in range(2)]
    plain = [await ask(fleet.plain.url, COMPLETIONS, body) for body in bodies]
    asked = [asyncio.create_task(ask(proxy.url, COMPLETIONS, body)) for body in bodies]
    deadline = time.monotonic() + PREFILL
    while not fleet.decodes[0].counters().sum("vllm:num_requests_running"):
        assert time.monotonic() < deadline, "the first D got no work"
        await asyncio.sleep(0.02)
    await asyncio.sleep(1.5 * SOON)
    assert fleet.decodes[0].counters().sum("vllm:num_requests_running"), "it was answered before"
    end(fleet.decodes[0])
    async with asyncio.timeout(60):
        seen = await asyncio.gather(*asked)
    assert [differs(one, two, warm=True) for one, two in zip(plain, seen, strict=True)] == ["", ""]


async def test_decode_terminated_mid_stream(fleet: Fleet, serve: START) -> None:
    """However vLLM ends an open stream after SIGTERM, the client gets an error event.

    It is a race with three outcomes, all observed: `finish_reason: "abort"` and [DONE] as for a
    success; an error event; or no more data, and the deadline between tokens ends the stream.
    """
    proxy = serve(fleet.prefills[:1], fleet.decodes[:1])
    body = _body(stream=True, ignore_eos=True, max_tokens=400)
    plain = await ask(fleet.plain.url, COMPLETIONS, body)
    progress = Progress(events=5)
    asked = asyncio.create_task(ask(proxy.url, COMPLETIONS, body, progress=progress))
    await progress.wait()
    fleet.decodes[0].terminate()
    terminated = time.monotonic()
    broke_honestly(plain, await asked)
    assert time.monotonic() - terminated < BETWEEN_TOKENS + 2


async def test_decode_frozen_mid_stream(fleet: Fleet, serve: START) -> None:
    """The only D freezes while it streams: after the deadline between tokens, and not earlier, the
    client gets an error event.

    Behind the deadline D is asked for its metrics, within `deadlines.probe`.
    """
    proxy = serve(fleet.prefills[:1], fleet.decodes[1:])
    body = _body(stream=True, ignore_eos=True, max_tokens=400)
    plain = await ask(fleet.plain.url, COMPLETIONS, body)
    progress = Progress(events=5)
    asked = asyncio.create_task(ask(proxy.url, COMPLETIONS, body, progress=progress))
    await progress.wait()
    fleet.decodes[1].signal(signal.SIGSTOP)
    frozen = time.monotonic()
    try:
        broke_honestly(plain, await asked)
    finally:
        fleet.decodes[1].signal(signal.SIGCONT)
    assert BETWEEN_TOKENS - 0.5 < time.monotonic() - frozen < BETWEEN_TOKENS + Deadlines().probe + 2


async def test_refusal_at_first_contact(fleet: Fleet, serve: START) -> None:
    """A new D refuses its first request: P's blocks are still freed soon.

    Before D has pulled from a P once, D's message to P about a refused request waits for a later
    step of D.
    """
    await asyncio.to_thread(fleet.restart, "d1", meet=False)
    prefill = fleet.prefills[0]
    proxy = serve([prefill], fleet.decodes[1:])
    answer = await ask(proxy.url, COMPLETIONS, _body(structured_outputs={"regex": "[unclosed"}))
    assert answer.status == 400
    deadline = time.monotonic() + 5
    while (held := prefill.counters().sum("vllm:kv_cache_usage_perc")) > 0:
        assert time.monotonic() < deadline, f"P still holds {held:.1%} of its KV"
        await asyncio.sleep(0.1)


async def test_a_frozen_core_under_unstreamed_requests(fleet: Fleet, tmp_path: Path) -> None:
    """D's server answers, its core stands still: the other D answers its requests soon, and the
    core is let in again.
    """
    fleet.heal()
    bodies = [_body(max_tokens=200, ignore_eos=True) for _ in range(8)]
    plain = await asyncio.gather(*(ask(fleet.plain.url, COMPLETIONS, body) for body in bodies))
    health = {"stalled_after": STALLED, "canary_timeout": 2}
    proxy = Proxy.start(fleet.prefills, fleet.decodes, tmp_path, settings={"health": health})
    victim = fleet.decodes[0]
    (core,) = [
        pid for pid in victim.pids() if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    try:
        await asyncio.gather(*(ask(proxy.url, COMPLETIONS, _body()) for _ in range(4)))
        asked = [asyncio.create_task(ask(proxy.url, COMPLETIONS, body)) for body in bodies]
        await asyncio.sleep(0.3)
        os.kill(core, signal.SIGSTOP)
        seen = await asyncio.gather(*asked)
        assert [
            differs(one, two, strict=False, warm=True) for one, two in zip(plain, seen, strict=True)
        ] == [""] * 8
        assert max(answer.seconds for answer in seen) < STALLED + 15, (
            "far from deadlines.total, an hour"
        )
        counters = proxy.counters()
        assert counters.sum("pdproxy_stalls_total", node=victim.url) == 1
        assert counters.sum("pdproxy_node_up", node=victim.url) == 0
        os.kill(core, signal.SIGCONT)
        deadline = time.monotonic() + 60
        while proxy.counters().sum("pdproxy_node_up", node=victim.url) == 0:
            assert time.monotonic() < deadline, "a core that works again is not let in"
            await asyncio.sleep(0.2)
    finally:
        os.kill(core, signal.SIGCONT)
        assert proxy.stop() == 0, proxy.tail()


async def test_prefill_frozen(fleet: Fleet, serve: START) -> None:
    """P freezes with the prompt: after the prefill deadline the other P takes it; the frozen one
    works again when it resumes.
    """
    proxy = serve(fleet.prefills, fleet.decodes)
    bodies = [_body() for _ in range(2)]
    plain = [await ask(fleet.plain.url, COMPLETIONS, body) for body in bodies]
    victim = fleet.prefills[0]
    victim.signal(signal.SIGSTOP)
    try:
        seen = await asyncio.gather(*(ask(proxy.url, COMPLETIONS, body) for body in bodies))
    finally:
        victim.signal(signal.SIGCONT)
    assert [differs(one, two, warm=True) for one, two in zip(plain, seen, strict=True)] == ["", ""]
    assert max(answer.seconds for answer in seen) < PREFILL + 10
