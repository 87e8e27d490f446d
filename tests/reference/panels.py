"""Grafana's dashboards as JSON: panels of queries, in rows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pdproxy.app.gauges import BUILD_INFO
from pdproxy.fleet.gauges import NODE_INFO
from tests.reference.promql import Query, QueryError, Scope

OF_BOARD = Scope({"instance": "$instance", "node": "$engine"}, "$__rate_interval")
"""Queries of dashboards: of the proxies and engines that are chosen at the top."""
TAG = "pdproxy"
_WIDTH, _HEIGHT = 24, 8
"""Columns of Grafana's grid, and lines of a panel."""
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_UNITS = {
    "seconds": "s",
    "bytes": "bytes",
    "bytes per second": "Bps",
    "requests per second": "reqps",
    "ratio": "percentunit",
    "seconds per second": "percentunit",
    "bool": "none",
}
"""Grafana's names for units. All others are written behind the number."""
_NAME = re.compile(r"\{(\w+)\}")


class Kind(Enum):
    """How a panel shows values."""

    LINES = "timeseries"
    STACK = "stack"
    NUMBERS = "stat"
    TABLE = "table"


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `text`: what it shows, and what to make of it. `queries`: each with the legend of
    its series, in which `{label}` stands for a label's value.

    `needs`: the settings without which it shows nothing; empty: every proxy has values for it.
    `width` in columns of the grid.
    """

    title: str
    text: str
    queries: Sequence[tuple[Query, str]]
    kind: Kind = Kind.LINES
    needs: str = ""
    width: int = 8

    @property
    def description(self) -> str:
        """What a reader is told."""
        return f"{self.text} Needs {self.needs}: else it is empty." if self.needs else self.text

    @property
    def unit(self) -> str:
        """The unit of its values, as Grafana writes it."""
        units = {query.unit for query, _ in self.queries}
        if len(units) != 1:
            raise QueryError(f"{self.title}: values of several units: {', '.join(sorted(units))}")
        (unit,) = units
        return _UNITS.get(unit, f"suffix: {unit.replace(' per second', '/s')}")


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard. `name`: of its file, and of its address in Grafana; `rows`: titles with
    panels.
    """

    name: str
    title: str
    text: str
    rows: Sequence[tuple[str, Sequence[Panel]]]

    @property
    def panels(self) -> list[Panel]:
        """All of them."""
        return [panel for _, panels in self.rows for panel in panels]

    def page(self) -> str:
        """Return its file."""
        shown = {
            "uid": f"pdproxy-{self.name}",
            "title": f"pdproxy: {self.title}",
            "description": self.text,
            "tags": [TAG],
            "schemaVersion": 39,
            "editable": True,
            "graphTooltip": 1,
            "time": {"from": "now-1h", "to": "now"},
            "refresh": "30s",
            "links": [_LINKS],
            "templating": {"list": self._variables()},
            "panels": self._placed(),
        }
        return json.dumps(shown, indent=2) + "\n"

    def _variables(self) -> list[dict[str, Any]]:
        found = [_SOURCE, _choice("instance", "Proxy", Scope({}, "").now(BUILD_INFO), "instance")]
        if any("$engine" in query.text for panel in self.panels for query, _ in panel.queries):
            of_proxies = Scope({"instance": "$instance"}, "").now(NODE_INFO)
            of_pools = Scope({"instance": "$instance", "pool": "$pool"}, "").now(NODE_INFO)
            found.append(_choice("pool", "Pool of the engines", of_proxies, "pool"))
            found.append(_choice("engine", "Engine", of_pools, "node"))
        return found

    def _placed(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        line = 0
        for title, panels in self.rows:
            place = {"x": 0, "y": line, "w": _WIDTH, "h": 1}
            row = {"id": len(found) + 1, "type": "row", "title": title, "gridPos": place}
            found.append({**row, "collapsed": False, "panels": []})
            line, column = line + 1, 0
            for panel in panels:
                if column + panel.width > _WIDTH:
                    line, column = line + _HEIGHT, 0
                place = {"x": column, "y": line, "w": panel.width, "h": _HEIGHT}
                found.append({"id": len(found) + 1, "gridPos": place, **_shown(panel)})
                column += panel.width
            line += _HEIGHT
        return found


_LINKS = {
    "type": "dashboards",
    "title": "Other dashboards of pdproxy",
    "tags": [TAG],
    "asDropdown": True,
    "includeVars": True,
    "keepTime": True,
}
_SOURCE = {
    "name": "datasource",
    "label": "Data source",
    "type": "datasource",
    "query": "prometheus",
}


def _choice(name: str, shown: str, series: Query, label: str) -> dict[str, Any]:
    if label not in series.labels:
        raise QueryError(f"{series.text} has no label {label}")
    return {
        "name": name,
        "label": shown,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": f"label_values({series.text}, {label})",
        "refresh": 2,  # whenever the time range changes: engines come and go
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _shown(panel: Panel) -> dict[str, Any]:
    custom: dict[str, Any] = {}
    options: dict[str, Any] = {}
    if panel.kind in (Kind.LINES, Kind.STACK):
        options = {"legend": {"displayMode": "list", "placement": "bottom"}}
        options["tooltip"] = {"mode": "multi", "sort": "desc"}
    if panel.kind is Kind.STACK:
        custom = {"fillOpacity": 30, "stacking": {"mode": "normal"}}
    found: dict[str, Any] = {
        "type": "timeseries" if panel.kind is Kind.STACK else panel.kind.value,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": options,
        "targets": [
            _target(panel, query, legend, chr(ord("A") + number))
            for number, (query, legend) in enumerate(panel.queries)
        ],
    }
    if panel.kind is Kind.TABLE:
        hidden = {"excludeByName": {"Time": True, "Value": True, "__name__": True, "job": True}}
        found["transformations"] = [{"id": "organize", "options": hidden}]
    return found


def _target(panel: Panel, query: Query, legend: str, number: str) -> dict[str, Any]:
    for label in _NAME.findall(legend):
        if label not in query.labels:
            raise QueryError(f"{panel.title}: {query.text} has no label {label} for its legend")
    found = {
        "refId": number,
        "datasource": _DATASOURCE,
        "expr": query.text,
        "legendFormat": _NAME.sub(r"{{\1}}", legend),
    }
    if panel.kind is Kind.TABLE:
        return {**found, "format": "table", "instant": True}
    return found
