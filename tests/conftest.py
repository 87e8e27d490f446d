"""What holds for all tests: no machine's clock judges them, each ends, none changes how the next
one's records are logged, and no simulated engine gets a body that is broken, no client gets what
names engines.
"""

import gc
import logging
import os
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests.failures import ends, recorder
from tests.fakes.bodies import whole_bodies
from tests.fakes.received import nothing_inside

# Each run draws others. Tests that name a number have that.
settings.register_profile(
    "untimed", deadline=None, max_examples=int(os.environ.get("PDPROXY_TEST_EXAMPLES", "50"))
)
settings.load_profile("untimed")

_LOGGERS = [
    logging.getLogger(name)
    for name in (None, "pdproxy", "uvicorn", "uvicorn.access", "uvicorn.error")
]


def pytest_configure(config: pytest.Config) -> None:
    """Prepare what is told of tests that fail and of tests that hang."""
    ends.keep_stderr(config)
    recorder.install(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from searching the modules and the thousands of tests again and
    again while they are made.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Keep it from searching them until the end. A test that has a proxy and engines makes and
    drops objects by the thousand.
    """
    gc.collect()
    gc.freeze()
    # full collections come as often as what was left by the last one demands: a little, from here
    # on
    gc.collect()
    gc.set_threshold(100_000, 10, 20)  # with 10,000 it takes 6 % of such a test's time


@pytest.hookimpl(wrapper=True)
def _ended(item: pytest.Item) -> Generator[None, object, object]:
    """Have a phase of a test end."""
    __tracebackhide__ = True
    ends.arm(item)
    try:
        return (yield)
    except BaseException:
        ends.no_more()
        raise
    finally:
        ends.disarm()


pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = _ended


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(settings: Any) -> Generator[None, object, object]:
    """Have the timeout's signal come more than once."""
    found = yield
    ends.repeat(settings)
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: Any) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show with a test that reached its timeout what its tasks wait for."""
    report = yield
    if call.excinfo is not None and "from pytest-timeout" in str(call.excinfo.value):
        report.sections.append(("Tasks that wait", ends.waiting()))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print visibly that the tests in a browser were skipped."""
    skipped = terminalreporter.stats.get("skipped", ())
    if any(report.nodeid.startswith("tests/browser/") for report in skipped):
        said = "TESTS IN A BROWSER SKIPPED: no Chromium here, see .ci/chromium"
        terminalreporter.write_sep("!", said, red=True, bold=True)


@pytest.fixture(autouse=True)
def _logs_as_they_were() -> Iterator[None]:
    """Commands send log lines to a standard error that is gone after the test."""
    before = [(one.handlers, one.propagate, one.level, one.disabled) for one in _LOGGERS]
    yield
    for one, state in zip(_LOGGERS, before, strict=True):
        one.handlers, one.propagate, one.level, one.disabled = state


@pytest.fixture(autouse=True)
def _whole_bodies(request: pytest.FixtureRequest) -> Iterator[None]:
    """No simulated engine gets a broken body. A test whose client sends such bodies on purpose has
    the mark `broken_bodies`.
    """
    if request.node.get_closest_marker("broken_bodies"):
        yield
        return
    with whole_bodies():
        yield


@pytest.fixture(autouse=True)
def _nothing_inside(request: pytest.FixtureRequest) -> Iterator[None]:
    """No client gets what names engines. A test whose client gets that on purpose has the mark
    `names_engines`.
    """
    if request.node.get_closest_marker("names_engines"):
        yield
        return
    with nothing_inside():
        yield
