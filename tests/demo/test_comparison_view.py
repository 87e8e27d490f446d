"""How a fixed comparison looks, at all sizes."""

import dataclasses
import json
import shlex

import pytest

from pdproxy_lab.demo.comparison.view import line, render
from tests.demo.pictures import URL, picture


def drawn(width: int, height: int, count: int = 4) -> list[str]:
    return [row.plain.rstrip() for row in render(picture(count), width=width, height=height)]


def test_at_80_columns_and_24_rows() -> None:
    assert drawn(80, 24) == GOLDEN.strip("\n").split("\n")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60)])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_verdict_keys_and_command_are_in_sight_and_rows_are_filled(
    width: int, height: int, count: int
) -> None:
    rows = drawn(width, height, count)
    assert 0.8 * height <= len(rows) <= height
    assert max(map(len, rows)) <= width
    text = " ".join(row.strip() for row in rows)
    assert picture().verdict.text in text
    assert f"1-{count} engine" in text
    begin = next(at for at, row in enumerate(rows) if row.startswith("curl"))
    *_, data = shlex.split("\n".join(rows[begin:]))
    assert json.loads(data)["model"] == "sim"
    assert f"{URL.removeprefix('http://')}/v1/chat/completions" in rows[begin]


def test_more_rows_make_the_curves_higher_and_name_each_engine() -> None:
    blocks = [sum("█" in row for row in drawn(*size)) for size in ((80, 24), (120, 40), (200, 60))]
    assert blocks[0] < blocks[1] < blocks[2]
    assert any(row.split()[1:3] == ["decode", "1"] for row in drawn(120, 40))


@pytest.mark.parametrize(("width", "height"), [(60, 10), (80, 12), (40, 24), (20, 5), (1, 1)])
def test_a_small_terminal_gets_what_fits(width: int, height: int) -> None:
    rows = drawn(width, height)
    assert len(rows) <= height
    assert max(map(len, rows)) <= width
    if height >= 10:
        assert any(row.startswith("Splitting pays here") for row in rows)


def test_requests_left_out_are_told() -> None:
    full = dataclasses.replace(picture(), left_out=7)
    text = "\n".join(row.plain for row in render(full, width=80, height=24))
    assert "7 requests left out" in text


def test_a_line_has_the_figures_of_both() -> None:
    assert line(picture()) == LINE


GOLDEN = """
pdproxy demo  the same requests to split and to plain engines               41 s
16 req/s of 4,000 tokens in, 128 out. In time: TTFT ≤ 500 ms, TPOT ≤ 8 ms.
Simulated, times of an H200 with an 8B model; 4 times slower here.
ms            split: 2 prefill, 2 decode       plain: 4 engines, chunk 4096
in time ▲     93% 14.9/s  ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇  61% 9.8/s   ▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅
TTFT p50/99 ▼ 220/530     ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇  124/276     ▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄
TPOT p50/99 ▼ 6.2/7.1     ▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅  7.6/10      ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇
ITL p50/99 ▼  5.5/22      ▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂  5.1/98      ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇
worst gap ▼   42          ▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃  103         ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇
running+wait  1:12+3 2:12+3 3:12+3 4:12+3      1:12+3 2:12+3 3:12+3 4:12+3
requests      1,234 answered, 0 failed         1,234 answered, 0 failed

Splitting pays here: 93% of the requests are in time, 61% on plain engines.
There, prefill delays the tokens of others: TPOT p99 10 against 7.1 ms, worst
gap 103 against 42 ms.
Engine 4 was killed: decode 1 and plain 3. Some more words. Some more words.
Some more words. Some more words. Some more words. Some more words. Some ...
1-4 engine  k kill/start  s slow  +/- load  l limits  a auto  q end
curl -N 127.0.0.1:8000/v1/chat/completions -H content-type:application/json \\
  -d '{"model": "sim", "messages": [{"role": "user",
  "content": "Why would anyone split prefill and decode?"}], "max_tokens": 64,
  "stream": true}'
"""
LINE = (
    "41 s engines 8/8 up 16 req/s | split: 2 prefill, 2 decode: in time 93% 14.9/s, "
    "TTFT p50/99 220/530, TPOT p50/99 6.2/7.1, ITL p50/99 5.5/22, worst gap 42, "
    "answered 1234, failed 0 | plain: 4 engines, chunk 4096: in time 61% 9.8/s, TTFT "
    "p50/99 124/276, TPOT p50/99 7.6/10, ITL p50/99 5.1/98, worst gap 103, answered "
    "1234, failed 0"
)
