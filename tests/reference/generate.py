"""Makes the pages of docs/reference that come from the code: `python -m tests.reference.generate`."""

from __future__ import annotations

import os
from collections.abc import Callable

from tests.reference import admin, command_line, metrics, routes, settings
from tests.reference.markdown import ROOT, wrapped

FOLDER = ROOT / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "cli.md": command_line.page,
    "settings.md": settings.page,
    "metrics.md": metrics.page,
    "routes.md": routes.page,
    "admin-api.json": admin.page,
}


def made(name: str) -> str:
    """Return a page as it should be."""
    os.environ["COLUMNS"] = "100"  # argparse breaks its usage there
    return wrapped(PAGES[name]()) if name.endswith(".md") else PAGES[name]()


if __name__ == "__main__":
    for name in PAGES:
        (FOLDER / name).write_text(made(name))
        print(f"wrote docs/reference/{name}")
