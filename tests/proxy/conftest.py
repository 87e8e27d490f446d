"""The proxy runs on uvloop in production: so do its tests. And authorities for those of TLS."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvloop

from tests.fakes import several
from tests.fakes.one_worker import reason
from tests.fakes.tls import Side

_left_out: Counter[str] = Counter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers, leave out the tests that need one."""
    if several.WORKERS == 1:
        return
    kept: list[pytest.Item] = []
    out: list[pytest.Item] = []
    for item in items:
        why = reason(item.path.name, getattr(item, "originalname", item.name))
        (kept if why is None else out).append(item)
        _left_out[why or ""] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=out)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that has started this one, if pytest runs in several."""
    if hasattr(session.config, "workeroutput"):
        found = {
            "with": sorted(several.ran[True]),
            "without": sorted(several.ran[False]),
            "left_out": dict(_left_out),
        }
        session.config.workeroutput["several"] = found


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what such a process tells. Each has collected all tests."""
    found = getattr(node, "workeroutput", {}).get(
        "several", {"with": [], "without": [], "left_out": {}}
    )
    several.ran[True].update(found["with"])
    several.ran[False].update(found["without"])
    _left_out.update(
        {why: count for why, count in found["left_out"].items() if why not in _left_out}
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which tests have run with several workers, and which not."""
    if several.WORKERS == 1:
        return
    ran = several.ran
    terminalreporter.write_line(
        f"workers: {len(ran[True])} tests had {several.WORKERS}; {len(ran[False] - ran[True])} "
        f"had one, for their settings"
    )
    for why, count in _left_out.items():
        if why:
            terminalreporter.write_line(f"workers: {count} tests are left out: {why}")


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that `pdproxy serve` runs on, but for tests that move the loop's own clock."""
    if item.get_closest_marker("asyncio_loop"):
        return {"asyncio": asyncio.new_event_loop}
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="module")
def authorities() -> tuple[trustme.CA, trustme.CA]:
    return trustme.CA(), trustme.CA()


@pytest.fixture
def ours(authorities: tuple[trustme.CA, trustme.CA], tmp_path: Path) -> Side:
    return Side(authorities[0], tmp_path / "ours")


@pytest.fixture
def theirs(authorities: tuple[trustme.CA, trustme.CA], tmp_path: Path) -> Side:
    return Side(authorities[1], tmp_path / "theirs")
