"""Files that a test changes as an operator does."""

from __future__ import annotations

from pathlib import Path


def renewed(path: Path, text: str) -> None:
    """Replace a file as a careful operator does it: at once."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)
