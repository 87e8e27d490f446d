"""The open loop against simulated engines and hostile servers: what each request's outcome is, and
that all ends.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import aiohttp
import pytest

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.bench.arrivals import Arrivals
from pdproxy_lab.bench.client import Run, Target, session_of
from pdproxy_lab.bench.measures import summarise
from pdproxy_lab.bench.outcome import Observed
from pdproxy_lab.bench.prompts import Endpoint, Prompts
from pdproxy_lab.bench.workload import Lengths, Planned, RequestClass, synthetic
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.server import SimServer
from tests.bench.servers import DONE, FAST, GOOD, HEAD, TOKEN, USAGE, Write, answering

ONE = Planned(0.0, 4, 2)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with session_of(None) as made:
        yield made


def made(
    session: aiohttp.ClientSession,
    url: str,
    *,
    endpoint: Endpoint = "completions",
    timeout: float = 60.0,
    max_in_flight: int = 1000,
) -> Run:
    prompts = Prompts(endpoint, "sim", "salt", Lengths(300, 4000), {})
    return Run(
        session,
        Target(name="it", url=url, model="sim"),
        endpoint,
        prompts.body,
        timeout=timeout,
        max_in_flight=max_in_flight,
    )


async def measured(
    session: aiohttp.ClientSession,
    url: str,
    planned: Sequence[Planned],
    endpoint: Endpoint = "completions",
) -> Observed:
    return await made(session, url, endpoint=endpoint).go(planned)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_an_engine_answers_as_many_tokens_as_asked(
    session: aiohttp.ClientSession, endpoint: Endpoint
) -> None:
    alike = RequestClass(inputs=Lengths(5, 50), outputs=Lengths(1, 9))
    planned = synthetic(Arrivals(rate=100), [alike], 1, requests=40)
    async with SimServer(FAST, chance=1) as sim:
        seen = await measured(session, sim.url, planned, endpoint)
        assert len(sim.requests) == 40
    assert [outcome.error for outcome in seen.outcomes] == [None] * 40
    assert [outcome.output_tokens for outcome in seen.outcomes] == [
        one.output_tokens for one in planned
    ]
    assert [outcome.due for outcome in seen.outcomes] == [one.at for one in planned]
    assert all(outcome.sent >= outcome.due for outcome in seen.outcomes)
    if endpoint == "completions":
        assert [outcome.prompt_tokens for outcome in seen.outcomes] == [
            one.input_tokens for one in planned
        ]
        assert [len(outcome.times) for outcome in seen.outcomes] == [
            one.output_tokens for one in planned
        ]


async def test_measures_are_those_of_the_engine(session: aiohttp.ClientSession) -> None:
    """An engine with steps of 20 ms: a machine that is busy makes them longer, never shorter."""
    facts = SimFacts(hardware=Hardware(decode_step_s=0.02), eos_every=0)
    async with SimServer(facts, chance=1) as sim:
        seen = await measured(
            session, sim.url, [Planned(0.05 * number, 40, 6) for number in range(10)]
        )
    found = summarise(seen, (), allow_lag=True)
    assert found.completed == 10
    assert found.tpot is not None
    assert found.tpot.percentiles[50] is not None
    assert found.tpot.percentiles[50] > 0.015
    assert found.output_tokens == 60


async def test_a_server_that_stalls_is_late_for_all_that_were_due_then(
    session: aiohttp.ClientSession,
) -> None:
    """Requests go on being sent while nothing answers, and each counts from when it was due."""
    async with SimServer(FAST, chance=1) as sim:
        run = made(session, sim.url)
        going = asyncio.create_task(run.go([Planned(0.05 * number, 8, 3) for number in range(80)]))
        while len(sim.requests) < 5:
            await asyncio.sleep(0.01)
        await sim.freeze()
        await asyncio.sleep(1.0)
        thawed = time.perf_counter() - run._start
        await sim.thaw()
        seen = await going
    assert [outcome.error for outcome in seen.outcomes] == [None] * 80
    waited = [
        outcome for outcome in seen.outcomes if outcome.times[0] >= thawed and outcome.due < thawed
    ]
    assert len(waited) >= 10
    assert sum(outcome.sent < thawed for outcome in waited) >= 5, "the load waited for answers"
    assert all(
        outcome.ttft is not None and outcome.ttft >= thawed - outcome.due for outcome in waited
    )
    assert max(outcome.ttft or 0 for outcome in waited) > 0.5


HOSTILE: list[tuple[str, bytes, str, str]] = [
    ("closes at once", b"", "connection", ""),
    ("no HTTP", b"hello\r\n\r\n", "connection", ""),
    ("a huge head", b"HTTP/1.1 200 OK\r\nx: " + b"x" * 100_000 + b"\r\n\r\n", "connection", ""),
    ("503", b"HTTP/1.1 503 No\r\ncontent-length: 5\r\n\r\nb\x00\nsy", "status 503", "b? sy"),
    (
        "a redirect",
        b"HTTP/1.1 307 X\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
        "status 307",
        "",
    ),
    (
        "JSON",
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}",
        "stream",
        "content-type",
    ),
    ("ends half-way", HEAD + TOKEN, "stream", "without [DONE]"),
    ("ends before its length", HEAD[:-2] + b"content-length: 9999\r\n\r\n" + TOKEN, "stream", ""),
    ("no tokens", HEAD + DONE, "stream", "no tokens"),
    ("wrong events", HEAD + b"data: {]\n\n", "stream", "no chunk"),
    ("no events", HEAD + b"hello\n\n", "stream", "no stream of server-sent events"),
    ("one endless event", HEAD + b"data: " + b"x" * 1_000_000, "stream", "longer than"),
    ("too many events", HEAD + TOKEN * 1000, "stream", "more than"),
    (
        "an error event",
        HEAD + TOKEN + b'data: {"error":{"message":"x\\ny"}}\n\n',
        "error event",
        "x y",
    ),
]


@pytest.mark.parametrize(
    ("content", "kind", "says"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE]
)
async def test_a_hostile_answer_is_an_error_of_its_kind(
    session: aiohttp.ClientSession, content: bytes, kind: str, says: str
) -> None:
    async with answering(content) as url:
        seen = await measured(session, url, [ONE])
    outcome = seen.outcomes[0]
    assert outcome.error == kind
    assert says in outcome.text
    assert outcome.text.isprintable()
    assert len(outcome.text) <= 200


async def test_a_port_that_refuses_is_a_connection_error(session: aiohttp.ClientSession) -> None:
    async with answering(b"") as url:
        pass
    assert [outcome.error for outcome in (await measured(session, url, [ONE, ONE])).outcomes] == [
        "connection"
    ] * 2


async def silent(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def silent_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + TOKEN)
    await asyncio.sleep(3600)


async def comments(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD)
    while True:
        writer.write(b": ping\n\n" * 100)
        await writer.drain()
        await asyncio.sleep(0.005)


async def slow_error(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 500 No\r\ncontent-length: 50\r\n\r\n")
    await asyncio.sleep(3600)


@pytest.mark.parametrize("write", [silent, silent_stream, comments])
async def test_a_server_that_never_ends_reaches_the_deadline(
    session: aiohttp.ClientSession, write: Write
) -> None:
    async with answering(write) as url:
        seen = await made(session, url, timeout=0.3).go([ONE, ONE])
    assert [outcome.error for outcome in seen.outcomes] == ["timeout"] * 2
    assert "0.3 s" in seen.outcomes[0].text


async def test_a_status_without_its_body_is_that_status_or_a_timeout(
    session: aiohttp.ClientSession,
) -> None:
    async with answering(slow_error) as url:
        seen = await made(session, url, timeout=0.3).go([ONE])
    assert seen.outcomes[0].error in ("status 500", "timeout")


async def test_an_answer_whose_connection_stays_open_is_whole(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdproxy_lab.bench.client._AFTER_DONE", 0.05)

    async def stays(writer: asyncio.StreamWriter) -> None:
        writer.write(GOOD)
        while True:
            writer.write(TOKEN * 100)
            await writer.drain()
            await asyncio.sleep(0.005)

    async with answering(stays) as url:
        outcome = (await measured(session, url, [ONE])).outcomes[0]
    assert (outcome.error, len(outcome.times), outcome.output_tokens) == (None, 2, 2)


async def test_a_run_that_is_stopped_keeps_what_it_has(session: aiohttp.ClientSession) -> None:
    answers = 0

    async def two_then_none(writer: asyncio.StreamWriter) -> None:
        nonlocal answers
        answers += 1
        if answers <= 2:
            writer.write(HEAD + TOKEN + TOKEN + USAGE + DONE)
            await writer.drain()
        else:
            run.stop()
            await asyncio.sleep(3600)

    async with answering(two_then_none) as url:
        run = made(session, url)
        seen = await run.go([Planned(0.2 * number, 4, 2) for number in range(1000)])
    assert seen.cut
    errors = [outcome.error for outcome in seen.outcomes]
    assert errors.count("cut") >= 1
    assert errors.count(None) + errors.count("cut") == len(errors) < 1000
    assert run.progress()["in_flight"] == 0
    assert (await run.go([ONE])).outcomes == seen.outcomes, "a run that was stopped begins no more"


async def test_a_run_ends_when_too_many_requests_are_in_flight(
    session: aiohttp.ClientSession,
) -> None:
    async with answering(silent) as url:
        seen = await made(session, url, max_in_flight=5).go([Planned(0.0, 4, 2)] * 100)
    assert seen.given_up.startswith("5 requests were in flight: ")
    assert seen.most_in_flight == 5
    assert len(seen.outcomes) == 5
    assert "run" in summarise(seen, ()).refused


async def test_a_defect_of_the_generator_is_not_kept_quiet(session: aiohttp.ClientSession) -> None:
    run = Run(
        session,
        Target(name="it", url="http://127.0.0.1:1", model="m"),
        "completions",
        lambda index, planned: b"" if index == 0 else 1 / 0,  # type: ignore[arg-type,return-value]
        timeout=5,
        max_in_flight=5,
    )
    with pytest.raises(ZeroDivisionError):
        await run.go([ONE, ONE])
