"""Checks what choosing engines needs of several settings together: labels that pair engines, and profiles that can be read."""

from __future__ import annotations

from collections.abc import Sequence

from pdproxy.engine_model.profile import load
from pdproxy.scheduling.placements import SPLIT
from pdproxy.settings.errors import KeyPath, Mistakes, quote, spell_key
from pdproxy.settings.policy import PoolSlo
from pdproxy.settings.schema import Node, Pool


def check_placing(pool: Pool, nodes: Sequence[Node], path: KeyPath, found: Mistakes) -> None:
    """Check a pool's labels and profiles. Mistakes are added to `found`."""
    if pool.placement == SPLIT:
        useless = {
            (*path, "policy", "refuse_late"): pool.policy.refuse_late,
            (*path, "slo"): pool.slo != PoolSlo(),
            (*path, "profile"): pool.profile is not None,
        }
        for key in (key for key, given in useless.items() if given):
            text = f"has no effect with placement {SPLIT}, which predicts no times"
            found.add(key, f"{spell_key(key)}: {text}{found.source(key)}")
    for at, name in enumerate(pool.pair_within):
        key = (*path, "pair_within", at)
        without = [node.url for node in nodes if (node.prefills or node.decodes) and name not in node.labels]
        if without:
            more = f" and {len(without) - 1} more" if len(without) > 1 else ""
            text = f"{quote(name)}: {without[0]}{more} has no such label"
            found.add(key, f"{spell_key(key)}: {text}{found.source(key)}")
    named: dict[KeyPath, str | None] = {(*path, "profile"): pool.profile}
    named |= {(*path, "nodes", index, "facts", "profile"): node.facts.profile for index, node in enumerate(nodes)}
    read: dict[str, str | None] = {}
    for key, profile in named.items():
        if profile is None:
            continue
        if profile not in read:
            read[profile] = _why_not(profile)
        if (why := read[profile]) is not None:
            found.add(key, f"{spell_key(key)}: {why}{found.source(key)}")


def _why_not(name: str) -> str | None:
    """Return why a profile can't be used, in one line; None if it can."""
    try:
        load(name)
    except ValueError as error:
        return " ".join(str(error).split())
    return None
