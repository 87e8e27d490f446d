"""The fit of a profile: what was measured, the same load on virtual engines, the table."""

import json
import random
import statistics
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.engine_model.hardware import attended
from pdproxy.engine_model.profile import load as profile_of
from tests.fit.__main__ import run
from tests.fit.load import Request, arrivals, served
from tests.fit.measured import COLUMNS, MAX_BYTES, Load, Measured, Row, read
from tests.fit.predict import Predicted, cells, percentile, predict
from tests.fit.table import TOLERANCE, Cell, cells_of, markdown

MEASURED = Path(__file__).parents[2] / "docs" / "evidence" / "h200-8b-measured.json"
LOAD = Load(prompt_tokens=4000, output_tokens=20, seconds=2, ttft_slo_ms=500, tpot_slo_ms=15)
H200 = profile_of("h200-8b")


def row(
    way: Any = "plain", rate: float = 4, chunk: int | None = None, **given_cells: list[float]
) -> Row:
    return Row(name="it", way=way, rate=rate, max_num_batched_tokens=chunk, cells=given_cells)


def alone(way: Any, chunk: int | None = None) -> Request:
    """One request that meets no other."""
    requests, _ = served(row(way, 0.5, chunk), LOAD, H200, seed=1)
    assert len(requests) == 1
    return requests[0]


# -- what was measured


def test_the_file_of_measurements_has_every_value_of_the_table():
    measured = read(MEASURED)
    assert len(measured.rows) == 12
    assert all(set(one.cells) == set(COLUMNS) for one in measured.rows)
    assert sum(len(values) for one in measured.rows for values in one.cells.values()) == 120


def test_the_file_of_longer_runs_has_three_values_per_cell():
    measured = read(MEASURED.with_name("h200-8b-measured-60s.json"))
    assert [(one.rate, one.max_num_batched_tokens) for one in measured.rows] == [
        (8, 512),
        (12, 512),
        (8, 1024),
        (12, 1024),
    ]
    assert all(set(one.cells) == set(COLUMNS) for one in measured.rows)
    assert {len(values) for one in measured.rows for values in one.cells.values()} == {3}


def written(path: Path, **changes: Any) -> Path:
    load = msgspec.structs.asdict(LOAD)
    usual = {
        "source": "s",
        "load": load,
        "rows": [{"name": "a", "way": "plain", "rate": 4, "cells": {"itl_p50": [5]}}],
    }
    path.write_text(json.dumps(usual | changes))
    return path


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"load": {}}, "prompt_tokens"),
        ({"load": {**msgspec.structs.asdict(LOAD), "seconds": 0}}, "seconds"),
        ({"load": {**msgspec.structs.asdict(LOAD), "prompt_tokens": 10**9}}, "prompt_tokens"),
        ({"rows": [{"name": "a", "way": "both", "rate": 4, "cells": {}}]}, "way"),
        ({"rows": [{"name": "a", "way": "plain", "rate": 0, "cells": {}}]}, "rate"),
        (
            {"rows": [{"name": "a", "way": "split", "engines": 1, "rate": 4, "cells": {}}]},
            "engines",
        ),
        ({"rows": [{"name": "a", "way": "plain", "rate": 1e9, "cells": {}}]}, "rate"),
        ({"rows": [{"name": "a", "way": "plain", "rate": 4, "cells": {"p50": [1]}}]}, "p50"),
        ({"rows": [{"name": "a", "way": "plain", "rate": 4, "cells": {"itl_p50": []}}]}, "itl_p50"),
        (
            {"rows": [{"name": "a", "way": "plain", "rate": 4, "cells": {"itl_p50": [0]}}]},
            "itl_p50",
        ),
        (
            {
                "rows": [
                    {
                        "name": "a",
                        "way": "plain",
                        "rate": 4,
                        "max_num_batched_tokens": 0,
                        "cells": {},
                    }
                ]
            },
            "max_num",
        ),
        ({"extra": 1}, "extra"),
    ],
)
def test_wrong_measurements_are_refused_in_one_line(tmp_path, changes, word, capsys):
    path = written(tmp_path / "m.json", **changes)
    with pytest.raises(ValueError, match=word):
        read(path)
    assert run([str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(path) in said


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b" " * (MAX_BYTES + 1)])
def test_a_file_without_measurements_is_refused(tmp_path, content):
    path = tmp_path / "m.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"m\.json"):
        read(path)
    with pytest.raises(ValueError, match="can't be read"):
        read(tmp_path / "none.json")


# -- the load


@given(st.floats(0.1, 100), st.floats(0.5, 20), st.integers())
def test_arrivals_are_as_many_as_the_rate_says_and_end_with_the_time(rate, seconds, seed):
    times = arrivals(rate, seconds, random.Random(seed))
    assert len(times) == max(round(rate * seconds), 1)
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] == pytest.approx(seconds)


def test_a_request_alone_on_a_plain_engine_takes_the_times_of_the_profile():
    hardware, one = H200.hardware, alone("plain")
    prefill = hardware.step_s(4000, 0, 0, attended(4000, 0), begun=1)
    around = hardware.before_engine_s + hardware.to_client_s
    assert one.tokens[0] - one.sent == pytest.approx(around + prefill)
    decoding = sum(hardware.step_s(0, 1, 4000 + made) for made in range(19))
    assert one.tokens[-1] - one.tokens[0] == pytest.approx(decoding)
    assert len(one.tokens) == LOAD.output_tokens


