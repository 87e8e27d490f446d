"""Makes the files that come from the code, most of them pages of docs/reference: `python -m
tests.reference.generate`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tests.reference import admin, command_line, metrics, reference_file, routes, settings
from tests.reference.markdown import ROOT, wrapped

FOLDER = ROOT / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "cli.md": command_line.page,
    "settings.md": settings.page,
    "metrics.md": metrics.page,
    "routes.md": routes.page,
    "admin-api.json": admin.page,
    "reference.yaml": reference_file.page,
}


def place(name: str) -> Path:
    """Return where a file is."""
    return (ROOT / "configs" if name == "reference.yaml" else FOLDER) / name


def made(name: str) -> str:
    """Return a file as it should be."""
    os.environ["COLUMNS"] = "100"  # argparse breaks its usage there
    return wrapped(PAGES[name]()) if name.endswith(".md") else PAGES[name]()


if __name__ == "__main__":
    for name in PAGES:
        place(name).write_text(made(name))
        print(f"wrote {place(name).relative_to(ROOT)}")
