"""The command `pdproxy simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdproxy.cli.main import main
from tests.simulate.loads import write_trace

PLAIN = ("simulate", "--aggregated", "2", "--seeds", "2")
LOAD = ("--rate", "4", "--requests", "120", "--input-tokens", "4000", "--output-tokens", "20:60")


def test_the_report_names_latencies_goodput_and_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAIN, *LOAD, "--slo", "chat:ttft=500ms,tpot=15ms"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("median of 2 runs (lowest to highest)\n")
    assert shown.splitlines()[1].split() == ["2A"]
    for row in (
        "TTFT p99 (ms)",
        "TPOT p50 (ms)",
        "ITL p99 (ms)",
        "worst gap p90 (ms)",
        "good: chat (%)",
    ):
        assert f"\n{row}  " in shown
    for row in (
        "good per engine: chat (req/s)",
        "2 aggregated: busy (%)",
        "2 aggregated: most KV memory in use (%)",
    ):
        assert f"\n{row}  " in shown


def test_the_same_command_gives_the_same_report(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
    line = [
        "simulate",
        "--prefill",
        "2",
        "--decode",
        "1",
        "--trace",
        str(trace),
        "--spread",
        "--requests",
        "150",
    ]
    assert main(line) == 0
    first = capsys.readouterr().out
    assert main(line) == 0
    assert capsys.readouterr().out == first
    assert "2P1D" in first


def test_the_records_have_the_keys_of_vllms_benchmark(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "runs.jsonl"
    slos = ("--slo", "ttft=500ms", "--slo", "b:tpot=1ms")
    assert main([*PLAIN, *LOAD, *slos, "--json", str(file), "--name", "two plain"]) == 0
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["pdproxy"]["seed"] for record in records] == [0, 1]
    for record in records:
        assert record["completed"] == record["num_prompts"] == 120
        assert record["total_input_tokens"] == 120 * 4000
        assert record["request_throughput"] == pytest.approx(120 / record["duration"])
        assert record["median_ttft_ms"] > 100
        assert record["pdproxy"]["slos"][0]["goodput_per_engine"] == pytest.approx(
            record["request_goodput"] / 2
        )
        assert record["pdproxy"]["slos"][1]["good"] == 0
        assert (
            record["pdproxy"]["roles"]["aggregated"]["output_tokens"]
            == record["total_output_tokens"] - 120
        )
    capsys.readouterr()
    assert main(["bench", "--compare", str(file)]) == 0
    assert "two plain" in capsys.readouterr().out


def test_engines_that_get_no_request_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "simulate",
                "--prefill",
                "1",
                "--decode",
                "1",
                "--aggregated",
                "3",
                "--seeds",
                "1",
                *LOAD,
            ]
        )
        == 0
    )
    assert "no request went to the 3 aggregated engines" in capsys.readouterr().out


def test_requests_that_do_not_fit_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAIN, *LOAD, "--kv-tokens", "4040"]) == 0
    assert "x too long for the KV memory" in capsys.readouterr().out


def test_a_smaller_chunk_shortens_the_gaps(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    gaps = {}
    for chunk in ("512", "8192"):
        file = tmp_path / chunk
        assert main([*PLAIN, *LOAD, "--chunk", chunk, "--json", str(file)]) == 0
        gaps[chunk] = json.loads(file.read_text().splitlines()[0])["pdproxy"]["p95_gap_ms"]
    assert gaps["512"] < 30 < 80 < gaps["8192"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--rate", "4"], "there must be 1 to 4096 engines, got 0"),
        (["--prefill", "2", "--rate", "4"], "prefill engines need decode engines"),
        (["--aggregated", "x", "--rate", "4"], "--aggregated: expected 0 to 4096, got 'x'"),
        (["--aggregated", "2"], "--rate or --trace is missing"),
        (["--aggregated", "2", "--rate", "0"], "--rate: expected requests per second above 0"),
        (["--aggregated", "2", "--rate", "1e9"], "--rate: expected requests per second above 0"),
        (
            ["--aggregated", "2", "--rate", "9000", "--duration", "86400"],
            "are more than 1000000 in one run",
        ),
        (
            ["--aggregated", "2", "--rate", "4", "--duration", "5", "--requests", "5"],
            "give one of them",
        ),
        (
            ["--aggregated", "2", "--rate", "4", "--scale", "2"],
            "--scale: has no effect without --trace",
        ),
        (
            ["--aggregated", "2", "--rate", "4", "--burstiness", "2"],
            "--burstiness: has no effect without --arrivals burst",
        ),
        (
            ["--aggregated", "2", "--rate", "4", "--prefill-chunk", "512"],
            "--prefill-chunk: has no effect without --pre",
        ),
        (
            ["--aggregated", "2", "--rate", "4", "--prefill-policy", "least_load"],
            "--prefill-policy: has no effect without --prefill",
        ),
        (
            ["--aggregated", "2", "--rate", "4", "--policy", "magic"],
            "--policy: expected least_load",
        ),
        (
            ["--aggregated", "2", "--rate", "4", "--slo", "ttft=5"],
            "--slo: expected [NAME:]ttft=500ms",
        ),
        (
            ["--aggregated", "2", "--rate", "4", "--slo", "ttft=5s", "--slo", "ttft=5s"],
            "two have the name ttft=5s",
        ),
        (
            ["--aggregated", "2", "--rate", "4", "--profile", "nowhere.json"],
            "--profile: nowhere.json: neither a file",
        ),
        (["--aggregated", "2", "--rate", "4", "--kv-tokens", "5"], "--kv-tokens: expected 512 to"),
        (
            ["--aggregated", "2", "--rate", "4", "--input-tokens", "9:1"],
            "--input-tokens: expected 1 to",
        ),
        (["--aggregated", "2", "--trace", "nowhere.jsonl"], "--trace: nowhere.jsonl can't be read"),
        (
            ["--aggregated", "2", "--rate", "4", "--json", "/nowhere/file"],
            "--json: file can't be written",
        ),
    ],
)
def test_wrong_options_are_named_in_one_line(
    line: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *line]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    first, *rest = shown.err.splitlines()
    assert first.startswith("pdproxy simulate: ")
    assert message in first
    assert rest in ([], ["See `pdproxy simulate --help`."])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate", "4", "--scale", "2"], "--scale: has no effect with --rate"),
        (["--arrivals", "constant"], "--arrivals: has no effect with --trace and without --rate"),
        (["--input-tokens", "4"], "--input-tokens: has no effect with --trace"),
        (["--max-tokens", "2"], "--trace: no requests are left of it"),
        (["--slice", "90000:90001"], "--trace: no requests are left of it"),
    ],
)
def test_wrong_options_of_a_trace(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
    assert main(["simulate", "--aggregated", "1", "--trace", str(trace), *options]) == 2
    assert capsys.readouterr().err == f"pdproxy simulate: {message}\n"


def test_a_profile_without_times_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "none.json"
    origin = dict.fromkeys(("accelerator", "model", "engine", "measured"), "none")
    file.write_text(json.dumps({"name": "none", "origin": origin, "hardware": {"speed": 0}}))
    assert main([*PLAIN, *LOAD, "--profile", str(file)]) == 2
    assert "speed must be above 0" in capsys.readouterr().err


def test_an_interrupt_ends_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pdproxy_lab.simulate.run.run", interrupted)
    assert main([*PLAIN, *LOAD]) == 130
    assert capsys.readouterr().err == "pdproxy simulate: interrupted\n"


def test_what_the_profile_was_not_fitted_to_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = ["simulate", "--aggregated", "2", "--requests", "200", "--seeds", "2", "--rate"]
    assert main([*line, "6", "--input-tokens", "4000", "--output-tokens", "128"]) == 0
    assert "not fitted" not in capsys.readouterr().out
    file = tmp_path / "runs.jsonl"
    beyond = ["--input-tokens", "30000:40000", "--output-tokens", "10", "--kv-tokens", "200000"]
    assert main([*line, "0.5", *beyond, "--json", str(file)]) == 0
    said = " ".join(capsys.readouterr().out.splitlines()[-4:])
    assert "The profile was not fitted to prompts of 30" in said
    assert said.endswith("is unknown.")
    (asked, _) = [
        json.loads(one)["pdproxy"]["asked_of_engines"] for one in file.read_text().splitlines()
    ]
    low, high = asked["prompt_tokens"]
    assert 30_000 <= low < high <= 40_000
    assert asked["answer_tokens"] == [10, 10]
    assert asked["chunk"] == [8192, 8192]
