"""A bug that is planted, and the test that finds it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.chaos.planted.bug import Bug, Change


@dataclass(frozen=True, slots=True)
class Planted:
    """A bug. `what`: what is wrong; `test`: the one that finds it, as pytest names it in the folder
    of tests; `change`: what makes it so.
    """

    what: str
    test: str
    change: Change

    def plant(self, package: Path) -> None:
        """Change a copy of the package. GoneError: the old text is not there exactly once."""
        Bug(self.what, (), (self.change,)).plant(package)
