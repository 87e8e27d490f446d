"""The report as one HTML file that stands alone: text, tables and plots, no script, nothing from a
network, light and dark as the reader's system.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdproxy_lab.bench import figure as figures
from pdproxy_lab.bench import plots, sweep_report
from pdproxy_lab.bench.compare import table_of
from pdproxy_lab.bench.curves import Curve
from pdproxy_lab.bench.errors import BenchError
from pdproxy_lab.bench.record import Record
from pdproxy_lab.bench.report import cells_of, head_of, remarks, tables_of_parts

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; }
svg { height: auto; max-width: 100%; }
div { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin-bottom: 1rem; }
caption { font-weight: bold; text-align: left; }
th, td { border-bottom: 1px solid #8884; padding: 0.15rem 0.6rem; text-align: right; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for line in lines %}<p>{{ line }}</p>
{% endfor %}
{{ svg | safe }}
{% for caption, rows in tables %}<div><table>
<caption>{{ caption }}</caption>
<thead><tr>{% for cell in rows[0] %}<th scope="col">{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows[1:] %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
{% endfor %}
<h2>Not measured, errors and remarks</h2>
<ul>
{% for note in notes %}<li>{{ note }}</li>
{% else %}<li>none</li>
{% endfor %}</ul>
</body>
</html>
"""


def page_of(records: Sequence[Record], curves: Sequence[Curve], drawn: Any) -> str:
    """Return the page. `curves`: of a sweep, otherwise empty; `drawn`: the figure of the records.

    Raises:
        BenchError: there are too many servers.
    """
    from jinja2 import Environment

    if curves:
        tables = [
            (f"{curve.name}: medians, in req/s and ms", sweep_report.rows_of(curve))
            for curve in curves
        ]
        lines = list(sweep_report.capacities(curves))
        notes = sweep_report.notes_of(curves, records)
    else:
        table = table_of(records)
        tables = [(head_of(table), cells_of(table)), *tables_of_parts(records)]
        lines, notes = [], remarks(records)
    template = Environment(autoescape=True).from_string(_TEMPLATE)
    return template.render(
        title=plots.SWEEP_TITLE if curves else plots.BARS_TITLE,
        lines=lines,
        svg=figures.svg(drawn, "page"),
        tables=tables,
        notes=notes,
    )


def write(page: str, path: Path) -> None:
    """Write the page.

    Raises:
        BenchError: the file can't be written.
    """
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--html: {path.name} can't be written: {error.strerror}") from None
