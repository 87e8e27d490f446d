"""The command `pdproxy plan`."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from pdproxy.cli.main import main
from pdproxy.engine_model.profile import load
from pdproxy_lab.bench import figure
from pdproxy_lab.plan.answer import AtRate, PlanAnswer, Sizes, answer
from pdproxy_lab.plan.arrangement import any_role, plain
from pdproxy_lab.plan.capacity import Level
from pdproxy_lab.plan.plot import plot
from pdproxy_lab.plan.question import Question
from pdproxy_lab.plan.report import text
from pdproxy_lab.plan.search import FoundArrangement, Result
from tests.plan.questions import question
from tests.simulate.loads import write_trace

LOAD = (
    "--input-tokens",
    "4000",
    "--output-tokens",
    "128",
    "--requests",
    "200",
    "--seeds",
    "1",
    "--chunks",
    "512,8192",
)
LOOSE = ("--slo", "ttft=500ms,tpot=15ms")
GAP = ("--slo", "gap=50ms")
"""An objective for which `auto` adds nothing to plain engines."""
TIGHT = ("--slo", "ttft=500ms,tpot=8ms")
NO_HANDOFFS = "The profile has no time for handoffs"


def test_it_says_not_to_split_and_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """And draws it."""
    plot = tmp_path / "plan.svg"
    assert main(["plan", "--gpus", "2", "--rate", "8", *LOAD, *GAP, "--plot", str(plot)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Don't split: 2 plain engines with --max-num-batched-tokens ")
    assert lines[1].startswith("This keeps gap=50ms, and ttft=2s, for 90 % of the requests up to ")
    assert lines[2].startswith("At 8 req/s ")
    assert "Headroom: " in lines[2]
    assert lines[3].startswith("Why: the best one that splits (1P1D) serves ")
    assert ", while prefill engines compute " in lines[4]
    table = [line.split() for line in lines[6:] if line.endswith("%")]
    assert next(row[-2:] for row in table) == ["100", "%"]
    assert any(row[0] == "1P1D" for row in table)
    assert "<svg" in plot.read_text()


def test_a_plot_says_the_load_the_values_and_what_is_not_shown() -> None:
    best, other, none = (
        FoundArrangement(plain(2, chunk, "least_load"), place, exact)
        for chunk, place, exact in ((512, 200, True), (1024, 100, False), (2048, None, True))
    )
    auto = FoundArrangement(any_role(2, 512), 190, True)
    asked = question(LOOSE[1])
    result = Result(
        gpus=2,
        best=best,
        static=best,
        auto=auto,
        found=(best, auto, other, none),
        runs=3,
        level=Level(9, 1, 1),
        searched=4,
    )
    found = answer(asked, result, 4.0)
    drawn = figure.svg(plot(found), "plan")
    assert "prompts of " in drawn
    assert ">the plan<" in drawn
    assert f"keep {LOOSE[1]}: higher is better" in drawn
    assert f">{best.rate / 2:.3g}<" in drawn
    assert f">~{other.rate / 2:.3g}<" in drawn
    assert ">asked for: 4 req/s<" in drawn
    assert "2 any, 512, auto" in drawn
    assert "auto / best static = 0.91" in drawn
    assert "not shown: 1 arrangements that keep the SLO at no rate" in drawn


def test_it_says_to_split_and_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert main(["plan", "--gpus", "4", *LOAD, *TIGHT, "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Split: ")
    assert "miss the limit of TPOT" in shown
    assert "in steps with prefill" in shown
    assert NO_HANDOFFS not in shown
    found = json.loads(file.read_text())
    plan = found["plan"]
    assert found["split"] is True
    assert found["asked"] is None
    assert plan["prefill"] + plan["decode"] == found["gpus"] == 4
    assert plan["long_runs"] is True
    assert plan["capacity_per_gpu"] == pytest.approx(plan["capacity"] / 4)
    assert found["other_kind"]["aggregated"] == 4
    assert found["other_kind"]["capacity"] < plan["capacity"]
    assert found["alternatives"][0]["capacity"] == plan["capacity"]
    assert found["other_reason"]["missed"]["tpot"] > 0.1
    assert found["extrapolated"] is None
    assert "not fitted" not in shown


def test_it_says_to_decide_for_each_request_and_why(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    load = ["--input-tokens", "500:12000", "--output-tokens", "50:600", "--requests", "500"]
    load += ["--slo", "ttft=1s,tpot=8ms", "--seeds", "1", "--chunks", "512,8192", "--rate", "3"]
    assert main(["plan", "--gpus", "2", *load, "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Role any with auto: 2 engines of role any with --max-num-batched-")
    assert lines[3].startswith("Why: the best one whose engines keep their roles (")
    assert lines[5].startswith("     auto / best static = 1.")
    assert lines[6].startswith("     It splits ")
    found = json.loads(file.read_text())
    assert found["plan"] == found["auto"] == found["alternatives"][0]
    assert (found["plan"]["any"], found["plan"]["policy"], found["split"]) == (2, "auto", False)
    assert found["other_kind"] == found["static"] != found["auto"]
    gain = found["auto"]["capacity"] / found["static"]["capacity"]
    assert found["auto_to_static"] == pytest.approx(gain)
    assert min(gain, found["auto_to_static_other_seeds"]) > 1.02
    assert 0 < found["auto_splits"] < 1
    assert found["auto_asked"] == found["asked"] != found["static_asked"]
    assert found["static_asked"]["rate"] == 3


def test_a_rate_that_is_too_high_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpus", "1", "--rate", "40", *LOAD, *LOOSE]) == 0
    shown = capsys.readouterr().out
    assert "That is too much: 1 GPU serves " in shown
    assert "Why: one GPU can't be split." in shown


def test_what_the_profile_was_not_fitted_to_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    load = ("--input-tokens", "40000", "--output-tokens", "5", "--requests", "50")
    assert main(["plan", "--gpus", "2", *load, "--slo", "ttft=9s", "--json", str(file)]) == 0
    said = " ".join(capsys.readouterr().out.splitlines()[-4:])
    assert "The profile was not fitted to prompts of 40000 tokens" in said
    assert said.endswith("is unknown.")
    found = json.loads(file.read_text())["extrapolated"]
    assert found["beyond"]["prompt_tokens"] == [40_000, 40_000]
    assert found["off"] == {}


def test_a_rate_alone_gives_the_number_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--rate", "12", *LOAD, *GAP]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Don't split: 2 plain engines")
    assert "Headroom: " in lines[2]


def test_trying_everything_finds_what_the_search_finds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = []
    for number, options in enumerate(([], ["--exhaustive"])):
        file = tmp_path / str(number)
        assert main(["plan", "--gpus", "3", *LOAD, *TIGHT, *options, "--json", str(file)]) == 0
        found.append(json.loads(file.read_text())["plan"])
    assert found[0]["capacity"] >= 0.95 * found[1]["capacity"]
    assert capsys.readouterr().err == ""


def test_the_same_command_gives_the_same_plan_of_a_trace(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
    line = ["plan", "--trace", str(trace), "--spread", "--gpus", "1", "--chunks", "512,8192"]
    line += ["--slo", "chat:ttft=1s,tpot=20ms"]
    assert main(line) == 0
    first = capsys.readouterr().out
    assert main(line) == 0
    assert capsys.readouterr().out == first
    assert "This keeps chat for 90 % of the requests" in first
    assert "Headroom: " in first


def test_what_nothing_keeps_ends_with_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert main(["plan", "--gpus", "2", *LOAD, "--slo", "tpot=1ms", "--json", str(file)]) == 1
    shown = capsys.readouterr().out
    first, second = shown.splitlines()
    assert (
        first
        == "No arrangement of 2 GPUs keeps tpot=1ms, and ttft=2s, for 90 % of the requests at "
        "any rate."
    )
    assert second.startswith("Even at 0.")
    assert second.endswith(
        "with 2 plain engines with --max-num-batched-tokens 8192, 100 % of the requests miss TPOT."
    )
    found = json.loads(file.read_text())
    assert found["plan"] is None
    assert found["at_a_low_rate"]["missed"] == {"ttft": 0.0, "tpot": 1.0}


def test_requests_that_do_not_fit_or_are_longer_than_measured_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    few = (
        "--requests",
        "100",
        "--seeds",
        "1",
        "--chunks",
        "512",
        "--policy",
        "least_load",
        "--slo",
        "ttft=2s",
    )
    assert main(["plan", "--gpus", "1", "--input-tokens", "4000", "--kv-tokens", "2000", *few]) == 1
    assert (
        "100 % of the requests do not fit into an engine's KV memory of 2000 tokens"
        in capsys.readouterr().out
    )
    trace = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": %d, "output_length": 20}\n'
    trace.write_text("".join(line % (1000 * n, 20_000 if n % 20 == 0 else 100) for n in range(100)))
    assert main(["plan", "--gpus", "1", "--trace", str(trace), *few]) == 0
    said = (
        "5 % of the requests are longer than the profile's max_model_len of 16384 tokens, the "
        "longest has 20020."
    )
    assert said in capsys.readouterr().out


def test_a_split_by_a_profile_of_one_engine_alone_is_doubted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    profile = load("h200-8b")
    terms = ("pull_s", "further_pull_s", "pull_token_s", "handoff_overhead_s")
    alone = structs.replace(
        profile, hardware=structs.replace(profile.hardware, **dict.fromkeys(terms, 0.0))
    )
    file = tmp_path / "alone.json"
    file.write_bytes(msgspec.json.encode(alone))
    for gpus, begin in ((2, "Role any with auto: "), (4, "Split: ")):
        assert main(["plan", "--gpus", str(gpus), *LOAD, *TIGHT, "--profile", str(file)]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(begin)
        assert NO_HANDOFFS in shown


def test_a_chunk_below_max_num_seqs_needs_both_options(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", "--gpus", "1", *LOAD, *LOOSE]
    assert main([*line, "--max-num-seqs", "10000"]) == 0
    said = "--max-num-seqs must be as low, or vLLM does not start."
    assert said in capsys.readouterr().out
    assert main([*line, "--max-num-seqs", "512"]) == 0
    assert said not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("share", "headroom", "kept", "says"),
    [
        (0.95, 0.1, True, "95.0 % are good: 4.75 good req/s per GPU. Headroom: 10 %."),
        (0.91, -0.005, True, "91.0 % are good: 4.55 good req/s per GPU. Headroom: 0 %."),
        (0.89, -0.004, False, "That is too much: 2 GPUs serve 1 % less within the SLO."),
        (0.5, -0.3, False, "That is too much: 2 GPUs serve 30 % less within the SLO."),
        (0.88, 0.02, False, "That is too few, though higher rates keep the SLO"),
    ],
)
def test_what_is_said_of_the_asked_rate_does_not_contradict_itself(
    share: float, headroom: float, kept: bool, says: str
) -> None:
    asked = question("ttft=500ms")
    best = FoundArrangement(plain(2, 512, "least_load"), 200, True)
    result = Result(gpus=2, best=best, found=(best,), runs=1, level=Level(10, 1, 1), searched=1)
    given = AtRate(rate=10.0, share=share, goodput_per_gpu=5 * share, headroom=headroom, kept=kept)
    found = PlanAnswer(
        question=asked,
        result=result,
        best=best,
        other=None,
        asked=given,
        reason=None,
        other_reason=None,
        sizes=Sizes(longest=10, refused=0.0, beyond=0.0),
    )
    assert says in text(found).splitlines()[2]


def test_a_slo_without_ttft_does_not_let_a_queue_grow(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpus", "2", *LOAD, "--slo", "tpot=20ms"]) == 0
    assert "This keeps tpot=20ms, and ttft=2s, for 90 %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--gpus", "2"], "--slo"),
        ([*LOOSE], "--gpus or --rate is missing"),
        (["--gpus", "0", *LOOSE], "--gpus: expected 1 to 64, got '0'"),
        (["--gpus", "65", *LOOSE], "--gpus: expected 1 to 64, got '65'"),
        (["--rate", "0", *LOOSE], "--rate: expected requests per second above 0"),
        (["--rate", "nan", *LOOSE], "--rate: expected requests per second above 0"),
        (["--rate", "90000", *LOOSE], "need more than 64 GPUs"),
        (["--rate", "5", "--exhaustive", *LOOSE], "--exhaustive: needs --gpus"),
        (["--gpus", "2", "--share", "101", *LOOSE], "--share: expected percent above 0"),
        (["--gpus", "2", "--chunks", "512,x", *LOOSE], "--chunks: expected 1 to 10000000, got 'x'"),
        (
            ["--gpus", "2", "--chunks", "1,2,3,4,5,6,7,8,9", *LOOSE],
            "--chunks: expected 1 to 8 chunk sizes, got 9",
        ),
        (["--gpus", "2", "--arrivals", "ramp", *LOOSE], "--arrivals: expected "),
        (["--gpus", "2", "--slo", "ttft=5"], "--slo: expected [NAME:]ttft=500ms"),
        (["--gpus", "2", "--policy", "magic", *LOOSE], "--policy: expected least_load"),
        (["--gpus", "2", "--spread", *LOOSE], "--spread: has no effect without --trace"),
        (
            ["--gpus", "2", "--profile", "nowhere.json", *LOOSE],
            "--profile: nowhere.json: neither a file",
        ),
        (
            ["--gpus", "2", "--trace", "nowhere.jsonl", *LOOSE],
            "--trace: nowhere.jsonl can't be read",
        ),
        (
            ["--gpus", "2", "--trace", "x", "--input-tokens", "5", *LOOSE],
            "--input-tokens: has no effect with --trace",
        ),
        (["--gpus", "2", "--json", "/nowhere/file", *LOOSE], "--json: file can't be written"),
        (
            ["--gpus", "2", "--plot", "plan.txt", *LOOSE],
            "--plot: expected a file that ends with .png",
        ),
        (
            ["--gpus", "2", "--plot", "/nowhere/plan.svg", *LOOSE],
            "--plot: plan.svg can't be written",
        ),
        (
            ["--gpus", "2", "--burstiness", "0.5", *LOOSE],
            "--burstiness: has no effect without --arrivals burst",
        ),
        (
            ["--gpus", "2", "--burstiness", "0.001", "--arrivals", "burst", *LOOSE],
            "the burstiness must be 0.01 to 100",
        ),
    ],
)
def test_wrong_options_are_named_in_one_line(
    line: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *line]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    first, *rest = shown.err.splitlines()
    assert first.startswith("pdproxy plan: ")
    assert message in first
    assert rest in ([], ["See `pdproxy plan --help`."])


def test_a_trace_with_one_time_needs_arrivals_and_a_rate(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 100, "output_length": 20}\n' * 30)
    assert main(["plan", "--trace", str(trace), *LOOSE]) == 2
    assert "give --arrivals" in capsys.readouterr().err
    assert main(["plan", "--trace", str(trace), "--arrivals", "poisson", *LOOSE]) == 2
    assert (
        "--rate is missing: all requests of the trace have the same time" in capsys.readouterr().err
    )
    assert (
        main(["plan", "--trace", str(trace), "--arrivals", "poisson", "--gpus", "1", *LOOSE]) == 0
    )
    assert "Don't split: 1 plain engine with" in capsys.readouterr().out


def test_prefix_is_searched_too_where_prompts_share_beginnings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Question] = []

    def noted(question: Question, *_: object, **__: object) -> None:
        asked.append(question)
        raise KeyboardInterrupt

    monkeypatch.setattr("pdproxy_lab.plan.search.search", noted)
    line = ["plan", "--gpus", "2", *LOOSE]
    trace = ["--trace", str(write_trace(tmp_path / "trace.jsonl")), "--spread"]
    for more in ([], trace, [*trace, "--policy", "session"]):
        assert main([*line, *more]) == 130
    both = ("least_load", "prefix")
    assert [one.policies for one in asked] == [("least_load",), both, ("session",)]


def test_an_interrupt_ends_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pdproxy_lab.plan.search.search", interrupted)
    assert main(["plan", "--gpus", "2", *LOAD, *LOOSE]) == 130
    assert capsys.readouterr().err == "pdproxy plan: interrupted\n"
