"""The demo's real engines: found, started together, with progress messages, ended together.

Owns their processes and the folder of their logs, which is kept where one of them failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from pdproxy_lab.demo.engines import TrafficPace, roles
from pdproxy_lab.demo.figures import ShownEngine
from pdproxy_lab.demo.options import DemoError, DemoOptions, Say
from pdproxy_lab.demo.vllm import find
from pdproxy_lab.demo.vllm.flags import LOOPBACK, Model, arguments, environment
from pdproxy_lab.demo.vllm.process import EngineProcess

GPU_MODEL = "Qwen/Qwen3-0.6B"
"""The model on GPUs without --model: small, and free to download."""
_LOOK_EVERY = 0.5
_PORTS = range(20_000, 32_000)
_LOADS = ("Starting to load model", "Loading weights")


class VllmEngines:
    """vLLM engines, each with its own process group: one per GPU, or all on the CPU."""

    def __init__(self, options: DemoOptions) -> None:
        """Find vLLM's program.

        Raises:
            DemoError: there is none.
        """
        self._options = options
        self._program = find.find_program(options.vllm)
        self._python = find.interpreter_of(self._program)
        self._local = options.model is not None and Path(options.model).is_dir()
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
            raise DemoError(
                f"the engines were not ready within {self._options.wait:.0f} s (--wait); logs: "
                f"{late}"
            ) from None
        except DemoError:
            self._failed = True
            raise

    async def stop(self, at_once: asyncio.Event) -> None:
        """End all, at the same time."""
        await asyncio.gather(*(one.stop(at_once) for one in self._processes))
        if self._logs is not None and not self._failed:
            shutil.rmtree(self._logs, ignore_errors=True)

    async def _start(self, say: Say) -> None:
        options = self._options
        wanted = roles(options)
        say(f"looking at {self._program} ...")
        found = await find.look(self._python)
        find.judge(found, self._python, len(wanted))
        model = await self._choose(found, say)
        gpus = find.visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), found.gpus)
        threads = max(1, (os.cpu_count() or 1) // len(wanted))
        self._logs = Path(tempfile.mkdtemp(prefix="pdproxy-demo-"))
        for number, role in enumerate(wanted):
            port, side_port = _free_ports(2)
            place = ShownEngine(
                str(sum(one.role == role for one in self.places)), role, f"http://{LOOPBACK}:{port}"
            )
            command = arguments(
                self._python, model, place, port, cpu=not found.gpus, more=options.vllm_args
            )
            gpu = gpus[number] if found.gpus else None
            process = EngineProcess(
                f"{role} {place.name}",
                command,
                environment(os.environ, model, side_port, gpu=gpu, threads=threads),
                self._logs / f"{role}-{place.name}.log",
            )
            self.places.append(place)
            self._processes.append(process)
            await process.start()
            on = f"GPU {gpu}" if gpu is not None else "the CPU"
            say(f"{process.name}: starting on {on}, {place.url}, log {process.log}")
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session:
            await self._all_ready(session, say)

    async def _choose(self, found: find.FoundVllm, say: Say) -> Model:
        """Return the model to serve, and report facts about it."""
        options = self._options
        if found.gpus:
            self.model = options.model or GPU_MODEL
            say(
                f"vLLM {found.version} sees {found.gpus} GPUs; serving {self.model} (downloaded "
                f"if it is not here)"
            )
            return Model(self.model, self.model)
        self.pace = TrafficPace(people=3, pause=3.0)
        say("on a CPU all is slow, and NIXL keeps a core busy in each engine, waiting for work")
        if options.model is not None:
            say(
                f"vLLM {found.version} on the CPU; serving {options.model} (downloaded if it is "
                f"not here)"
            )
            return Model(options.model, options.model, local=self._local)
        say(
            f"vLLM {found.version} on the CPU; a tiny model of random weights: its words mean "
            f"nothing"
        )
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = await find.make_tiny_model(self._python, home / "pdproxy", options.wait)
        return Model(str(folder), "tiny", local=True)

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
            raise DemoError(
                f"{process.name} died while starting; its log, {process.log}, ends with:\n"
                f"{process.tail()}"
            )
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


def _free_ports(count: int) -> Sequence[int]:
    """Return different loopback ports that were just free, below those that the system gives to
    connections.
    """
    found: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            found.append(port)
        if len(found) == count:
            return found
    raise DemoError(f"{count} ports are not free between {_PORTS.start} and {_PORTS.stop}")
