"""How long pdproxy blocks its event loop: the longest callbacks in CPU time, with prompts of 64 KB
at 100 requests per second.

Usage: callbacks.py [--rate 100] [--seconds 10] [--prompt-bytes 65536] [--stream] [--chat]

Runs the command line of pdproxy on a loop that measures everything it calls: callbacks, steps of
tasks, and methods of protocols. The time is the thread's CPU time, so that other load on the
machine does not count. It includes the measurement, about a microsecond each. A callback inside
another (a write that calls back) is part of the outer one. Time of the garbage collector is shown
separately: it runs in whichever callback allocates the last object before its threshold.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from pathlib import Path
from typing import Any, TypeVarTuple

import uvloop

import stage

MAX_LONGEST = 12
"""Number of longest callbacks that are kept."""
WARMUP_REQUESTS = 100
"""Requests before the measurement begins: imports and first connections are not typical."""
_Ts = TypeVarTuple("_Ts")
METHODS = (
    "connection_made",
    "connection_lost",
    "data_received",
    "eof_received",
    "pause_writing",
    "resume_writing",
)


class CallbackTimes:
    """The time of every callback in seconds, and the longest ones by name."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.longest: list[tuple[float, float, str]] = []
        self.inside = False
        self.collecting = self.collected = 0.0
        gc.callbacks.append(self._collector)

    def _collector(self, phase: str, _: object) -> None:
        now = time.thread_time()
        if phase == "stop":
            self.collected += now - self.collecting
        self.collecting = now

    def run(self, call: Callable[..., Any], name: Callable[[], str], *arguments: Any) -> Any:
        """Make a call and record its time."""
        if self.inside:
            return call(*arguments)
        self.inside = True
        self.collected = 0.0
        began = time.thread_time()
        try:
            return call(*arguments)
        finally:
            spent = time.thread_time() - began
            self.inside = False
            self.times.append(spent)
            if len(self.longest) < MAX_LONGEST or spent > self.longest[-1][0]:
                self.longest = sorted(
                    [*self.longest, (spent, self.collected, name())], reverse=True
                )[:MAX_LONGEST]


TIMES = CallbackTimes()


def _name(callback: Any) -> str:
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return f"task {getattr(owner.get_coro(), '__qualname__', owner)}"
    return str(getattr(callback, "__qualname__", callback))


def _timed(callback: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: TIMES.run(callback, lambda: _name(callback), *arguments)


_classes: dict[type, type] = {}


def _timed_protocol(protocol: Any) -> Any:
    kind = type(protocol)
    if kind not in _classes:

        def method(name: str) -> Callable[..., Any]:
            plain = getattr(kind, name)
            return lambda self, *arguments: TIMES.run(
                plain, lambda: f"{kind.__qualname__}.{name}", self, *arguments
            )

        fields: dict[str, Any] = {name: method(name) for name in METHODS if hasattr(kind, name)}
        _classes[kind] = type(kind.__name__, (kind,), {"__slots__": (), **fields})
    protocol.__class__ = _classes[kind]
    return protocol


class TimedLoop(uvloop.Loop):
    """uvloop that measures everything it calls."""

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """See `asyncio.AbstractEventLoop`."""
        return super().call_soon(_timed(callback), *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """See `asyncio.AbstractEventLoop`."""
        return super().call_later(delay, _timed(callback), *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """See `asyncio.AbstractEventLoop`."""
        return super().call_at(when, _timed(callback), *args, context=context)

    async def create_server(self, protocol_factory: Any, *arguments: Any, **more: Any) -> Any:
        """See `asyncio.AbstractEventLoop`."""
        return await super().create_server(
            lambda: _timed_protocol(protocol_factory()), *arguments, **more
        )

    async def create_connection(self, protocol_factory: Any, *arguments: Any, **more: Any) -> Any:
        """See `asyncio.AbstractEventLoop`."""
        return await super().create_connection(
            lambda: _timed_protocol(protocol_factory()), *arguments, **more
        )


def inside(out: Path, arguments: list[str]) -> None:
    """Run pdproxy on the measuring loop; write the times to `out` at its end. The measurement
    begins when `out` appears.
    """

    async def measured(main: Coroutine[Any, Any, Any]) -> Any:
        async def clear() -> None:
            while not out.exists():
                await asyncio.sleep(0.05)
            TIMES.times.clear()
            TIMES.longest.clear()

        clearing = asyncio.create_task(clear())
        try:
            return await main
        finally:
            clearing.cancel()

    def run(main: Coroutine[Any, Any, Any], **_: Any) -> Any:
        with asyncio.Runner(loop_factory=TimedLoop) as runner:
            return runner.run(measured(main))

    uvloop.run = run
    from pdproxy.cli.main import main as pdproxy

    sys.argv = ["pdproxy", *arguments]
    try:
        pdproxy()
    finally:
        out.write_text(json.dumps({"times": TIMES.times, "longest": TIMES.longest}))


def measure(options: argparse.Namespace) -> None:
    """Run the load and print the times."""
    shape = [
        flag for flag, asked in (("--stream", options.stream), ("--chat", options.chat)) if asked
    ]
    flags = ["--conc", 256, "--rate", options.rate, "--prompt-bytes", options.prompt_bytes, *shape]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times"
        command = stage.PDPROXY.cmd.replace(
            "-m pdproxy", f"{stage.HERE / 'callbacks.py'} --inside {out}"
        )
        peer = stage.Peer(command, "/ready", env={"PDPROXY_OBSERVE__LOG_LEVEL": options.log_level})
        with (
            stage.engines(2, "--chunks", 64, "--itl", 0.02) as at,
            stage.proxy(peer, at) as (_, url),
        ):
            stage.load(url, *flags, "--n", WARMUP_REQUESTS)
            out.touch()
            time.sleep(0.2)
            found = stage.load(url, *flags, "--n", int(options.rate * options.seconds))
        result = json.loads(out.read_text())
    times = sorted(result["times"])
    print(
        f"{found['ok']} requests in {found['wall_s']} s, failed: {found['errors'] or 'none'}; "
        f"{len(times)} callbacks"
    )
    ranks = {f"p{100 * q:g}": times[int(q * len(times))] for q in (0.5, 0.99, 0.999)} | {
        "longest": times[-1]
    }
    print(", ".join(f"{name} {1000 * value:.3f} ms" for name, value in ranks.items()))
    print("\n| CPU ms | garbage collection ms | callback |\n|---|---|---|")
    for spent, collected, name in result["longest"]:
        print(f"| {1000 * spent:.2f} | {1000 * collected:.2f} | {name} |")


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["--inside"]:
        inside(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=100.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--prompt-bytes", type=int, default=65536)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--log-level", default="info")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
