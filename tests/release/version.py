"""The version, which stands in pyproject.toml alone."""

from __future__ import annotations

import tomllib

from tests.reference.markdown import ROOT


def current() -> str:
    """Return the version of this tree."""
    found: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return found


def major(version: str) -> int:
    """Return the first number of a version."""
    return int(version.partition(".")[0])
