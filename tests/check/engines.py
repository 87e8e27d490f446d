"""Simulated engines on free loopback ports, and a check of them in one line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI

from pdproxy.check.facts import CheckFacts as Learned
from pdproxy.check.facts import MachineFacts
from pdproxy.check.findings import Finding
from pdproxy.check.gather import gather
from pdproxy.check.options import CheckOptions
from pdproxy.check.rules import judge
from pdproxy.engine_model.hardware import Hardware
from pdproxy.settings.engines import Role
from pdproxy.settings.load import EngineFlag, Flag, load
from pdproxy.settings.schema import Settings
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.server import SimServer

QUICK = CheckOptions(timeout=30.0, lease_watch=0.1, settle=0.5, poll=0.01)
"""Simulated engines need no time for anything."""


@dataclass
class Checked:
    """What a check came to."""

    learned: Learned
    findings: list[Finding]

    def __getitem__(self, code: str) -> Finding:
        found = [finding for finding in self.findings if finding.code == code]
        assert found, f"no {code} in {self}"
        return found[0]

    def __str__(self) -> str:
        return (
            "\n".join(f"{one.level} {one.code}: {one.says}" for one in self.findings)
            or "nothing found"
        )

    @property
    def codes(self) -> set[str]:
        return {finding.code for finding in self.findings}

    @property
    def bad(self) -> set[str]:
        return {finding.code for finding in self.findings if finding.level != "note"}


@dataclass
class Bench:
    """Starts engines, checks them, ends them."""

    running: list[SimServer] = field(default_factory=list)
    roles: dict[SimServer, Role] = field(default_factory=dict)

    async def start(self, role: Role, **facts: Any) -> SimServer:
        """An engine that is well but for `facts`."""
        well = {
            "enable_prompt_tokens_details": True,
            "handshake_timeout": 20.0,
            "hardware": Hardware(speed=0),
        }
        one = SimServer(SimFacts(role=role, **{**well, **facts}), chance=len(self.running))
        await one.start()
        self.running.append(one)
        self.roles[one] = role
        return one

    def settings(self, *flags: Flag, more: tuple[EngineFlag, ...] = ()) -> Settings:
        """Settings that list all running engines."""
        engines = [EngineFlag(self.roles[one], one.url) for one in self.running]
        return load(None, {}, flags, [*engines, *more])

    async def check(
        self, settings: Settings | None = None, options: CheckOptions = QUICK
    ) -> Checked:
        """Check what runs."""
        learned = await gather(settings or self.settings(), options, MachineFacts())
        return Checked(learned, judge(learned))

    async def stop(self) -> None:
        """End every engine."""
        await asyncio.gather(*(one.stop() for one in self.running))

    @property
    def held(self) -> int:
        """Handles that prefill engines still hold."""
        return sum(len(one.engine.handles) for one in self.running)


@asynccontextmanager
async def listening(app: FastAPI) -> AsyncIterator[str]:
    """Serve an application on a free port; yields its URL."""
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    )
    sock = server.config.bind_socket()
    # `serve` would take the signals of the test run
    task = asyncio.create_task(server._serve([sock]))
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
