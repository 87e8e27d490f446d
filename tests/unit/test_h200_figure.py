"""The figure of the measurements on H200s, and what the README says of it, are the evidence's."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from h200_figure import (
    AUTO,
    EVIDENCE,
    PANELS,
    PLAIN,
    RATES,
    SPLIT,
    Point,
    draw,
    newest,
    values,
)

ROOT = Path(__file__).parents[2]
POINTS = newest(json.loads(EVIDENCE.read_text()))
TIGHT, LOOSE = PANELS[2:]


def texts(svg: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text())


def mean(found: list[float]) -> float:
    return sum(found) / len(found)


def test_the_figure_is_drawn_from_the_evidence(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(POINTS, tmp_path / "h200.svg")
    shown = texts(ROOT / "docs" / "images" / "h200.svg")
    assert texts(tmp_path / "h200.svg") == shown
    for panel in PANELS:
        better = "higher" if panel.higher else "lower"
        assert any(f"{better} is better" in text for text in shown)
        for way in panel.ways:
            for rate in RATES:
                if found := values(POINTS, panel, way, rate):
                    text = f"{mean(found):,.0f}" if mean(found) >= 10 else f"{mean(found):.1f}"
                    assert text in shown, (panel.title, way.name, rate)


def test_the_newest_point_of_each_combination_counts() -> None:
    points: list[Point] = [
        {"system": "split", "chunk": 4096, "rate": 4, "seed": seed, "run": run}
        for seed, run in ((0, 1), (1, 1), (0, 2))
    ]
    assert [(one["seed"], one["run"]) for one in newest(points)] == [(0, 2), (1, 1)]


def test_the_readme_says_what_was_measured() -> None:
    split, plain, auto = (mean(values(POINTS, TIGHT, way, 8)) for way in (SPLIT, PLAIN, AUTO))
    loose = [mean(values(POINTS, LOOSE, way, 8)) for way in (SPLIT, PLAIN)]
    said = " ".join((ROOT / "README.md").read_text().split())
    assert (
        f"{split:.0f} % of the requests were in time with TTFT ≤ 500 ms and TPOT ≤ 8 ms if split, "
        f"{plain:.0f} % on plain engines, {auto:.0f} % with `auto`. With TPOT ≤ 15 ms it was "
        f"{loose[0]:.0f} % if split and {loose[1]:.0f} % on plain engines"
    ) in said
