"""The recipe of docs/internals/contributing.md for a metric: a module declares it and counts it,
for one process and several.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import pdproxy
from tests.fakes.ports import free_port

ROOT = Path(__file__).parents[2]
PACKAGE = Path(pdproxy.__file__).parent
MODULE = "web/body_budget.py"
IMPORTS = """
from pdproxy.observe.description import Label, MergeRule, counter, gauge, histogram
from pdproxy.observe.events import Evicted, Observers
"""
DECLARED = """
HOW = (("whole", "with its peel"), ("part", "a bite"))
EATEN = counter("pdproxy_bananas_eaten_total", "bananas", "Bananas that were eaten", Label("how", HOW))
THROWN = counter("pdproxy_bananas_thrown_total", "bananas", "Bananas that were thrown", of=Evicted, counts=lambda _: [((), 2)])
CHEWED = histogram("pdproxy_banana_seconds", "Seconds that a banana takes", bounds=(1.0, 2.0))
RIPE = gauge("pdproxy_banana_age_seconds", "seconds", "Age of the ripest banana", workers=MergeRule.MOST)
LEFT = gauge("pdproxy_bananas", "bananas", "Bananas that are left", workers=MergeRule.SUM, pools=MergeRule.LEAST)


class BodyBudget:
"""  # noqa: E501
COUNTED = """
        self.held = 0
        observers.count(EATEN, "whole")
        observers.count(CHEWED, by=1.5)
        observers.show(RIPE, lambda: [((), 7)])
        observers.show(LEFT, lambda: [((), 5)])
        observers.show(LEFT, lambda: [((), 3)])
"""
SCRIPT = """
from pdproxy.observe.events import Evicted
from pdproxy.observe.metrics import Metrics
from tests.reference import metrics
one = Metrics()
print(one.page().decode())
one.notify(Evicted("body"))
print("----")
print(one.page().decode())
print("----")
print(metrics.page())
"""


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which the package is a copy with some more metrics, all in one file."""
    folder = tmp_path_factory.mktemp("changed")
    copy = folder / "pdproxy"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
    text = (copy / MODULE).read_text()
    for old, new in (
        ("\nfrom pdproxy.observe.events import Evicted, Observers\n", IMPORTS),
        ("\n\nclass BodyBudget:\n", DECLARED),
        ("\n        self.held = 0\n", COUNTED),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (copy / MODULE).write_text(text)
    path = os.pathsep.join([str(folder), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path}


def samples(page: str) -> dict[str, float]:
    """The numbers of bananas on a page."""
    return {
        sample.name.removeprefix("pdproxy_")
        + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if "banana" in sample.name
    }


def test_a_declaration_is_all_that_a_metric_needs(changed: dict[str, str], tmp_path: Path) -> None:
    """It has its place on both pages, its zeros before anything has happened, and is counted by its
    event.
    """
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=changed,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    before, after, reference = run.stdout.split("----\n")
    assert "# HELP pdproxy_banana_age_seconds Age of the ripest banana" in before
    zeros = dict.fromkeys(
        ("bananas_eaten_total whole", "bananas_eaten_total part", "bananas_thrown_total"), 0.0
    )
    times = {f"banana_seconds_bucket {le}": 0.0 for le in ("1", "2", "+Inf")}
    times |= {"banana_seconds_count": 0.0, "banana_seconds_sum": 0.0}
    assert samples(before) == zeros | times
    assert samples(after) == samples(before) | {"bananas_thrown_total": 2.0}
    rows = [line for line in reference.splitlines() if line.startswith("| `pdproxy_banana")]
    assert rows == [
        "| `pdproxy_banana_age_seconds` |  | gauge, seconds, most | Age of the ripest banana |",
        "| `pdproxy_banana_seconds` |  | histogram | Seconds that a banana takes |",
        "| `pdproxy_bananas` |  | gauge, bananas, sum | Bananas that are left |",
        "| `pdproxy_bananas_eaten_total` | `how` | counter, bananas | Bananas that were eaten |",
        "| `pdproxy_bananas_thrown_total` |  | counter, bananas | Bananas that were thrown |",
    ]
    assert "### pdproxy_bananas_eaten_total\n\n`how`:\n\n- `whole`: " in reference


def test_several_workers_show_it_by_its_rule(changed: dict[str, str], tmp_path: Path) -> None:
    """The proxy as it is served, with two workers and the scheduler process: each has eaten one,
    and has a ripe one of the same age.
    """
    port = free_port()
    flags = [
        "--aggregated",
        f"http://127.0.0.1:{free_port()}",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pdproxy", "serve", *flags, "--workers", "2"],
            env=changed,
            cwd=tmp_path,
            stderr=log,
        )
    try:
        until, page = time.monotonic() + 100, ""
        while not all(
            f"\n{one}\n" in page for one in ("pdproxy_workers 2.0", "pdproxy_scheduler 1.0")
        ):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < until, page
            time.sleep(0.1)
            try:
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{port}/metrics", timeout=10
                ) as answer:
                    page = answer.read().decode()
            except OSError:
                continue  # it does not listen yet
    finally:
        process.terminate()
        process.wait(30)
    found = samples(page)
    assert (found["bananas_eaten_total whole"], found["bananas_eaten_total part"]) == (3.0, 0.0)
    assert (found["banana_seconds_count"], found["banana_seconds_sum"]) == (3.0, 4.5)
    assert found["banana_age_seconds"] == 7.0
    assert found["bananas"] == 9.0, "the least of each process's pools, and the sum of all three"


@pytest.mark.parametrize(
    ("module", "left_out"), [("app.server", "workers"), ("workers.parent", None)]
)
def test_a_process_that_serves_knows_all_metrics(module: str, left_out: str | None) -> None:
    """Whatever the settings turn on: a metric that nobody imported would be missing on the page
    until it is counted. Those of several workers are known to several alone.
    """
    declaration = re.compile(r'\b(?:counter|gauge|histogram)\(\s*"(pdproxy_\w+)"')
    written = [
        name
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != left_out
        for name in declaration.findall(path.read_text())
    ]
    script = f"import pdproxy.{module}; from pdproxy.observe.description import declared\n"
    script += "print(*(one.name for one in declared()))"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True
    )
    assert len(written) > 100
    assert set(written) <= set(run.stdout.split())
