"""The benchmarks of both orders of the legs and of a change's cost: what they count, on simulated
engines and by hand.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path

import pytest

from pdproxy_lab.sim.tokenizer import BuiltInTokenizer

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import orders
import paired

ROOT = Path(__file__).resolve().parents[2]
PAGE = b"""# HELP pdproxy_phase_seconds Seconds of each phase
pdproxy_phase_seconds_bucket{phase="kv",le="1"} 9.0
pdproxy_phase_seconds_sum{phase="kv"} 2.5
pdproxy_phase_seconds_count{phase="kv"} 10.0
pdproxy_phase_seconds_sum{phase="decode"} 7.0
pdproxy_phase_seconds_count{phase="decode"} 10.0
pdproxy_legs_overlap_seconds_sum 4e-1
pdproxy_legs_overlap_seconds_count 8.0
"""
CASE = orders.Case(tokens=10, clients=1, requests=1)


def _result(order: str, first: float | None, connector: str = "nixl-push") -> orders.Result:
    return orders.Result(connector, order, CASE, 0, 0.5, None, first, first, first, 1.0)


def test_sums_and_counts_of_a_page_of_metrics() -> None:
    before, after = orders.sums(b""), orders.sums(PAGE)
    assert after == {
        "pdproxy_phase_seconds": (2.5, 10.0),
        "pdproxy_legs_overlap_seconds": (0.4, 8.0),
    }
    kv = "pdproxy_phase_seconds"
    assert orders.mean(before[kv], after[kv]) == 0.25
    assert orders.mean(after[kv], after[kv]) is None


@pytest.mark.parametrize("tokens", [1, 100, 4000])
def test_a_prompt_has_exactly_its_tokens_and_no_other_like_it(tokens: int) -> None:
    chance = random.Random(1)
    assert len(BuiltInTokenizer().encode(orders.words(tokens, chance))) == tokens
    assert tokens < 10 or orders.words(tokens, chance) != orders.words(tokens, chance)


def test_the_table_has_ratios_to_the_sequential_push_and_gaps_where_nothing_is_known() -> None:
    text = orders.table(
        [
            _result("sequential", 20.0),
            _result("concurrent", 15.0),
            _result("sequential", None, "nixl"),
        ]
    )
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()[2:]]
    assert [row[10] for row in rows] == ["1.000", "0.750", ""]
    assert {(row[5], row[6]) for row in rows} == {("0.500", "")}
    assert len({line.count("|") for line in text.splitlines()}) == 1


def test_each_client_has_a_request_whatever_the_scale() -> None:
    assert [
        case.requests
        for case in orders.scaled([orders.Case(1, 50, 150), orders.Case(1, 1, 8)], 0.01)
    ] == [50, 1]


def test_both_orders_on_simulated_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(orders, "CASES", (orders.Case(300, 2, 4),))
    monkeypatch.setattr(orders, "WAYS", orders.WAYS[1:])
    monkeypatch.setattr(
        sys, "argv", ["orders.py", "--speed", "10", "--json", str(tmp_path / "found.json")]
    )
    assert orders.main() == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert [(one["connector"], one["order"], one["failed"]) for one in found] == [
        (*way, 0) for way in orders.WAYS
    ]
    assert all(one["kv_s"] > 0 and one["first_p50_ms"] > 0 for one in found)
    assert [one["overlap_s"] is not None for one in found] == [False, True]
    assert capsys.readouterr().out.count("\n| 300 | 2 |") == 2


async def test_servers_that_do_not_answer_end_it_at_its_limit() -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(never, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(TimeoutError):
            await orders.run({orders.REFERENCE: url}, [CASE], 0.05)


def test_the_interval_of_a_median() -> None:
    assert paired.interval([3.0]) == (3.0, 3.0)
    low, high = paired.interval([float(number) for number in range(100)])
    assert (low, high) == (40.0, 59.0)


def test_the_cpu_time_of_this_process_is_finer_than_a_tick() -> None:
    before = paired.cpu(os.getpid())
    assert sum(range(200_000)) > 0
    assert paired.cpu(os.getpid()) - before > 0


def test_the_total_of_a_dump_of_callgrind() -> None:
    assert paired.counted("events: Ir\nsummary: 12345\n") == 12345
    assert paired.counted("events: Ir\ntotals: 7\n") == 7
    with pytest.raises(ValueError, match="without its total"):
        paired.counted("events: Ir\n")


def test_a_pair_of_equal_checkouts_is_measured_without_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(paired, "LOADS", {"whole": paired.Load(4, 0, 20, ("--conc", 2))})
    monkeypatch.setattr(
        sys, "argv", ["paired.py", "--before", str(ROOT), "--rounds", "1", "--loads", "whole"]
    )
    assert paired.main() == 0
    load, before, after, ratio, *_, errors = [
        cell.strip() for cell in capsys.readouterr().out.split("|")[-7:-1]
    ]
    assert (load, errors) == ("whole", "0")
    assert float(before) > 0
    assert float(after) > 0
    assert float(ratio) > 0
