"""Engines' URLs in a narrow column of a table."""

from __future__ import annotations

from collections.abc import Sequence

_CUT = ".."
_END = len(f"{_CUT}:8000")
"""Characters that are kept at the end at least: the port."""


def short_names(urls: Sequence[str], width: int) -> list[str]:
    """Return each URL as a column of `width` characters shows it: without `http://`, and cut in the
    middle where it is longer.

    All are cut at the same place: the first one where the results differ. Where there is none,
    nothing is cut: the column must wrap.
    """
    names = [url.removeprefix("http://") for url in urls]
    middle = width // 2
    for head in [*range(middle, width - _END + 1), *range(middle - 1, 0, -1)]:
        short = [_cut(name, head, width) for name in names]
        if len(set(short)) == len(set(names)):
            return short
    return names


def _cut(name: str, head: int, width: int) -> str:
    if len(name) <= width:
        return name
    return f"{name[:head]}{_CUT}{name[head + len(_CUT) - width :]}"
