"""Markdown of generated pages: cells, tables, and the project's own wrapping."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

import mdformat

ROOT = Path(__file__).parents[2]
COMMAND = "python -m tests.reference.generate"
_SPECIAL = re.compile(r"[\\*_\[\]]")
NOTE = f"<!-- made by `{COMMAND}`: edit the code that it is made from -->"


def cell(text: str) -> str:
    """Return a text on one line as Markdown that shows it as it is, but for code in backticks. It
    may stand in a table.
    """
    parts = " ".join(text.split()).split("`")
    if len(parts) % 2:
        parts[::2] = (
            _SPECIAL.sub(r"\\\g<0>", part).replace("&", "&amp;").replace("<", "&lt;")
            for part in parts[::2]
        )
    return "`".join(parts).replace("|", "\\|")


def code(text: str) -> str:
    """Return a text as code in a table."""
    return f"`{' '.join(text.split())}`".replace("|", "\\|")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Cells are Markdown."""
    lines = [header, ["--"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def wrapped(text: str) -> str:
    """Return a page as `mdformat` writes it with the project's options."""
    options = tomllib.loads((ROOT / ".mdformat.toml").read_text())
    return mdformat.text(text, options=options, extensions=options["extensions"])
