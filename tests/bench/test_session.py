"""The first questions to a server, its wrong answers, and an end at any time."""

import asyncio
import sys

import pytest

from pdproxy.cli.main import main
from pdproxy_lab.bench.arrivals import Arrivals
from pdproxy_lab.bench.errors import BenchError
from pdproxy_lab.bench.reading import Address
from pdproxy_lab.bench.record import Record, Shape
from pdproxy_lab.bench.session import BenchOptions, BenchSession, Load
from pdproxy_lab.bench.workload import Lengths, Planned, RequestClass, synthetic
from pdproxy_lab.sim.server import SimServer
from tests.bench.servers import FAST, Write, answering, engines
from tests.unit.test_progress import Terminal

SHAPE = Shape(
    endpoint="completions",
    arrivals="constant",
    rate=100,
    burstiness=1,
    seed=0,
    salt="s",
    requests=0,
)
ALIKE = RequestClass(inputs=Lengths(4, 4), outputs=Lengths(2, 2))


def ten(seed: int) -> list[Planned]:
    arrivals = Arrivals(kind="constant", rate=100)
    return synthetic(arrivals, [ALIKE], seed, requests=10)


def options(url: str, **fields: object) -> BenchOptions:
    known = {
        "servers": (Address("it", url),),
        "seeds": range(2),
        "loads": (Load(ten, SHAPE),),
        "endpoint": "completions",
        "allow_lag": True,
        "timeout": 60.0,
    }
    return BenchOptions(**(known | fields))  # type: ignore[arg-type]


def models(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n%b" % (
        status,
        body,
    )


async def silent(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"", "it: "),
        (b"\x1b[2Jhello\r\n\r\n", "it: "),
        (models(b"{}"), "no list of models"),
        (models(b"[" * 100_000), "no list of models"),
        (models(b'{"data":[]}'), "lists no model"),
        (models(b'{"data":[{"id":"%b"}]}' % (b"x" * 300)), "lists no model"),
        (models(b" " * 2_000_000), "longer than 1048576 bytes"),
        (models(b"no", b"401 No"), "status 401 (--api-key, --header or --model)"),
        (silent, "no answer within 0.3 s"),
        (
            models(b'{"data":[{"id":"m"}]}'),
            "the first request failed: stream: content-type is application/json",
        ),
    ],
    ids=lambda value: "silent" if value is silent else repr(value)[:40],
)
async def test_a_server_that_answers_wrongly_at_first_is_reported(
    answer: bytes | Write, says: str
) -> None:
    found: list[Record] = []
    async with answering(answer) as url:
        with pytest.raises(BenchError) as error:
            await BenchSession(
                options(url, timeout=0.3 if answer is silent else 60.0), found.append
            ).measure()
    assert says in str(error.value)
    assert str(error.value).isprintable()
    assert (error.value.code, found) == (1, [])


async def test_it_can_be_stopped_before_the_first_run() -> None:
    found: list[Record] = []
    async with answering(silent) as url:
        session = BenchSession(options(url), found.append)
        measuring = asyncio.create_task(session.measure())
        await asyncio.sleep(0.05)
        session.stop()
        await measuring
    assert found == []


async def test_it_can_be_stopped_between_two_runs() -> None:
    found: list[Record] = []

    def stop(record: Record) -> None:
        found.append(record)
        session.stop()

    async with SimServer(FAST, chance=1) as sim:
        session = BenchSession(options(sim.url), stop)
        await session.measure()
    assert [(record["completed"], record["pdproxy"]["partial"]) for record in found] == [
        (10, False)
    ]
    assert session.stopped


async def test_no_warm_up_and_a_given_model_ask_nothing_before() -> None:
    found: list[Record] = []
    async with SimServer(FAST, chance=1) as sim:
        await BenchSession(
            options(sim.url, warm_up=0, model="sim", seeds=range(1)), found.append
        ).measure()
        assert len(sim.requests) == 10
    assert found[0]["model_id"] == "sim"


def test_progress_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "--rate",
        "100",
        "--requests",
        "10",
        "--input-tokens",
        "4",
        "--output-tokens",
        "2",
        "--seeds",
        "1",
        "--allow-lag",
    ]
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    with engines(FAST) as (engine,):
        assert main(["bench", f"it={engine.url}", *words]) == 0
    assert "\r\x1b[Krun 1 of 1, 0 seconds left: it, 100 req/s, seed 0: " in shown.getvalue()
    assert shown.getvalue().endswith("\r\x1b[K")
