"""Draws what splitting changed on two H200s, from the measurements in docs/evidence/auto-h200.json.

Usage: h200_figure.py [--out docs/images/h200.svg]

Nothing is measured here. It needs matplotlib: `pip install 'pdproxy[plot]'`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "docs" / "evidence" / "auto-h200.json"
RATES = (4, 8, 12)
NOTES = (
    "Requests per second to both engines together. Bars: means of up to 3 seeds of 60 s, lines "
    "from the lowest to the highest.\n"
    '"1 run": one seed. auto with TPOT ≤ 15 ms: chunks of 512. Not measured: bars that are '
    "missing, more than two engines,\n"
    "other models, other GPUs, prompts with common beginnings."
)
Point = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """A bar of each group: the points of a system with a chunk size."""

    name: str
    system: str
    chunk: int
    colour: str


SPLIT = Way("1 prefill + 1 decode engine", "split", 4096, "#1b7f9e")
PLAIN = Way("2 plain engines", "plain", 4096, "#e0a030")
AUTO = Way("auto, with these limits", "autoB", 4096, "#6f6f6f")
LOOSE_AUTO = Way("auto, with these limits", "autoA", 512, "#6f6f6f")
SMALL = Way("2 plain engines, chunk 512", "plain", 512, "#f3d9a4")


@dataclass(frozen=True)
class Panel:
    """One measure. `value`: of a point; `higher`: whether higher is better."""

    title: str
    ways: tuple[Way, ...]
    value: Callable[[Point], float]
    higher: bool
    log: bool = False
    limit: float | None = None


def _share(slo: str) -> Callable[[Point], float]:
    return lambda point: 100 * point["good"][slo] / point["requests"]


PANELS = (
    Panel(
        "TTFT, 95th percentile (ms, log)",
        (SPLIT, PLAIN, AUTO),
        lambda point: point["ttft_ms"][1],
        higher=False,
        log=True,
        limit=500,
    ),
    Panel(
        "TPOT, 95th percentile (ms)",
        (SPLIT, PLAIN, AUTO),
        lambda point: point["tpot_ms"][1],
        higher=False,
        limit=8,
    ),
    Panel(
        "In time with TTFT ≤ 500 ms and TPOT ≤ 8 ms (%)",
        (SPLIT, PLAIN, SMALL, AUTO),
        _share("B"),
        higher=True,
    ),
    Panel(
        "In time with TTFT ≤ 500 ms and TPOT ≤ 15 ms (%)",
        (SPLIT, PLAIN, SMALL, LOOSE_AUTO),
        _share("A"),
        higher=True,
    ),
)


def newest(points: Iterable[Point]) -> list[Point]:
    """Return the newest point of each system, chunk size, rate and seed."""
    found = {
        (one["system"], one["chunk"], one["rate"], one["seed"]): one for one in points
    }  # the file is in the order of the runs
    return list(found.values())


def values(points: Sequence[Point], panel: Panel, way: Way, rate: int) -> list[float]:
    """Return a bar's values, one for each seed; none if that was not measured."""
    return [
        panel.value(point)
        for point in points
        if (point["system"], point["chunk"], point["rate"]) == (way.system, way.chunk, rate)
    ]


def draw(points: Sequence[Point], path: Path) -> None:
    """Write the figure."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "h200", "font.size": 9}
    figure = Figure(figsize=(10, 6.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        _bars(axes, points, panel)
    handles = [
        mpl.patches.Patch(color=way.colour, label=way.name) for way in (SPLIT, PLAIN, SMALL, AUTO)
    ]
    title = (
        "Split, plain and auto on two H200s: 8B model, prompts of 4,000 tokens, 128 out, chunks of "
        "4,096 tokens"
    )
    figure.legend(
        handles=handles,
        title=title,
        title_fontsize=11,
        loc="outside upper center",
        ncols=4,
        frameon=False,
    )
    figure.supxlabel(NOTES, fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def _bars(axes: Any, points: Sequence[Point], panel: Panel) -> None:
    width = 0.84 / len(panel.ways)
    for number, way in enumerate(panel.ways):
        for group, rate in enumerate(RATES):
            found = values(points, panel, way, rate)
            place = group + (number - (len(panel.ways) - 1) / 2) * width
            if not found:
                axes.annotate(
                    "not\nmeasured",
                    (place, 0),
                    (0, 3),
                    textcoords="offset points",
                    xycoords=("data", "axes fraction"),
                    ha="center",
                    fontsize=6,
                )
                continue
            mean = sum(found) / len(found)
            axes.bar(place, mean, width * 0.94, color=way.colour)
            if len(found) > 1:
                axes.plot([place, place], [min(found), max(found)], color="black", linewidth=0.8)
            text = f"{mean:,.0f}" if mean >= 10 else f"{mean:.1f}"
            axes.annotate(
                text if len(found) > 1 else f"{text}\n1 run",
                (place, max(found)),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=7,
            )
    if panel.limit is not None:
        axes.axhline(panel.limit, color="black", linestyle="--", linewidth=0.8)
    if panel.log:
        axes.set_yscale("log")
    axes.margins(y=0.15)
    axes.set_xticks(range(len(RATES)), [f"{rate} req/s" for rate in RATES])
    better = "higher" if panel.higher else "lower"
    axes.set_title(f"{panel.title}: {better} is better", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "h200.svg")
    draw(newest(json.loads(EVIDENCE.read_text())), parser.parse_args().out)


if __name__ == "__main__":
    main()
