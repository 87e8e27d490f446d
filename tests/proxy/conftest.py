"""The proxy runs on uvloop in production: so do its tests. And authorities for those of TLS."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import trustme
import uvloop

from tests.fakes.tls import Side


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that `pdproxy serve` runs on."""
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
