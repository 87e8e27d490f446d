"""What plots show: the load, which way is better, the values, and what was not measured."""

import sys
from pathlib import Path

import pytest

from pdproxy_lab.bench import figure, plots
from pdproxy_lab.bench.curves import curves_of
from pdproxy_lab.bench.errors import BenchError
from tests.bench.test_compare import record
from tests.bench.test_sweep import sweep_records


def test_a_plot_of_servers_says_what_it_shows() -> None:
    made = plots.bars(
        [record("$a$", count=20), record("b", count=100), record("c", count=2, wrong=2)]
    )
    text = figure.svg(made, "bars")
    assert "model m; 1 seed" in text
    assert "TTFT (ms): lower is better" in text
    assert "good requests (req/s): higher is better" in text
    assert ">$a$<" in text
    assert "c, seed 0: NOT MEASURED: no request was answered" in text
    assert "$a$: not measured: p99_ttft" in text
    assert ">100.0<" in text, "a bar has its value"


def test_a_plot_of_a_sweep_has_curves_and_says_where_they_end() -> None:
    records = sweep_records()
    text = figure.svg(plots.curves(curves_of(records), records), "sweep")
    assert "poisson arrivals, 2 to 8 req/s" in text
    assert "Goodput (ttft=500ms): higher is better" in text
    assert "TTFT over throughput: right and low is better" in text
    assert ">split, p50<" in text
    assert ">90 % are good<" in text
    assert "plain: NOT MEASURED at 8 req/s: far beyond its capacity" in text


def test_figures_for_a_page_have_its_color_and_ids_of_their_own() -> None:
    records = [record("a", count=20)]
    one, other = (figure.svg(plots.bars(records), name) for name in ("one", "other"))
    assert one.startswith("<svg")
    assert "currentColor" in one
    assert "#010203" not in one
    assert one != other


@pytest.mark.parametrize("ending", figure.ENDINGS)
def test_a_plot_is_written(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"plot{ending}"
    figure.check(path)
    figure.save(plots.bars([record("a", count=20)]), path)
    assert path.stat().st_size > 5000


def test_a_plot_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="can't be written"):
        figure.save(plots.bars([record(count=20)]), tmp_path / "none" / "plot.png")


def test_a_plot_needs_a_known_ending_and_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BenchError, match="ends with"):
        figure.check(tmp_path / "plot.txt")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BenchError, match="needs matplotlib: pip install"):
        figure.check(tmp_path / "plot.png")
