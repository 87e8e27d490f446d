"""The proxy runs on uvloop in production: so do its tests."""

import asyncio
from collections.abc import Callable, Mapping

import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that `pdproxy serve` runs on."""
    return {"uvloop": uvloop.new_event_loop}
