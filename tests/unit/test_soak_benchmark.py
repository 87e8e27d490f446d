"""The parts of benchmarks/soak.py: what grows and what is flat, and how a request has ended."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import soak
import soak_stage
from pdproxy_lab.bench import figure
from tests.chaos.answers import Answer, Told
from tests.chaos.oracle import Body

STEADY = {"memory": 80.0, "files": 60.0, "tasks": 90.0, "series": 100.0}


def samples(**slopes: float) -> list[soak.Sample]:
    """A hundred samples in 1000 s. `slopes`: by how much a measure grows in all of that time."""
    return [
        soak.Sample(
            at=10.0 * number,
            memory=STEADY["memory"] + slopes.get("memory", 0.0) * number / 99,
            files=STEADY["files"] + slopes.get("files", 0.0) * number / 99,
            tasks=STEADY["tasks"] + slopes.get("tasks", 0.0) * number / 99,
            series=STEADY["series"] + slopes.get("series", 0.0) * number / 99,
        )
        for number in range(100)
    ]


@pytest.mark.parametrize("name", STEADY)
def test_what_grows_is_found(name: str) -> None:
    assert all(one.flat for one in soak.verdicts(samples()))
    grown = {one.name: one for one in soak.verdicts(samples(**{name: 30.0}))}
    assert [one.name for one in grown.values() if not one.flat] == [name]
    assert grown[name].growth == pytest.approx(24.0, rel=0.02), "the first fifth does not count"
    assert "GROWS" in grown[name].line()
    assert all(one.flat for one in soak.verdicts(samples(**{name: -30.0}))), "less is well"


def test_what_fills_at_first_and_what_swings_is_flat() -> None:
    begin = [soak.Sample(one.at, 40.0 + one.at / 5, 10.0, 5.0) for one in samples()[:20]]
    later = [
        soak.Sample(one.at, 80.0, 60.0 + 30 * (number % 2), 90.0)
        for number, one in enumerate(samples()[20:])
    ]
    found = soak.verdicts([*begin, *later])
    assert all(one.flat for one in found)
    assert found[0].start < found[0].middle == found[0].end == 80.0


def test_a_slope_that_may_be_chance_is_no_growth() -> None:
    """A few peaks at the end of a short run."""
    peaks = {18: 99.0, 19: 95.0, 23: 92.0}
    short = [soak.Sample(3.0 * number, 80.0, peaks.get(number, 40.0), 15.0) for number in range(25)]
    (files,) = [one for one in soak.verdicts(short) if one.name == "files"]
    assert files.growth > 16.0
    assert files.flat
    assert soak.trend([0.0, 1.0, 2.0], [5.0, 6.0, 7.0]) == pytest.approx((1.0, 0.0))


def test_processes_that_end_or_begin_meanwhile_do_not_count() -> None:
    one, two, three = (9.0, 1.0), (5.0, 2.0), (7.0, 3.0)
    found = soak.lasting(
        [
            soak.Sample(0.0, 14.0, 3.0, 9.0, processes={1: one, 2: two}),
            soak.Sample(1.0, 16.0, 4.0, 9.0, processes={1: one, 3: three}),
        ]
    )
    assert [(sample.memory, sample.files) for sample in found] == [one, one]
    assert soak.lasting([soak.Sample(0.0, 4.0, 3.0, 9.0)])[0].memory == 4.0


def test_what_is_left_is_said() -> None:
    before = soak.Sample(0.0, 70.0, 18.0, 10.0)
    assert soak.left(before, soak.Sample(9.0, 90.0, 22.0, 12.0)) == []
    assert soak.left(before, soak.Sample(9.0, 90.0, 23.0, 9.0)) == [
        "23 open files are left, 18 before"
    ]


@pytest.mark.parametrize(("seconds", "every"), [(1200, 10.0), (60, 3.0), (10, 0.5)])
def test_a_short_run_has_enough_samples(seconds: int, every: float) -> None:
    assert soak.parsed(["--seconds", str(seconds)]).every == every


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seconds", "60", "--every", "10"], "60 s have fewer than 10 samples"),
        (["--seconds", "0"], "expected numbers above 0"),
        (["--seconds", "inf"], "expected numbers above 0"),
        (["--pause", "0"], "expected numbers above 0"),
        (["--every", "nan"], "expected numbers above 0"),
        (["--clients", "0"], "expected numbers above 0"),
    ],
)
def test_what_could_not_be_judged_is_refused_before_the_run(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        soak.parsed(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def answer(body: object, status: int = 200, kind: str = "application/json") -> Answer:
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return Answer(status, kind, body=bytearray(content), complete=True)


RIGHT = {"choices": [{"index": 0, "text": "abc", "finish_reason": "length"}]}
ERROR = {"error": {"message": "no", "type": "t", "param": None, "code": 502}}


@pytest.mark.parametrize(
    ("got", "end"),
    [
        (answer(RIGHT), "right"),
        (answer({"choices": [RIGHT["choices"][0] | {"text": "ab"}]}), "wrong"),
        (answer(ERROR, 502), "error 502"),
        (
            answer(b"data: " + msgspec.json.encode(ERROR) + b"\n\n", 200, "text/event-stream"),
            "error event 502",
        ),
        (answer(b"oops"), "wrong"),
        (answer(RIGHT, 500), "error 500"),
    ],
)
def test_how_a_request_ends(got: Answer, end: str) -> None:
    right = Told({0: "abc"}, {0: "length"})
    assert soak.end_of(got, right).partition(":")[0] == end


def test_a_response_that_its_engine_gave_up_is_told_apart() -> None:
    right = Told({0: "one two"}, {0: "incomplete"}, (3, 2, 5))
    output = [{"type": "message", "content": [{"type": "output_text", "text": "one"}]}]
    usage = {"input_tokens": 3, "output_tokens": 1, "total_tokens": 4}
    body = {"object": "response", "status": "completed", "output": output, "usage": usage}
    assert soak.end_of(answer(body), right) == "half a response"
    output[0]["content"] = [{"type": "output_text", "text": "two"}]
    assert soak.end_of(answer(body), right).startswith("wrong")


async def test_clients_count_each_request_once() -> None:
    """Those that leave as well, and an answer that breaks off is wrong."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        content = msgspec.json.encode(RIGHT)
        short = content[: -len(asked) % 2 or len(content)]
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % len(content)
            + short
        )
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    at = soak_stage.Stage(0, server.sockets[0].getsockname()[1], 0, ())
    body = Body("/v1/completions", {"prompt": "x"}, Told({0: "abc"}, {0: "length"}))
    tally = soak.Tally()
    end = time.monotonic() + 0.5
    await soak.client(1, at, [body], end, 0.01, tally)
    server.close()
    assert tally.ends.total() == len(asked) > 3
    assert tally.ends["right"] > 0
    assert len(tally.wrong) == tally.ends["wrong"] > 0


def test_the_result_is_printed_and_drawn(tmp_path: Path) -> None:
    tally = soak.Tally()
    tally.ends.update(right=3, wrong=1)
    tally.faults.update({"kill P": 2})
    tally.wrong.append("request soak-1-1: another text")
    found: list[Any] = soak.verdicts(samples(files=40.0))
    lines = "\n".join(soak.report(found, tally, samples()[0], samples()[-1]))
    assert "| files, open files | 61.8 | 80.0 | 98.2 |" in lines
    assert "4 requests: {'right': 3, 'wrong': 1}" in lines
    assert "WRONG: request soak-1-1: another text" in lines
    pytest.importorskip("matplotlib")
    file = tmp_path / "soak.svg"
    soak.plot(samples(), lines.splitlines(), file)
    assert file.stat().st_size > 5000
    text = figure.svg(soak._drawn(samples(), lines.splitlines()), "soak")
    assert ">4 requests, 2 engines failed<" in text
    assert "memory, growth +0.0, at most 4.0: flat is better" in text
    assert "not measured: CPU time; latencies" in text
