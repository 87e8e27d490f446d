"""Turns facts into findings. Pure: a rule is a function that takes all facts and yields what is
wrong.

A new rule is a function in one of these files and its name in that file's `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pdproxy.check.facts import CheckFacts
from pdproxy.check.findings import LEVELS, Finding
from pdproxy.check.rules import (
    compatible,
    connector,
    encoders,
    engine,
    flags,
    machine,
    transfer,
    turns,
)

Rule = Callable[[CheckFacts], Iterable[Finding]]

RULES: tuple[Rule, ...] = (
    *connector.RULES,
    *engine.RULES,
    *compatible.RULES,
    *transfer.RULES,
    *turns.RULES,
    *encoders.RULES,
    *flags.RULES,
    *machine.RULES,
)


def judge(facts: CheckFacts) -> list[Finding]:
    """Return all findings, errors first; within a level in the order of the rules."""
    found = [finding for rule in RULES for finding in rule(facts)]
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))
