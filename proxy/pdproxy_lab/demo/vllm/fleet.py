"""The demo's real engines: found, started together, with progress messages, ended together.

Owns their processes and the folder of their logs, which is kept where one of them failed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import shutil
import tempfile
from pathlib import Path

import aiohttp

from pdproxy_lab.demo.engines import TrafficPace
from pdproxy_lab.demo.figures import ShownEngine
from pdproxy_lab.demo.options import DemoOptions, Say
from pdproxy_lab.demo.vllm.process import EngineProcess
from pdproxy_lab.up.arrangement import Plan, arrange
from pdproxy_lab.up.command import command
from pdproxy_lab.up.errors import UpError
from pdproxy_lab.up.last_words import last_words
from pdproxy_lab.up.machine import LOOPBACK, Machine, Ports, read_machine
from pdproxy_lab.up.model import Model, read_model
from pdproxy_lab.up.options import UpOptions
from pdproxy_lab.up.tiny import tiny_model
from pdproxy_lab.up.vllm import find_program

GPU_MODEL = "Qwen/Qwen3-0.6B"
"""The model on GPUs without --model: small, and free to download."""
_LOOK_EVERY = 0.5
_PORTS = range(20_000, 31_000)
"""Where ports are looked for, from a random one on: several demos may start at once."""
_LOADS = ("Starting to load model", "Loading weights")


class VllmEngines:
    """vLLM engines, each with its own process group: one per GPU, or all on the CPU."""

    def __init__(self, options: DemoOptions) -> None:
        """Find vLLM's program.

        Raises:
            UpError: there is none.
        """
        self._options = options
        self._program = find_program(options.vllm)
        self.model = options.model or "tiny"
        self.description = (
            f"{options.prefill} prefill and {options.decode} decode engines, real vLLM"
        )
        self.pace = TrafficPace(people=8, pause=1.5)
        self.places: list[ShownEngine] = []
        self._processes: list[EngineProcess] = []
        self._logs: Path | None = None
        self._failed = False

    async def start(self, say: Say) -> None:
        """Start all, and report what is waited for."""
        try:
            async with asyncio.timeout(self._options.wait):
                await self._start(say)
        except TimeoutError:
            self._failed = True
            late = (
                "; ".join(f"{one.name}: {one.log}" for one in self._processes if not one.ended)
                or "none was started"
            )
            raise UpError(
                f"the engines were not ready within {self._options.wait:.0f} s (--wait); logs: "
                f"{late}"
            ) from None
        except UpError:
            self._failed = True
            raise

    async def stop(self, at_once: asyncio.Event) -> None:
        """End all, at the same time."""
        await asyncio.gather(*(one.stop(at_once) for one in self._processes))
        if self._logs is not None and not self._failed:
            shutil.rmtree(self._logs, ignore_errors=True)

    async def _start(self, say: Say) -> None:
        options = self._options
        say(f"looking at {self._program} ...")
        machine = await read_machine(options.vllm, os.environ)
        model = await self._choose(machine, say)
        plan = self._plan(machine, model)
        self._logs = Path(tempfile.mkdtemp(prefix="pdproxy-demo-"))
        for engine in plan.engines:
            role, number = engine.name.rsplit("-", 1)
            place = ShownEngine(number, engine.role, f"http://{LOOPBACK}:{engine.port}")
            line = command(engine, plan, machine.vllm, options.vllm_args, os.environ)
            process = EngineProcess(
                f"{role} {number}",
                line.arguments,
                {**os.environ, **line.environment},
                self._logs / f"{engine.name}.log",
            )
            self.places.append(place)
            self._processes.append(process)
            await process.start()
            on = f"GPU {', '.join(map(str, engine.gpus))}" if engine.gpus else "the CPU"
            say(f"{process.name}: starting on {on}, {place.url}, log {process.log}")
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session:
            await self._all_ready(session, say)

    def _plan(self, machine: Machine, model: Model) -> Plan:
        options = self._options
        wanted = UpOptions(
            model.source,
            arrangement=f"{options.prefill}P{options.decode}D",
            flags=options.vllm_args,
        )
        plan = arrange(machine, model, wanted, Ports(base=random.choice(_PORTS)))
        return dataclasses.replace(plan, events_port=None)  # no policy here asks for KV events

    async def _choose(self, machine: Machine, say: Say) -> Model:
        """Return the model to serve, and report facts about it."""
        options, found = self._options, machine.vllm.found
        if not machine.is_cpu:
            self.model = options.model or GPU_MODEL
            say(
                f"vLLM {found.version} and {len(machine.gpus.listed)} GPUs; serving {self.model} "
                f"(downloaded if it is not here)"
            )
            return self._read(self.model)
        self.pace = TrafficPace(people=3, pause=3.0)
        say("on a CPU all is slow, and NIXL keeps a core busy in each engine, waiting for work")
        if options.model is not None:
            say(
                f"vLLM {found.version} on the CPU; serving {options.model} (downloaded if it is "
                f"not here)"
            )
            return self._read(options.model)
        say(
            f"vLLM {found.version} on the CPU; a tiny model of random weights: its words mean "
            f"nothing"
        )
        return await tiny_model(machine.vllm.python, os.environ, options.wait)

    @staticmethod
    def _read(named: str) -> Model:
        """Return a model that clients know by the name that the user gave."""
        return dataclasses.replace(read_model(named, os.environ), name=named)

    async def _all_ready(self, session: aiohttp.ClientSession, say: Say) -> None:
        waits = [
            asyncio.create_task(_ready(session, process, place, say))
            for process, place in zip(self._processes, self.places, strict=True)
        ]
        try:
            await asyncio.gather(*waits)
        finally:
            for one in waits:
                one.cancel()
            await asyncio.gather(*waits, return_exceptions=True)


async def _ready(
    session: aiohttp.ClientSession, process: EngineProcess, place: ShownEngine, say: Say
) -> None:
    """Return once an engine is healthy; the caller has a deadline."""
    loop = asyncio.get_running_loop()
    begun, loading = loop.time(), False
    while True:
        if process.ended:
            raise UpError(last_words(f"{process.name} died while starting", process.log))
        if not loading and process.said(*_LOADS):
            loading = True
            say(f"{process.name}: loading the model")
        try:
            async with session.get(f"{place.url}/health") as answer:
                if answer.status == 200:
                    say(f"{process.name}: ready after {loop.time() - begun:.0f} s")
                    return
        except (aiohttp.ClientError, TimeoutError):
            pass
        await asyncio.sleep(_LOOK_EVERY)
