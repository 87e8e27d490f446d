"""Hooks for pytest that show each failure when it happens, and write it to a file if one is named,
with its message.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

REPORT = "PDPROXY_TEST_REPORT"
"""Names the file, to which a line of JSON per failure is added. Without it nothing is written."""
LINES, CHARACTERS = 2, 300


def message(report: pytest.TestReport) -> str:
    """Return the first lines of what failed. A longrepr is a text where a process of xdist has
    died.
    """
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    lines = [line.strip()[:CHARACTERS] for line in text.splitlines() if line.strip()]
    return "\n".join(lines[:LINES])


class Recorder:
    """Records the failures of one run. With `pytest -n` it is the plugin of the process that
    collects all reports.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Show and write a test that failed. A test whose call and teardown both fail has two
        lines.
        """
        if report.failed:
            said = message(report)
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps({"test": report.nodeid, "message": said}) + "\n")
            print(
                f"\nFAILED {report.nodeid} ({report.when}): {said.partition(chr(10))[0]}",
                flush=True,
            )


def install(config: pytest.Config) -> None:
    """Show the failures of this run, and record them if a file is named. Workers of xdist leave
    that to their parent.
    """
    if not hasattr(config, "workerinput"):
        path = os.environ.get(REPORT)
        config.pluginmanager.register(Recorder(Path(path) if path else None))


def recorded(path: Path) -> dict[str, str]:
    """Return the message of each test that failed: its first."""
    found: dict[str, str] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        one = json.loads(line)
        found.setdefault(one["test"], one["message"])
    return found
