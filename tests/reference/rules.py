"""The file of Prometheus' rules: what is recorded, and the alerts."""

from __future__ import annotations

from typing import Any

import yaml

from tests.reference.alerts import GROUPS, JOB, PAGE, RECORDED, Alert
from tests.reference.markdown import COMMAND

_HEAD = f"""\
# Rules of Prometheus for pdproxy: alerts, and what is recorded for them. The job that scrapes the
# proxies must have the name {JOB}. What each alert means and what to do: {PAGE}
# Made by `{COMMAND}`: edit the code that it is made from.
"""


def page() -> str:
    """Return the file."""
    recorded = [{"record": one.metric.name, "expr": one.query.text} for one in RECORDED]
    groups: list[dict[str, Any]] = [{"name": "pdproxy-recorded", "rules": recorded}]
    for name, alerts in GROUPS.items():
        groups.append({"name": f"pdproxy-{name}", "rules": [_rule(alert) for alert in alerts]})
    return _HEAD + yaml.safe_dump({"groups": groups}, sort_keys=False, width=100)


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.query.text,
        "for": alert.hold,
        "labels": {"severity": alert.severity.value},
        "annotations": {
            "summary": alert.written(alert.summary),
            "description": alert.written(alert.text),
            "runbook": alert.runbook,
        },
    }
