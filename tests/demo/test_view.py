"""How fixed figures look."""

import dataclasses
import io

import pytest
from rich.console import Console

from pdproxy.observe.prompt_shares import PromptShare
from pdproxy_lab.demo.figures import Figures
from pdproxy_lab.demo.view import line, milliseconds, number, render, size
from tests.demo.numbers import ill, well

TITLE = "http://127.0.0.1:8000  model sim"


def drawn(figures: Figures, width: int, height: int = 24) -> list[str]:
    console = Console(
        record=True, width=width, height=height, file=io.StringIO(), force_terminal=True
    )
    console.print(render(figures, TITLE, width=width, height=height))
    return [row.rstrip() for row in console.export_text().splitlines()]


def test_all_is_well_at_80_columns() -> None:
    assert drawn(well(), 80) == [
        "pdproxy demo  http://127.0.0.1:8000  model sim  12 s",
        "engine     state  running  waiting  KV blocks in use    tokens/s",
        "prefill 0  up           3        0  ━━────────  12.1%   1,203 in",
        "decode 0   up           3        0  ━━────────  12.1%  1,203 out",
        "prefill 1  up           3        0  ━━────────  12.1%   1,203 in",
        "decode 1   up           3        0  ━━────────  12.1%  1,203 out",
        "",
        "requests  3 in flight, 1,231 ok, 4.2/s",
        "TTFT      p50 23 ms  p99 80 ms  over the last 10 s",
        "ITL       p50 5.2 ms  p99 7.9 ms",
        "tokens/s  12,034 in, 420 out",
        "KV moved  1,231 transfers, 1.23 GB, 34.2 MB/s",
        "traffic   1,234 of the demo's own sent, 1,231 answered whole",
    ]


def test_120_columns_have_room_for_addresses() -> None:
    rows = drawn(well(), 120)
    assert (
        rows[2]
        == "prefill 0  127.0.0.1:8200  up           3        0  ━━━─────────────────  12.1%   "
        "1,203 in"
    )


def test_trouble_is_told() -> None:
    rows = drawn(ill(), 80)
    assert rows[2].split() == ["prefill", "0", "up,", "no", "metrics", "-", "-", "-", "-", "in"]
    assert rows[3].split() == ["decode", "0", "down", "-", "-", "-", "-", "out"]
    text = "\n".join(rows)
    assert "0 in flight, 7 queued, 1 ok, 2 client_left, 4 engine" in text
    assert "p50 - ms  p99 - ms" in text
    assert "0 transfers, 0 B, 1 failed, 2 expired, 300 tokens recomputed" in text
    assert "9 of the demo's own sent, 1 answered whole, 4 failed with status 503" in text


@pytest.mark.parametrize("figures", [well(), well(30), ill()])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (80, 12), (60, 24)])
def test_it_fits_the_terminal(figures: Figures, width: int, height: int) -> None:
    rows = drawn(figures, width, height)
    assert len(rows) <= height
    assert all(len(row) <= width for row in rows)


def test_engines_without_room_are_counted() -> None:
    assert "and 17 more, 17 up" in drawn(well(30), 80, 24)


def test_no_traffic_of_its_own_is_told() -> None:
    assert "yours alone" in drawn(dataclasses.replace(well(), traffic=None), 80)[-1]


def test_prompts_that_one_engine_serves_alone_are_told() -> None:
    """In red with their part beside idle prefill engines."""
    share = PromptShare(50, {"route": 15}, {"n": 35}, 3)
    rows = drawn(dataclasses.replace(well(), prompts=share), 120)
    assert (
        "tokens/s  12,034 in, 420 out, 50% of prompts alone, 35% beside idle P: n 35%, route 15%"
        in rows
    )
    assert "alone 50%  beside idle P 35%" in line(dataclasses.replace(well(), prompts=share))
    busy = dataclasses.replace(well(), prompts=PromptShare(50, {"echo": 50}))
    assert "tokens/s  12,034 in, 420 out, 50% of prompts alone: echo 50%" in drawn(busy, 80)
    assert "beside" not in line(busy)
    assert "alone" not in line(dataclasses.replace(well(), prompts=PromptShare(50)))


def test_a_proxy_that_does_not_answer_is_told() -> None:
    silent = dataclasses.replace(well(), answers=False)
    assert "its metrics don't answer" in drawn(silent, 120)[0]
    assert "the proxy's metrics don't answer" in line(silent)


def test_a_line_has_the_same_figures() -> None:
    assert line(well()) == (
        "12 s  engines 4/4 up  in flight 3  ok 1231  failed 0  tokens/s in 12,034 out 420  TTFT "
        "p50/p99 23/80 ms"
        "  ITL p50/p99 5.2/7.9 ms  KV 1231 moved 1.23 GB"
    )
    assert line(ill()).endswith("KV 0 moved 0 B  traffic failed 5")


def test_numbers_are_spelled_short() -> None:
    assert [number(value) for value in (None, 0, 3, 3.14, 12.6, 1234567)] == [
        "-",
        "0",
        "3",
        "3.1",
        "13",
        "1,234,567",
    ]
    assert [size(value) for value in (0, 999, 1000, 1.5e6, 2e12)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1.5 MB",
        "2 TB",
    ]
    assert [milliseconds(value) for value in (None, 0.0012, 0.5)] == ["-", "1.2", "500"]
