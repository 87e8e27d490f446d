"""What holds for all tests: no machine's clock judges them, and none changes how the next one's records are logged."""

import gc
import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.failures import recorder

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

_LOGGERS = [logging.getLogger(name) for name in (None, "pdproxy", "uvicorn", "uvicorn.access", "uvicorn.error")]


def pytest_configure(config: pytest.Config) -> None:
    """Prepare what is told of tests that fail."""
    recorder.install(config)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from searching the modules and the thousands of tests, which stay until the end."""
    gc.collect()
    gc.freeze()
    gc.collect()  # full collections come as often as what was left by the last one demands: a little, from here on


@pytest.fixture(autouse=True)
def _logs_as_they_were() -> Iterator[None]:
    """Commands send log lines to a standard error that is gone after the test."""
    before = [(one.handlers, one.propagate, one.level, one.disabled) for one in _LOGGERS]
    yield
    for one, state in zip(_LOGGERS, before, strict=True):
        one.handlers, one.propagate, one.level, one.disabled = state
