"""The report on what is open, as text or as JSON. Owns the exit code. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pdproxy.check.report import TextStyle, wrapped
from pdproxy.check.security.rules import RULES, Open, SecurityRule
from pdproxy.check.security.view import SecurityView


class SecurityFinding(NamedTuple):
    """What a rule has found."""

    rule: SecurityRule
    open: Open


def judge(view: SecurityView) -> list[SecurityFinding]:
    """Return all that is open."""
    return [SecurityFinding(rule, one) for rule in RULES for one in rule.finds(view)]


def exit_code(findings: Sequence[SecurityFinding]) -> int:
    """Return 1 if anything is open, else 0."""
    return int(bool(findings))


def verdict(findings: Sequence[SecurityFinding]) -> str:
    """Return the verdict in one line."""
    count = len(findings)
    return (
        f"OPEN: {count} {'setting' if count == 1 else 'settings'}"
        if count
        else f"nothing is open, by {len(RULES)} rules"
    )


def as_text(findings: Sequence[SecurityFinding], style: TextStyle) -> str:
    """Return the report as text, with a line break at its end."""
    lines: list[str] = []
    for rule, one in findings:
        lines += wrapped(
            f"{rule.name}: {one.setting}: {one.says}", f"{style.mark('bad')} ", "    ", 4
        )
        lines += wrapped(rule.remedy, "    → " if style.unicode else "    > ", "      ", 6)
    return "\n".join([*lines, verdict(findings)]) + "\n"


def as_json(findings: Sequence[SecurityFinding]) -> bytes:
    """Return the report as one JSON object."""
    body = {
        "exit_code": exit_code(findings),
        "verdict": verdict(findings),
        "open": [
            {"name": rule.name, "setting": one.setting, "says": one.says, "remedy": rule.remedy}
            for rule, one in findings
        ],
        "rules": [rule.name for rule in RULES],
    }
    return msgspec.json.format(msgspec.json.encode(body), indent=2)
