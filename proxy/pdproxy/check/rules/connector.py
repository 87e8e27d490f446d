"""Rules about connector `auto`: which connector the engines show, or why they show none. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pdproxy.check.facts import CheckFacts
from pdproxy.check.findings import Finding
from pdproxy.transfer.detect import DetectedContract
from pdproxy.transfer.nixl import NIXL


def connector(facts: CheckFacts) -> Iterator[Finding]:
    """No single connector is shown, so the proxy would not start; or it is one whose pairs are not
    tried here.
    """
    shown = facts.connector
    if shown is None:
        return
    without = ("aggregated", "encode")  # which have no part in it
    where = tuple(engine.url for engine in facts.engines if engine.role not in without)
    if isinstance(shown, DetectedContract):
        if shown.contract != NIXL.name:
            yield Finding(
                level="note",
                code="connector_not_tried",
                where=where,
                says=f"the engines' connector is {shown.contract}, and `check` tries pairs of "
                f"{NIXL.name} only: none was tried",
                remedy=f"test the pairs with pdproxy conformance --connector {shown.contract}",
            )
        return
    yield Finding(
        level="error",
        code="connector_unclear",
        where=where,
        says=f"the proxy would not start: {shown.reason}",
        remedy=f"set pools[].connector (--connector) to one of {', '.join(shown.choices)}"
        if shown.choices
        else "start all engines with one connector (--kv-transfer-config), or set "
        "pools[].connector (--connector)",
    )


RULES = (connector,)
