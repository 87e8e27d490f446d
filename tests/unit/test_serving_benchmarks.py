"""The evaluation of answers and the latency report: what they count, on simulated engines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.server import SimServer

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import evaluate
import serving

FAST = Hardware(speed=0)


def test_questions_are_the_same_each_time_and_have_answers() -> None:
    first, again = evaluate.made_up(20), evaluate.made_up(20)
    assert first == again
    assert all(one.number.lstrip("-").isdigit() for one in first)


def test_each_prompt_has_solved_questions_and_ends_with_an_open_one() -> None:
    questions = evaluate.made_up(30)
    prompts = [evaluate.prompt_of(questions, index) for index in range(30)]
    assert len(set(prompts)) == 30
    assert all(prompt.count("Question:") == evaluate.EXAMPLES + 1 for prompt in prompts)
    assert all(
        prompt.endswith(f"{one.text}\nAnswer:")
        for prompt, one in zip(prompts, questions, strict=True)
    )


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("", "", ""),
        ("so 1,234 of 5", "1234", "5"),
        ("-3", "-3", "-3"),
        ("7\n\nQuestion: 8", "7", "8"),
        ("none", "", ""),
    ],
)
def test_numbers(text: str, first: str, last: str) -> None:
    assert (evaluate.first_number(text), evaluate.last_number(text)) == (first, last)


def test_a_file_of_questions(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "q", "answer": "2 + 2 = 4\\n#### 4"}\n')
    assert evaluate.read(path) == [evaluate.Question("q", "4")]
    for wrong in ("[]", "{", '{"question": "q"}', "1"):
        path.write_text(wrong)
        with pytest.raises(SystemExit, match="line 1: expected question and answer"):
            evaluate.read(path)


async def test_equal_engines_give_equal_answers_and_others_do_not() -> None:
    async with (
        SimServer(SimFacts(hardware=FAST, connector="none", eos_every=0), chance=1) as one,
        SimServer(SimFacts(hardware=FAST, connector="none", eos_every=0), chance=2) as same,
        SimServer(
            SimFacts(hardware=FAST, connector="none", eos_every=0, weights=1), chance=3
        ) as other,
    ):
        questions = evaluate.made_up(12)
        good = await evaluate.evaluate(one.url, same.url, questions, 5, 8)
        assert (good["questions"], good["same"], good["failed"]) == (12, 12, 0)
        bad = await evaluate.evaluate(one.url, other.url, questions, 5, 8)
        assert (bad["same"], bad["failed"]) == (0, 0)
        other.faults.add("status:rate=1,status=503")
        failed = await evaluate.evaluate(one.url, other.url, questions, 5, 8)
        assert (failed["same"], failed["failed"]) == (0, 12)


async def test_the_report_counts_streams_and_failures() -> None:
    async with SimServer(SimFacts(hardware=FAST, connector="none", eos_every=0), chance=1) as one:
        found = await serving.measure(one.url, 6, 1000.0, 20, 5)
        assert (found["requests"], found["failed"], found["model"]) == (6, 0, "sim")
        for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
            assert 0 <= found[name]["p50"] <= found[name]["p90"] <= found[name]["p99"]
        one.faults.add("error_event@mid_stream:rate=1")
        broken = await serving.measure(one.url, 3, 1000.0, 20, 5)
        assert (broken["requests"], broken["failed"]) == (0, 3)
        text = serving.table([found, broken])
        assert "6 requests, 0 failed" in text
        assert "0 requests, 3 failed" in text


@pytest.mark.parametrize("module", [evaluate, serving])
def test_without_servers_the_usage_is_printed(
    module: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["x"])
    with pytest.raises(SystemExit) as caught:
        module.main()  # type: ignore[attr-defined]
    assert caught.value.code == 2
    assert "--simulated" in capsys.readouterr().err
