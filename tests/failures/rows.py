"""The list of tests that failed once and passed when they ran again: tests/failed_once.toml."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any

LIST = Path(__file__).parents[1] / "failed_once.toml"


@dataclass(frozen=True)
class Row:
    """A test that failed once, and that nobody has mended. All fields are needed."""

    test: str
    """pytest's name of it, with its parameters."""
    commit: str
    day: date
    where: str
    """The run in which it failed, and what ran beside it."""
    message: str

    def toml(self) -> str:
        """Return the row as it stands in the list. A text in JSON is a text in TOML, but for DEL,
        which no message has.
        """
        return (
            f"[[failed]]\ntest = {json.dumps(self.test)}\ncommit = {json.dumps(self.commit)}\n"
            f"day = {self.day}\n"
            f"where = {json.dumps(self.where)}\nmessage = {json.dumps(self.message)}\n"
        )


@dataclass(frozen=True)
class Risk:
    """Tests that a slow machine may fail, and why they were not mended. It excuses nothing: one
    that fails becomes a row.
    """

    tests: tuple[str, ...]
    """Names of tests, of tests without their parameters, or of files."""
    cause: str


@dataclass(frozen=True)
class FailedOnce:
    """The whole list."""

    failed: tuple[Row, ...]
    at_risk: tuple[Risk, ...]

    def named(self) -> list[str]:
        """Return all names of tests in it."""
        return [
            *(row.test for row in self.failed),
            *(test for risk in self.at_risk for test in risk.tests),
        ]


def _made(kind: type, values: Mapping[str, Any], types: Mapping[str, type]) -> Any:
    if values.keys() != {one.name for one in fields(kind)}:
        raise ValueError(f"expected {', '.join(one.name for one in fields(kind))}: {dict(values)}")
    for name, value in values.items():
        if type(value) is not types[name] or not value:
            raise ValueError(
                f"{name} must be a {types[name].__name__}, and not empty: {dict(values)}"
            )
    return kind(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
    )


def parse(text: str) -> FailedOnce:
    """Read a list. Raise ValueError if something in it is wrong."""
    tree = tomllib.loads(text)
    if unknown := tree.keys() - {"failed", "at_risk"}:
        raise ValueError(f"unknown: {', '.join(unknown)}")
    of_row = {"test": str, "commit": str, "day": date, "where": str, "message": str}
    rows = tuple(_made(Row, one, of_row) for one in tree.get("failed", ()))
    names = [row.test for row in rows]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two rows: {', '.join(sorted(twice))}")
    risks = tuple(
        _made(Risk, one, {"tests": list, "cause": str}) for one in tree.get("at_risk", ())
    )
    return FailedOnce(rows, risks)


def unknown(named: Iterable[str], collected: Collection[str]) -> list[str]:
    """Return the names that no collected test has: neither as its own, nor without parameters, nor
    as its file's.
    """
    shorter = {name.partition("[")[0] for name in collected} | {
        name.partition("::")[0] for name in collected
    }
    return [name for name in named if name not in collected and name not in shorter]
