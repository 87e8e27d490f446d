"""Makes the files that come from the code, in `docs/reference` and `configs`: `python -m
tests.reference.generate`.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from tests.reference import (
    admin,
    chart,
    command_line,
    metrics,
    reference_file,
    routes,
    rules,
    settings,
)
from tests.reference.boards import BOARDS
from tests.reference.markdown import ROOT, wrapped

PAGES: dict[str, Callable[[], str]] = {
    "docs/reference/cli.md": command_line.page,
    "docs/reference/settings.md": settings.page,
    "docs/reference/metrics.md": metrics.page,
    "docs/reference/routes.md": routes.page,
    "docs/reference/admin-api.json": admin.page,
    "configs/reference.yaml": reference_file.page,
    "configs/prometheus/rules.yml": rules.page,
    "configs/chart/values.schema.json": chart.schema,
    "configs/chart/files/seconds.json": chart.seconds,
    **{f"configs/dashboards/{board.name}.json": board.page for board in BOARDS},
}


def made(name: str) -> str:
    """Return a file as it should be."""
    os.environ["COLUMNS"] = "100"  # argparse breaks its usage there
    return wrapped(PAGES[name]()) if name.endswith(".md") else PAGES[name]()


if __name__ == "__main__":
    for name in PAGES:
        (ROOT / name).parent.mkdir(exist_ok=True)
        (ROOT / name).write_text(made(name))
        print(f"wrote {name}")