def test_a_request_alone_on_a_split_pair_takes_the_times_of_the_profile():
    hardware, one = H200.hardware, alone("split")
    prefill = hardware.step_s(4000, 0, 0, attended(4000, 0), begun=1)
    posted = hardware.step_s(0, 0, pulls=1, pulled_tokens=4000)
    moved = posted + hardware.transfer_s(4000) + hardware.step_s(0, 1, 3999)
    around = hardware.before_engine_s + hardware.between_engines_s + hardware.to_client_s
    assert one.tokens[0] - one.sent == pytest.approx(around + prefill + moved)
    assert len(one.tokens) == LOAD.output_tokens


def test_small_chunks_read_more_and_take_longer():
    assert (
        alone("plain", 512).tokens[0] - alone("plain", 512).sent
        > alone("plain").tokens[0] - alone("plain").sent
    )


def test_a_hybrid_serves_whole_on_the_decode_engine_what_finds_two_prefill_legs():
    first, second, third = served(
        row("hybrid", 300), msgspec.structs.replace(LOAD, seconds=0.01), H200, seed=1
    )[0]
    handed = H200.hardware.between_engines_s + H200.hardware.step_s(
        0, 0, pulls=1, pulled_tokens=4000
    )
    assert (
        third.tokens[0] - third.sent
        < min(first.tokens[0] - first.sent, second.tokens[0] - second.sent) - handed
    )


def test_equal_seeds_give_equal_predictions_and_other_seeds_others():
    found = [predict(row(rate=8), LOAD, H200, seeds) for seeds in ([1, 2], [1, 2], [3, 4])]
    assert found[0] == found[1] != found[2]
    assert all(one.low <= one.median <= one.high for one in found[0].values())


# -- columns


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=50))
def test_percentiles_are_those_of_the_standard_library(values):
    expected = statistics.quantiles(values, n=100, method="inclusive")
    for share in (1, 50, 95, 99):
        assert percentile(values, share) == pytest.approx(expected[share - 1], abs=1e-6)
    assert percentile(values, 100) == max(values)
    assert percentile([], 50) == 0


def test_columns_are_computed_as_the_serving_benchmark_does():
    requests = [
        Request(0.0, [0.1, 0.12, 0.14]),
        Request(1.0, [1.6, 1.61, 1.62]),
        Request(2.0, [2.2]),
    ]
    found = cells(requests, 4.0, LOAD)
    assert found["ttft_p50"] == pytest.approx(200)
    assert found["tpot_p50"] == pytest.approx(10)
    assert found["itl_p50"] == pytest.approx(15)
    assert found["throughput"] == pytest.approx(3 / 4)
    # the first is over the TPOT, the second over the TTFT
    assert found["goodput"] == pytest.approx(1 / 4)
    assert set(found) == set(COLUMNS)


# -- the table


@pytest.mark.parametrize(
    ("measured", "fits", "in_spread"),
    [
        (100.0, True, True),
        (117.0, True, True),
        (118.0, False, True),
        (88.0, True, False),
        (87.0, True, False),
        (86.0, False, False),
    ],
)
def test_a_cell_fits_within_the_tolerance_or_within_the_spread(measured, fits, in_spread):
    cell = Cell(row(), "ttft_p50", measured, Predicted(100.0, 90.0, 120.0))
    assert (cell.fits, cell.in_spread) == (fits, in_spread)


def test_the_page_marks_and_names_what_does_not_fit():
    one = row("split", 8, ttft_p50=[100.0, 200.0], itl_p99=[119.0])
    found = dict.fromkeys(COLUMNS, Predicted(100.0, 90.0, 120.0))
    page = markdown(Measured(source="here", load=LOAD, rows=[one]), [found], H200, 3)
    assert "**1 of 3 values are within 15%.** 1 more" in page
    assert "| it | 8 | 100 / 200! → 100 |" in page
    assert "119~ → 100" in page
    assert "- it at 8 req/s, TTFT p50: measured 200, predicted 100 (90 to 120)" in page
    assert all(text in page for text in H200.origin.missing)


def test_the_command_prints_the_table_of_a_small_file(tmp_path, capsys):
    path = written(
        tmp_path / "m.json",
        rows=[{"name": "a|b", "way": "split", "rate": 4, "cells": {"ttft_p50": [160]}}],
    )
    assert run([str(path), "--seeds", "2"]) == 0
    page = capsys.readouterr().out
    assert "median of 2 runs" in page
    assert "| a/b | 4 | 160 → 16" in page


@pytest.mark.parametrize(
    "more", [["--seeds", "0"], ["--seeds", "x"], ["--seeds", "9" * 99], ["--profile", "none"]]
)
def test_wrong_options_are_refused(more, capsys):
    assert run([str(MEASURED), *more]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_shipped_profile_fits_what_was_measured():
    """A seed of the rows at 8 req/s; docs/evidence has all rows with more seeds."""
    measured = read(MEASURED)
    measured = msgspec.structs.replace(
        measured, rows=[one for one in measured.rows if one.rate == 8]
    )
    found = cells_of(
        measured, [predict(one, measured.load, H200, range(1)) for one in measured.rows]
    )
    assert sum(cell.fits for cell in found) >= 24  # of 42
    assert all(cell.fits for cell in found if cell.column == "throughput")
    assert TOLERANCE == 0.15


def test_one_engine_serves_all_that_two_would_share():
    measured = read(MEASURED.with_name("h200-8b-measured-1000-500.json"))
    one = measured.rows[0]
    assert one.engines == 1
    light = msgspec.structs.replace(one, rate=2.0)
    both = msgspec.structs.replace(light, engines=2)
    short = msgspec.structs.replace(measured.load, seconds=10.0, output_tokens=100)
    alone, shared = (cells(*served(row, short, H200, 0), short) for row in (light, both))
    assert alone["tpot_p50"] > 1.02 * shared["tpot_p50"]
