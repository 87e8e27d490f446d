"""The tables of routes in a page whose other text is written by hand: one for each kind of routes
and for each of those who use them.
"""

from __future__ import annotations

from pdproxy.serving.access.routes import TABLE, RouteEntry
from tests.reference.markdown import ROOT, cell, code, table

PAGE = ROOT / "docs" / "reference" / "routes.md"
BEGIN, END = "<!-- the tables of routes -->\n", "<!-- the end of these tables -->\n"
"""What stands before and behind the tables."""
HEADER = ("path", "methods", "what for")


def page() -> str:
    """Return the page with its tables made again.

    Raises:
        ValueError: the page has no place for them.
    """
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} lacks {BEGIN.strip()} or {END.strip()}")
    groups: dict[tuple[str, str], list[RouteEntry]] = {}
    for one in TABLE:
        groups.setdefault((one.kind.value, one.audience.value), []).append(one)
    tables = (
        f"`{kind}`, for {audience}:\n\n{table(HEADER, (_row(one) for one in entries))}\n"
        for (kind, audience), entries in groups.items()
    )
    return f"{before}{begin}\n{''.join(tables)}{end}{after}"


def _row(one: RouteEntry) -> tuple[str, str, str]:
    return code(one.path), ", ".join(one.methods), cell(one.why)
