"""The page of routes: what pdproxy has, and what vLLM has and pdproxy has not."""

from __future__ import annotations

import re
from pathlib import Path

from pdproxy.serving.access.routes import TABLE
from tests.fakes.passed import VLLM

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "routes.md").read_text()


def test_the_table_is_documented() -> None:
    """docs/reference/routes.md has a line for each entry, with its methods and its reason, and no
    other.
    """
    heads = re.findall(r"^`(.*)`, for (.*):\n\n(?:\|.*\n){2}((?:\|.*\n)+)", PAGE, re.MULTILINE)
    found = [(*head, row) for *head, rows in heads for row in rows.splitlines()]
    wanted = [
        (e.kind.value, e.audience.value, f"| `{e.path}` | {', '.join(e.methods)} | {e.why} |")
        for e in TABLE
    ]
    assert sorted(found) == sorted(wanted)


def test_the_routes_of_vllm_that_are_absent_are_documented() -> None:
    """docs/reference/routes.md names each route that vLLM has and pdproxy has not, with a
    reason.
    """
    rows = [
        line.strip("| ").split(" | ")
        for line in PAGE.splitlines()
        if re.match(r"\| `(GET|POST|DELETE) /", line)
    ]
    assert all(len(row) == 2 and len(row[1]) > 10 for row in rows)
    named = [tuple(one.split()) for row in rows for one in re.findall(r"`([A-Z]+ /[^`]*)`", row[0])]
    ours = {(method, entry.path) for entry in TABLE for method in entry.methods}
    assert sorted(named) == sorted(one for one in VLLM if one not in ours)
