"""The table and the heat map of benchmarks/decide.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdproxy_lab.bench import figure as figures


def line(name: str, cell: dict[str, Any]) -> str:
    """Return a row of the table."""
    size = int(name.split()[0])
    best, planned = cell["best"], cell["plan"]
    rate = cell["auto"][str(planned["chunk"])] / size
    most = max(cell["auto"], key=lambda chunk: cell["auto"][chunk])
    other = (
        f"  (chunk {most}: {cell['auto'][most] / size:.2f})"
        if most != str(planned["chunk"])
        else ""
    )
    return (
        f"{name:18} {rate:6.2f} {planned['chunk']:6}   {best['rate'] / size:6.2f}  "
        f"{best['name']:34}"
        f" {cell['ratio']:6.3f}{_held_out(cell)}{other}"
    )


def _held_out(cell: dict[str, Any]) -> str:
    return f"  {cell['held_out']['ratio']:6.3f}" if "held_out" in cell else ""


def _family(key: str, size: int) -> str:
    """Return what an arrangement is called in all cells: chunk sizes of splits differ from cell to
    cell.
    """
    name, _, rest = key.partition(" ")
    if rest.startswith("plain"):
        return f"plain, chunk {rest.split()[1]}"
    prefill = int(name.partition("P")[0])
    rule = key.rpartition(", ")[2]
    return f"{prefill / size:.0%} prefill" + (
        f", {rule}" if rule.startswith(("busy", "short")) else ""
    )


def table(results: dict[str, Any]) -> str:
    """Return all cells, and the worst cell of each static arrangement and of `auto`. Rates are per
    engine.
    """
    done = {name: cell for name, cell in results.items() if "auto" in cell}
    lines = [
        (
            "cell                 auto  chunk   best static                                 "
            "auto/best  held out"
        )
    ]
    lines += [line(name, cell) for name, cell in done.items()]
    worst: dict[str, tuple[float, str, int]] = {}
    for name, cell in done.items():
        families = {"auto": cell["ratio"]}
        for key, rate in cell["static"].items():
            family = _family(key, int(name.split()[0]))
            families[family] = max(families.get(family, 0.0), rate / cell["best"]["rate"])
        for family, ratio in families.items():
            known = worst.get(family, (9.0, "", 0))
            worst[family] = (*min(known[:2], (ratio, name)), known[2] + 1)
    lines += [
        "",
        (
            "worst cell of each, against the best static one of that cell (of those that were "
            "tried "
            "in most cells)"
        ),
    ]
    lines += [
        f"  {family:26} {ratio:5.2f}  {name}"
        for family, (ratio, name, count) in sorted(worst.items(), key=lambda item: -item[1][0])
        if 2 * count > len(done)
    ]
    return "\n".join(lines)


def plot(
    results: dict[str, Any],
    sizes: Sequence[int],
    loads: Sequence[str],
    slos: Sequence[str],
    path: Path,
) -> None:
    """Write a heat map: a field per cell with auto / best static; blue above 1, red below; grey was
    not run.
    """
    with figures.styled():
        figures.save(_heat_map(results, sizes, loads, slos), path)


def _heat_map(
    results: dict[str, Any], sizes: Sequence[int], loads: Sequence[str], slos: Sequence[str]
) -> Any:
    made = figures.figure(
        "Placement auto: its rate within an SLO, divided by that of the best static arrangement",
        "rows: loads (tokens of prompts/answers, both in turn, a trace); columns: SLOs; simulated",
        (5 * len(sizes), 2.2 + 0.6 * len(loads)),
    )
    for axes, size in zip(figures.panels(made, 1, len(sizes)), sizes, strict=True):
        figures.describe(axes, f"{size} engines, auto / best static", "higher")
        axes.grid(visible=False)
        axes.set_facecolor("lightgrey")
        cells = [
            [results.get(f"{size} {one} {slo}", {}).get("ratio") for slo in slos] for one in loads
        ]
        shown = [[float("nan") if ratio is None else ratio for ratio in row] for row in cells]
        image = axes.imshow(shown, cmap="RdBu", vmin=0.5, vmax=1.5, aspect="auto")
        for row, ratios in enumerate(cells):
            for column, ratio in enumerate(ratios):
                text = "not run" if ratio is None else f"{ratio:.2f}"
                axes.text(
                    column,
                    row,
                    text,
                    ha="center",
                    va="center",
                    weight="bold" if ratio and ratio < 1 else "normal",
                )
        axes.set_xticks(range(len(slos)), slos)
        axes.set_yticks(range(len(loads)), loads)
        made.colorbar(image, ax=axes, label="red: static serves more; blue: auto does")
    missing = [
        name
        for name in (f"{size} {one} {slo}" for size in sizes for one in loads for slo in slos)
        if "ratio" not in results.get(name, {})
    ]
    figures.notes(made, [f"not run (grey): {', '.join(missing) or 'none'}", "bold: auto loses"])
    return made
