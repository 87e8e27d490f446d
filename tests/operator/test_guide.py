"""The guide names the reasons of conditions as the operator writes them, and each that says that
something is wrong.
"""

from __future__ import annotations

import re
from pathlib import Path

import pdproxy_operator

PACKAGE = Path(pdproxy_operator.__file__).parent
GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "operator.md"
GOOD = {"UpToDate", "AsExpected", "AsNeeded", "NotAutoscaled"}
"""Reasons of the status False where that is well."""


def test_the_guide_has_the_reasons_of_conditions() -> None:
    section = GUIDE.read_text().partition("\n## Conditions\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([A-Z]\w+)`", section))
    code = "".join(path.read_text() for path in PACKAGE.glob("*.py"))
    assert {reason for reason in named if f'"{reason}"' not in code} == set()
    conditions = (PACKAGE / "conditions.py").read_text()
    written = set(re.findall(r'"False", "([A-Z]\w+)"|"False",\s+"([A-Z]\w+)"', conditions))
    wrong = {one or other for one, other in written} - GOOD
    assert wrong - named == set()
