"""Records with vLLM's keys, result files, the table and the text."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdproxy_lab.bench.client import Target
from pdproxy_lab.bench.compare import read_records, table_of
from pdproxy_lab.bench.errors import BenchError
from pdproxy_lab.bench.measures import summarise
from pdproxy_lab.bench.outcome import Observed, Outcome
from pdproxy_lab.bench.record import Record, Shape, detailed, record_of
from pdproxy_lab.bench.report import text_of
from pdproxy_lab.bench.slo import parse_slo

VLLM_RESULT = [
    "date",
    "endpoint_type",
    "backend",
    "label",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    "rtfx",
    "mean_ttft_ms",
    "median_ttft_ms",
    "std_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "std_tpot_ms",
    "p99_tpot_ms",
    "mean_itl_ms",
    "median_itl_ms",
    "std_itl_ms",
    "p99_itl_ms",
]
"""Keys of a file of `vllm bench serve --save-result` (0.32.0, vllm/benchmarks/serve.py)."""
VLLM_DETAILS = [
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "latencies",
    "start_times",
    "queue_times",
    "errors",
]
SLOS = (parse_slo("ttft=500ms"), parse_slo("tight:tpot=1ms"))


def seen(count: int, slow: float = 1.0, wrong: int = 0) -> Observed:
    outcomes = [
        Outcome(
            due=float(number),
            sent=float(number),
            asked_input=10,
            asked_output=3,
            times=[number + 0.1 * slow, number + 0.12 * slow, number + 0.16 * slow],
            prompt_tokens=10,
            output_tokens=3,
        )
        for number in range(count)
    ]
    for outcome in outcomes[:wrong]:
        outcome.fail("status 503", "busy")
    return Observed(outcomes=outcomes, loop_lags=[0.0], seconds=count + 1.0, most_in_flight=4)


def record(name: str = "split", seed: int = 0, **options: Any) -> Record:
    shape = Shape(
        endpoint="completions",
        arrivals="poisson",
        rate=1.0,
        burstiness=1.0,
        seed=seed,
        salt="s",
        requests=options["count"],
    )
    target = Target(
        name=name, url="http://127.0.0.1:1", model="m", headers={"authorization": "Bearer secret"}
    )
    return record_of(summarise(seen(**options), SLOS), target, shape, SLOS, "0.1.0")


def test_a_record_has_vllms_keys_and_values() -> None:
    made = record(count=100)
    assert [key for key in VLLM_RESULT if key not in made] == []
    assert set(made) - set(VLLM_RESULT) - {"pdproxy"} == {
        key for key in made if key.startswith(("p90", "p95")) or "e2el" in key
    }
    assert made["median_ttft_ms"] == pytest.approx(100)
    assert made["median_tpot_ms"] == pytest.approx(30)
    assert made["p99_ttft_ms"] == pytest.approx(100)
    assert made["request_throughput"] == pytest.approx(100 / 101)
    assert made["request_goodput"] == pytest.approx(100 / 101)
    assert made["output_throughput"] == pytest.approx(300 / 101)
    assert made["pdproxy"]["slos"][1]["good"] == 0
    assert made["pdproxy"]["slos"][0]["share"] == 1
    assert "secret" not in json.dumps(made)
    made = detailed(record(count=2, wrong=1), seen(count=2, wrong=1))
    details = {key: made[key] for key in VLLM_DETAILS}
    assert set(made) == set(VLLM_DETAILS) | set(record(count=2))
    assert details["errors"] == ["status 503: busy", ""]
    assert [len(values) for values in details.values()] == [2] * len(details)


def test_what_was_not_measured_is_null_with_a_reason() -> None:
    made = record(count=50)
    assert made["p99_ttft_ms"] is None
    assert made["pdproxy"]["not_measured"]["p99_ttft"] == "needs 100 values, got 50"
    refused = record(count=3, wrong=3)
    assert refused["request_throughput"] is None
    assert refused["median_ttft_ms"] is None
    assert refused["pdproxy"]["not_measured"] == {"run": "no request was answered"}


def test_servers_stand_side_by_side_with_medians_and_spread() -> None:
    records = [
        record("split", seed, count=100, slow=slow) for seed, slow in enumerate((1, 3, 2))
    ] + [record("plain", count=20)]
    table = table_of(records)
    assert table.names == ("split", "plain")
    row = next(row for row in table.rows if row.title == "TTFT p50")
    assert row.cells[0] is not None
    first = row.cells[0]
    assert [first.middle, first.low, first.high] == pytest.approx([200, 100, 300])
    assert first.runs == 3
    assert next(row for row in table.rows if row.title == "TTFT p99").cells[1] is None
    text = text_of(table, records)
    assert "TTFT p50 (ms)" in text
    assert "200.0 (100.0 to 300.0)" in text
    assert "good: tight (%)" in text
    assert (
        "plain: not measured: p99_ttft, p99_gap, p99_e2e, p99_tpot, p99_itl: needs 100 values"
        in text
    )
    assert all(len(line) < 150 for line in text.splitlines())


def test_errors_and_refusals_are_in_the_text() -> None:
    records = [record("a", count=3, wrong=3), record("b", count=100, wrong=10)]
    records[1]["pdproxy"] |= {
        "partial": True,
        "cut": 4,
        "short": 2,
        "left_out": 7,
        "asked_input_tokens": 100,
    }
    text = text_of(table_of(records), records)
    for line in (
        "a, seed 0: NOT MEASURED: no request was answered",
        "a, seed 0: 3 x status 503: busy",
        "b, seed 0: PARTIAL: it was stopped, 4 requests were cut",
        "b, seed 0: 10 of 100 requests failed: latencies are those of the others",
        "b, seed 0: 2 answers have fewer tokens than asked",
        "b, seed 0: 7 requests of the trace were left out",
        "b, seed 0: prompts had 9.00 times the tokens that were asked for",
    ):
        assert line in text


def test_files_are_read_ours_and_vllms(tmp_path: Path) -> None:
    ours, vllms = tmp_path / "ours.jsonl", tmp_path / "vllm-run.json"
    ours.write_text("\n".join(json.dumps(record(seed=seed, count=20)) for seed in (0, 1)))
    plain = {key: value for key, value in record(count=20).items() if key != "pdproxy"} | {
        "label": None
    }
    vllms.write_text(json.dumps(plain, indent=2))
    records = read_records(ours) + read_records(vllms)
    table = table_of(records)
    assert table.names == ("split", "vllm-run")
    cells = next(row for row in table.rows if row.title == "TTFT p50").cells
    assert [cell.runs for cell in cells if cell] == [2, 1]
    assert "vllm-run" in text_of(table, records)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is no result file"),
        (b"{}", "request_throughput"),
        (b"[]", "request_throughput"),
        (b"\xff", "is no result file"),
        (b"[" * 100_000, "is no result file"),
        (b'{"request_throughput": 1}\n{', "is no result file"),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(BenchError, match=says) as error:
        read_records(path)
    assert "\n" not in str(error.value)
    assert error.value.code == 2
    with pytest.raises(BenchError, match="none can't be read"):
        read_records(tmp_path / "none")


def test_wrong_values_in_a_file_are_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    wrong = {
        "request_throughput": "much",
        "median_ttft_ms": True,
        "completed": 5,
        "pdproxy": {
            "name": "a\x1b[2J",
            "slos": [1],
            "not_measured": {"ttft": 5, "tpot": "\x1b[2J"},
            "errors": [1],
            "error_texts": 3,
            "remarks": ["\x1b[2J", 7],
        },
    }
    path.write_text(json.dumps(wrong))
    records = read_records(path)
    table = table_of(records)
    assert [row.title for row in table.rows] == ["requests completed"]
    assert "\x1b" not in text_of(table, records)


def test_too_many_servers_are_refused() -> None:
    with pytest.raises(BenchError, match="17 columns"):
        table_of([record(f"s{number}", count=2) for number in range(17)])
