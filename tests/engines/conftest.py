"""Fixtures: engines that start once per run, and proxies in front of them; a visible warning if
engines are not available.

PDPROXY_REQUIRE_ENGINES=1 turns the skip into a failure; PDPROXY_ENGINES_KEEP=1 keeps the engines
for the next run.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .build import EnginesUnavailable, ensure
from .engine import MODEL, Engine, EngineFailed
from .fleet import COMPLETIONS, Fleet, exchange, keep
from .launcher import Launcher
from .proxy import Proxy

HERE = Path(__file__).resolve().parent
# Faults kill engines, so they come last; the load test needs warm engines.
ORDER = [
    *(
        "test_equality",
        "test_other_routes",
        "test_flags_and_fields",
        "test_reasoning",
        "long_media",
        "test_tokenize",
        "test_keys",
        "test_generated",
        "test_check",
        "test_push",
        "test_kv_events",
        "test_auto",
        "test_clients",
        "test_changes",
        "test_up",
    ),
    *("test_load", "test_reality", "test_faults"),
]
FLAGGED = (
    "--enable-force-include-usage --enable-tokenizer-info-endpoint --enable-server-load-tracking"
)
STORE = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
SKIPPED = pytest.StashKey[str]()
FLEET = pytest.StashKey[Fleet]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put this folder's tests after all others, in ORDER."""

    def rank(item: pytest.Item) -> int:
        return (
            ORDER.index(item.path.stem)
            if item.path.parent == HERE and item.path.stem in ORDER
            else -1
        )

    items.sort(key=rank)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print visibly that the tests with real engines were skipped."""
    if reason := config.stash.get(SKIPPED, None):
        terminalreporter.write_sep("!", "REAL ENGINES SKIPPED", red=True, bold=True)
        terminalreporter.write_line(f"REAL ENGINES SKIPPED: {reason}", red=True, bold=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Attach the logs of the engines and the proxy to a test that failed."""
    report: Any = yield
    if report.failed and item.path.parent == HERE:
        if fleet := item.config.stash.get(FLEET, None):
            for engine in fleet.engines.values():
                report.sections.append((f"engine {engine.name}", engine.tail()))
        for proxy in (
            value for value in getattr(item, "funcargs", {}).values() if isinstance(value, Proxy)
        ):
            report.sections.append(("pdproxy", proxy.tail()))
    return report


@pytest.fixture(scope="session")
def fleet(pytestconfig: pytest.Config) -> Iterator[Fleet]:
    """One plain, two prefill and two decode engines, started (or reused) once."""
    try:
        fleet = Fleet.start()
    except (EnginesUnavailable, EngineFailed) as error:
        if os.environ.get("PDPROXY_REQUIRE_ENGINES") == "1" or isinstance(error, EngineFailed):
            raise
        pytestconfig.stash[SKIPPED] = str(error)
        pytest.skip(f"REAL ENGINES SKIPPED: {error}")
    pytestconfig.stash[FLEET] = fleet
    yield fleet
    fleet.launcher.close()
    if not keep():
        fleet.stop()


@pytest.fixture(scope="session")
def launcher(pytestconfig: pytest.Config) -> Iterator[Launcher]:
    """For tests that start their own engines: the fleet's launcher if there is a fleet, otherwise a
    new one.
    """
    if fleet := pytestconfig.stash.get(FLEET, None):
        yield fleet.launcher
        return
    try:
        launcher = Launcher(ensure())
    except EnginesUnavailable as error:
        if os.environ.get("PDPROXY_REQUIRE_ENGINES") == "1":
            raise
        pytestconfig.stash[SKIPPED] = str(error)
        pytest.skip(f"REAL ENGINES SKIPPED: {error}")
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def plain(pytestconfig: pytest.Config, launcher: Launcher) -> Iterator[Engine]:
    """For tests that start their own pairs: the fleet's plain engine if there is a fleet, otherwise
    a new one.
    """
    if fleet := pytestconfig.stash.get(FLEET, None):
        yield fleet.plain
        return
    engine = Engine.start(launcher, "plain-alone", "plain")
    try:
        engine.wait().post(
            COMPLETIONS, {"model": MODEL, "prompt": "warm up", "max_tokens": 2, "logprobs": 1}
        )
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="session")
def flagged(fleet: Fleet) -> Iterator[Engine]:
    """A decode engine with the flags of vLLM's server that change or add answers, and with a store
    of responses.
    """
    engine = Engine.start(fleet.launcher, "flagged", "decode", flags=FLAGGED, env=STORE)
    try:
        engine.wait().post(
            COMPLETIONS, {"model": MODEL, "prompt": "warm up", "max_tokens": 2, "logprobs": 1}
        )
        exchange(fleet.prefills[0], engine)
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="session")
def proxy_flagged(
    fleet: Fleet, flagged: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    """pdproxy in front of the first prefill engine and the decode engine with flags."""
    proxy = Proxy.start(fleet.prefills[:1], [flagged], tmp_path_factory.mktemp("flagged"))
    yield proxy
    assert proxy.stop() == 0, proxy.tail()


def _serve(fleet: Fleet, pairs: int, folder: Path) -> Iterator[Proxy]:
    proxy = Proxy.start(fleet.prefills[:pairs], fleet.decodes[:pairs], folder)
    yield proxy
    assert proxy.stop() == 0, proxy.tail()


@pytest.fixture(scope="session")
def proxy_1p1d(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """pdproxy in front of the first prefill and the first decode engine."""
    yield from _serve(fleet, 1, tmp_path_factory.mktemp("1p1d"))


@pytest.fixture(scope="session")
def proxy_2p2d(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """pdproxy in front of two prefill and two decode engines."""
    yield from _serve(fleet, 2, tmp_path_factory.mktemp("2p2d"))
