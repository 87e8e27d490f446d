"""A bench of simulated engines for each test."""

from collections.abc import AsyncIterator

import pytest

from tests.check.engines import Bench


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.stop()
