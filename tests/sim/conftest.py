"""Simulated engines behind HTTP, and in virtual time."""

from typing import Any

import pytest

from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.server import SimServer
from tests.sim.engines import Engines
from tests.sim.moments import FAST


@pytest.fixture
async def sim():
    async with SimServer(FAST, chance=7) as made:
        yield made
        assert not made.crashes


@pytest.fixture
async def pair():
    facts: dict[str, Any] = {"hardware": FAST.hardware, "eos_every": 0, "handshake_timeout": 20.0}
    async with (
        SimServer(SimFacts(role="prefill", **facts), chance=1) as p,
        SimServer(SimFacts(role="decode", **facts), chance=2) as d,
    ):
        yield p, d
        assert not p.crashes
        assert not d.crashes


@pytest.fixture
def engines():
    """A cluster in virtual time."""
    return Engines()


@pytest.fixture
def p(engines, request):
    """Its prefill engine, by `facts` of the test's module."""
    return engines.add(request.module.facts("prefill"))


@pytest.fixture
def d(engines, p, request):
    """Its decode engine."""
    return engines.add(request.module.facts("decode"))
