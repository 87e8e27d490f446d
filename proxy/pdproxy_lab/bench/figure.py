"""How plots look: a title, the load, panels that say what is better, a legend, and what was not
measured. It needs matplotlib, which is an extra: `pip install 'pdproxy[plot]'`.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pdproxy_lab.bench.errors import USAGE_ERROR, BenchError

ENDINGS = (".png", ".svg", ".pdf")
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f")
"""Okabe and Ito's colours, which people with any colour vision tell apart, on white and on black;
two more at the end.
"""
MARKERS = "osD^vPX*"
INK = "#010203"
"""Of text and axes. No other part has it, so that a page can replace it."""
_MAX_NOTES = 8


def check(path: Path) -> None:
    """Check before a run that its plot can be made.

    Raises:
        BenchError: matplotlib is missing, or the file's ending is none of `ENDINGS`.
    """
    if path.suffix.lower() not in ENDINGS:
        raise BenchError(
            f"--plot: expected a file that ends with {', '.join(ENDINGS)}, got {path.name!r}",
            USAGE_ERROR,
        )
    check_matplotlib("--plot")


def check_matplotlib(option: str) -> None:
    """Check that matplotlib is there.

    Raises:
        BenchError: it is missing.
    """
    try:
        import matplotlib as _  # noqa: F401 - only for this
    except ImportError:
        raise BenchError(
            f"{option}: needs matplotlib: pip install 'pdproxy[plot]'", USAGE_ERROR
        ) from None


def figure(title: str, load: str, size: tuple[float, float]) -> Any:
    """Return an empty figure with a title and a line on the load. `size`: width and height, in
    inches. To be called, with all that draws in it, within `styled`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(made)
    shown = textwrap.fill(load, int(size[0] * 9))
    made.suptitle(f"{title}\n{shown}" if load else title, fontsize=11)
    return made


def panels(made: Any, rows: int, columns: int) -> list[Any]:
    """Return the figure's axes, row by row."""
    return list(made.subplots(rows, columns, squeeze=False).flat)


def describe(axes: Any, title: str, better: str) -> None:
    """Give axes a title that says what is better, such as `lower`."""
    axes.set_title(f"{title}: {better} is better", fontsize=10)
    axes.grid(visible=True, alpha=0.3)
    axes.set_axisbelow(True)


def say_in(axes: Any, text: str) -> None:
    """Write a text into axes that have nothing else."""
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
    axes.set_xticks([])
    axes.set_yticks([])


def notes(made: Any, lines: Sequence[str]) -> None:
    """Write below all what was not measured."""
    shown = [textwrap.shorten(line, 220) for line in lines[:_MAX_NOTES]]
    if len(lines) > _MAX_NOTES:
        shown.append(f"... and {len(lines) - _MAX_NOTES} lines more in the report")
    if shown:
        width = int(made.get_figwidth() * 15)
        wrapped = "\n".join(textwrap.fill(line, width) for line in shown)
        made.supxlabel(wrapped, fontsize=8, ha="left", x=0.01)


def save(made: Any, path: Path, option: str = "--plot") -> None:
    """Write the figure on a white ground.

    Raises:
        BenchError: the file can't be written.
    """
    import matplotlib

    try:
        with matplotlib.rc_context({"svg.hashsalt": "pdproxy"}):
            made.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise BenchError(f"{option}: {path.name} can't be written: {error.strerror}") from None


def svg(made: Any, name: str) -> str:
    """Return the figure as an SVG element for a page, without a ground, its text and axes in the
    page's own colour. `name`: makes the ids of this figure differ from those of others.
    """
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        made.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")


def styled() -> AbstractContextManager[None]:
    """Return a context in which text is taken as it is, and has the colour that `svg` replaces."""
    import matplotlib

    return matplotlib.rc_context(
        {
            "text.color": INK,
            "text.parse_math": False,  # names are others': no `$` begins mathematics
            "axes.titlecolor": INK,
            "legend.frameon": False,
            "axes.edgecolor": INK,
            "axes.labelcolor": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "font.size": 9,
        }
    )
