"""The table of routes in a page whose other text is written by hand."""

from __future__ import annotations

from pdproxy.serving.access.routes import TABLE
from tests.reference.markdown import ROOT, cell, code, table

PAGE = ROOT / "docs" / "reference" / "routes.md"
HEADER = "| path | methods | kind | for whom | what for |\n"


def page() -> str:
    """Return the page with its table made again."""
    before, header, rest = PAGE.read_text().partition(HEADER)
    _, end, after = rest.partition("\n\n")
    rows = (
        (code(one.path), ", ".join(one.methods), one.kind.value, one.audience.value, cell(one.why))
        for one in TABLE
    )
    made = table(("path", "methods", "kind", "for whom", "what for"), rows)
    return f"{before}{made}\n{after}" if header and end else f"{before}\n{made}"
