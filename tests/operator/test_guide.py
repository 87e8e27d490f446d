"""The operator's guide names reasons of conditions as their reference does."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def reasons(text: str) -> set[str]:
    return set(re.findall(r"`([A-Z][a-z]\w+)`", text))


def test_the_guide_has_reasons_of_the_reference() -> None:
    _, _, rest = (DOCS / "guide" / "operator.md").read_text().partition("\n## Conditions\n")
    named = reasons(rest.partition("\n## ")[0])
    assert named
    assert named <= reasons((DOCS / "reference" / "conditions.md").read_text())
