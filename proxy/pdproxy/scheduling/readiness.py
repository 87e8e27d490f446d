"""What an operator is shown about the engines: whether requests can be served, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdproxy.scheduling.compatibility import prefill_and_decode
from pdproxy.scheduling.nodes import Node, Role


def not_ready(nodes: Sequence[Node], *, starting: bool, alone: Sequence[Role]) -> str | None:
    """Return why no request could be served, None if one could.

    `starting`: every engine must have been probed once. `alone`: the roles whose engines may serve a request by themselves.
    """
    waiting = [node.url for node in nodes if not node.probed]
    if starting and waiting:
        return f"starting: not probed yet: {', '.join(waiting)}"
    if any(node.available for node in nodes if not node.uses.isdisjoint(alone)):
        return None
    roles = " or ".join(role.value for role in reversed(alone))
    if Role.DECODE in alone:
        down = "; ".join(f"{node.url} {_why_not(node)}" for node in nodes if not node.uses.isdisjoint(alone))
        return f"no {roles} engine is up: {down}"
    if any(_is_pair(prefill, decode) for prefill in nodes for decode in nodes):
        return None
    why = "; ".join(f"{node.url} {_why_not(node) or node.kv_not_ready}" for node in nodes if not _takes_part(node))
    return f"no {roles} engine is up, and no prefill engine can be paired with a decode engine" + (
        f": {why}" if why else ""
    )


def _why_not(node: Node) -> str | None:
    return node.down_because or node.draining or node.stalled


def _takes_part(node: Node) -> bool:
    return node.available and node.kv_not_ready is None


def _is_pair(prefill: Node, decode: Node) -> bool:
    if (
        Role.PREFILL not in prefill.uses
        or Role.DECODE not in decode.uses
        or not (prefill.available and decode.available)
    ):
        return False
    return prefill_and_decode(prefill, decode) is None


def may_return(nodes: Sequence[Node], model: str | None, *, alone: Sequence[Role]) -> bool:
    """Return whether a request could be served if the engines that stand still moved again."""
    found = [node for node in nodes if node.returns and (model is None or node.serves(model))]
    if not any(node.stalled is not None for node in found):
        return False
    return any(not node.uses.isdisjoint(alone) for node in found) or (
        any(Role.PREFILL in node.uses for node in found) and any(Role.DECODE in node.uses for node in found)
    )


def why_degraded(nodes: Sequence[Node], now: float) -> str | None:
    """Return why no prompt can be split now, although the pool has prefill engines; None if one can be, or has none."""
    prefills = [node for node in nodes if Role.PREFILL in node.uses]
    decodes = [node for node in nodes if Role.DECODE in node.uses and node.usable(now)]
    usable = [node for node in prefills if node.usable(now)]
    if not prefills:
        return None
    if not usable:
        return "no prefill engine can be used: every prompt is served by one engine alone"
    if not decodes:
        return "no decode engine can be used: every prompt is served by one aggregated engine alone"
    for prefill in usable:
        if any(
            decode.spec.takes_from(prefill.spec) and prefill_and_decode(prefill, decode) is None for decode in decodes
        ):
            return None
    return "no prefill engine that is up can be paired with a decode engine: every prompt is served by one engine alone"


def shortcomings(nodes: Sequence[Node], now: float) -> list[str]:
    """Return what is wrong with single engines although requests are served, a sentence each."""
    found = [f"{node.role.value} {node.url}: {node.down_because}" for node in nodes if node.down_because]
    up = [node for node in nodes if node.down_because is None]
    for node in up:
        name = f"{node.role.value} {node.url}"
        if node.stalled is not None:
            found.append(f"{name}: {node.stalled}")
        elif now < node.open_until and node.excluded_because is not None:
            found.append(f"{name}: {node.excluded_because}: it is excluded for {node.open_until - now:.1f} s")
        elif now < node.open_until:
            found.append(
                f"{name}: failed {node.failures} times in a row, its breaker is open for {node.open_until - now:.1f} s"
            )
        elif node.half_open(now):
            found.append(f"{name}: gets one request at a time until one shows that it serves again")
    return found


def not_paired(nodes: Sequence[Node]) -> list[str]:
    """Return which engines that are up are not paired although the settings pair them, and which ones those leave no partner.

    A sentence each, not one for each pair: `ANY` makes n x n. Looking at all takes milliseconds for a hundred engines.
    """
    found = [
        f"{node.role.value} {node.url} shares work with no engine: sources and pair_within leave it none"
        for node in nodes
        if _is_left_out(node, nodes)
    ]
    nodes = [node for node in nodes if node.down_because is None]
    wrong: dict[Node, dict[Node, str]] = {}
    for prefill in (node for node in nodes if Role.PREFILL in node.uses):
        for decode in (node for node in nodes if Role.DECODE in node.uses):
            if decode is prefill or not decode.spec.takes_from(prefill.spec):
                continue  # the operator wants it so
            if (why := prefill_and_decode(prefill, decode)) is not None:
                wrong.setdefault(prefill, {}).setdefault(decode, why)
                wrong.setdefault(decode, {}).setdefault(prefill, why)
    while wrong:
        worst = max(wrong, key=lambda node: (len(wrong[node]), node.role is not Role.PREFILL))
        others = wrong.pop(worst)
        for other in others:
            del wrong[other][worst]
            if not wrong[other]:
                del wrong[other]
        found += _sentences(worst, others)
    return found


def _is_left_out(node: Node, nodes: Sequence[Node]) -> bool:
    """Return whether an engine could share work with others by their roles, and with none by the settings."""
    has_other = False
    for other in nodes:
        if other is node:
            continue
        for prefill, decode in ((node, other), (other, node)):
            if Role.PREFILL not in prefill.uses or Role.DECODE not in decode.uses:
                continue
            if decode.spec.takes_from(prefill.spec):
                return False
            has_other = True
    return has_other


def _sentences(node: Node, others: Mapping[Node, str]) -> list[str]:
    if Role.ANY not in (node.role, *[other.role for other in others]):
        pairs = [(node, other) if node.role is Role.PREFILL else (other, node) for other in others]
        return [
            f"{prefill.url} and {decode.url} are not paired: {others[decode if node is prefill else prefill]}"
            for prefill, decode in pairs
        ]
    first, why = next(iter(others.items()))
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return [f"{node.url} is not paired with {first.url}{more}: {why}"]
