"""Measures an engine while `up` runs (`--calibrate`): in a minute without requests it is taken out
of use, measured by `pdproxy calibrate`, and given back. Other engines serve what comes meanwhile.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pdproxy.settings.schema import Settings
from pdproxy_lab.up.arrangement import Plan, PlannedEngine
from pdproxy_lab.up.errors import CANT_START, UpError
from pdproxy_lab.up.machine import LOOPBACK
from pdproxy_lab.up.program import run_to_end
from pdproxy_lab.up.running_proxy import RunningProxy
from pdproxy_lab.up.state import Folder
from pdproxy_lab.up.supervised import Say
from pdproxy_lab.up.taken_out import PDPROXY, give_back, take_out

TRIES = 3
"""So often an engine is measured until its profile is good."""
_LOOK = 5.0
_MEASURE, _EXTRA = 300.0, 300.0
"""Seconds of its trials, and for what surrounds them."""


def measured_engine(plan: Plan) -> PlannedEngine:
    """Return the engine that is measured: one that generates, and that others can do without.

    Raises:
        UpError: there is no other engine.
    """
    if len(plan.engines) < 2:
        raise UpError(
            "--calibrate: needs two engines: one is measured while the other serves", CANT_START
        )
    return next(one for one in reversed(plan.engines) if one.role != "prefill")


class Measuring:
    """Does it once. `idle`: seconds without a request before it begins. `changing`: held while
    engines are changed.
    """

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        folder: Folder,
        idle: float,
        changing: asyncio.Lock,
        say: Say,
    ) -> None:
        self._plan = plan
        self._engine = measured_engine(plan)
        self._settings = settings
        self._folder = folder
        self._idle = idle
        self._changing = changing
        self._say = say

    async def run(self, proxy: RunningProxy) -> None:
        """Wait for an idle minute and measure, until it has succeeded or was tried often."""
        name = self._engine.name
        for _ in range(TRIES):
            await self._until_idle(proxy)
            try:
                async with self._changing:
                    await self._measure()
            except UpError as error:
                self._say(f"{name} was not measured: {error}")
                await asyncio.sleep(self._idle)
                continue
            self._say(
                f"{name} was measured: {self._folder.profile}. Use it with --profile, here and for "
                f"`pdproxy plan`"
            )
            return

    async def _until_idle(self, proxy: RunningProxy) -> None:
        while True:
            idle = await proxy.idle()
            if idle >= self._idle:
                return
            await asyncio.sleep(min(_LOOK, self._idle - idle))

    async def _measure(self) -> None:
        url = f"http://{LOOPBACK}:{self._engine.port}"
        self._say(f"no request for {self._idle:g} s: measures {self._engine.name}, others serve")
        await take_out(url, self._folder)
        # where it is cancelled all ends, or the next `up` gives the engine back
        try:
            await self._calibrate(url)
        except UpError:
            await give_back(url, self._folder)
            raise
        await give_back(url, self._folder)

    async def _calibrate(self, url: str) -> None:
        auth = self._settings.auth
        file = self._folder.profile.with_suffix(".new")
        with tempfile.NamedTemporaryFile("w") as key:  # that its owner alone can read
            key.write(auth.engine_api_key or "")
            key.flush()
            path = key.name if auth.engine_api_key else auth.engine_api_key_file
            keys = [] if path is None else ["--api-key-file", str(path)]
            await run_to_end(
                [*self._command(url, file), *keys], _MEASURE + _EXTRA, "pdproxy calibrate"
            )
        file.replace(self._folder.profile)

    def _command(self, url: str, file: Path) -> Sequence[str]:
        plan, engine = self._plan, self._engine
        line = [*PDPROXY, "calibrate", url, "--out", str(file), "--model", plan.model.name]
        line += ["--name", self._folder.profile.stem, "--max-seconds", f"{_MEASURE:g}"]
        for name, value in (
            ("--max-num-batched-tokens", plan.chunks.get(engine.role)),
            ("--max-num-seqs", plan.max_num_seqs),
        ):
            if value is not None:
                line += [name, str(value)]
        return line
