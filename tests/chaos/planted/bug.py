"""What a planted bug is, and how it is planted."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pdproxy

PACKAGE = Path(pdproxy.__file__).parent


class GoneError(Exception):
    """A bug's old text is not in the package exactly once: the bug must follow the package."""


_TOKEN = re.compile(r"\w+|[^\w\s]")
_CLOSES = frozenset(")]}")


@dataclass(frozen=True, slots=True)
class Change:
    """One text of one file of the package, and what it becomes. `path`: in the package.

    Where the old text has its lines broken is no matter: the formatter may break them elsewhere.
    """

    path: str
    old: str
    new: str

    def of(self, text: str) -> str:
        """Return the file's text with the change.

        Raises:
            GoneError: the old text is not in it exactly once.
        """
        places = [place.span() for place in _without_spaces(self.old).finditer(text)]
        if len(places) != 1:
            raise GoneError(
                f"{self.path} has {len(places)} times the text {self.old.strip()[:80]!r}"
            )
        ((start, stop),) = places
        return text[:start] + self.new.strip() + text[stop:]


def _without_spaces(text: str) -> re.Pattern[str]:
    """Return a pattern for the tokens of a text with any spaces between them; the last one of a
    list may have a comma.
    """
    tokens = _TOKEN.findall(text)
    ends = [r",?\s*" * (token in _CLOSES) + re.escape(token) for token in tokens]
    return re.compile(
        r"(?<!\w)" * tokens[0].isidentifier()
        + r"\s*".join(ends)
        + r"(?!\w)" * tokens[-1].isidentifier()
    )


@dataclass(frozen=True, slots=True)
class Bug:
    """One bug: what is wrong, the changes that make it so, and the rules of chaos of which at least
    one must be broken by it.

    `options`: those of chaos (`Options`) without which it can't show.
    """

    what: str
    rules: tuple[str, ...]
    changes: tuple[Change, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def plant(self, package: Path) -> None:
        """Change a copy of the package.

        Raises:
            GoneError: one of the old texts is not there exactly once. Nothing is changed then.
        """
        texts: dict[Path, str] = {}
        for change in self.changes:
            file = package / change.path
            texts[file] = change.of(texts.get(file) or file.read_text())
        for file, text in texts.items():
            file.write_text(text)


def copy_package(folder: Path) -> Path:
    """Copy the package into a folder, which then stands in front of it on PYTHONPATH. Return the
    copy.
    """
    return Path(
        shutil.copytree(
            PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__")
        )
    )
