"""How long pdproxy blocks its event loop: each kind of callback in CPU time, with prompts of 64 KB
at 100 requests per second, or in front of 200 engines without clients.

Usage: callbacks.py [--rate 100] [--seconds 30] [--prompt-bytes 65536] [--stream] [--chat]
       callbacks.py --engines 200 [--ranks 1] [--seconds 30]

Runs the command line of pdproxy on a loop that measures everything it calls: callbacks, steps of
tasks, readers of descriptors, and methods of protocols. The time is the thread's CPU time, so that
other load on the machine does not count. It includes the measurement, about a microsecond each. A
callback inside another (a write that calls back) is part of the outer one. Collections of garbage
have rows of their own: they run in whichever callback allocates the last object before its
threshold, and are part of that callback's time, too. So are the functions named `part: `.

--engines: half of them prefill and half decode, ports of two processes, with the recorded
`/metrics` of a real engine, of so many data-parallel ranks. Each publishes a burst of KV events
each second, and `/metrics`, `/ready` and the admin API's lists are asked for each second.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import importlib
import itertools
import json
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context
from pathlib import Path
from typing import Any, TypeVarTuple

import uvloop
import zmq

import stage
from tests.fakes.kv_index import payload, stored

MAX_ROWS = 40
"""Kinds of callbacks that are shown: those with the longest ones."""
LONG_MS = 2.0
"""Callbacks that take longer are counted."""
WARMUP_REQUESTS = 100
"""Requests before the measurement begins: imports and first connections are not typical."""
WARMUP_S = 15.0
"""The same in seconds, where there are no clients: three scrapes of every engine."""
BURST, BLOCKS = 20, 16
"""Messages of a burst of KV events, and blocks that each of them stores."""
ASKED = ("/metrics", "/ready")
ADMIN_ASKED = ("/admin/v1/engines", "/admin/v1/requests", "/admin/v1/decisions")
PARTS = (
    ("pdproxy.upstream.admin", "read_metrics"),
    ("pdproxy.observe.metrics", "Metrics._series"),
    ("pdproxy.fleet.kv_source", "read_batch"),
)
"""Functions whose own time is shown, by their module and their name there."""
OF_ONE = re.compile(r" *\S*[0-9]\S*")
"""What the name of a task says of one engine or request."""
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
    """The time of every callback in seconds, by name."""

    def __init__(self) -> None:
        self.of: defaultdict[str, list[float]] = defaultdict(list)
        self.inside = False
        self.collecting = 0.0
        gc.callbacks.append(self._collector)

    def _collector(self, phase: str, about: dict[str, int]) -> None:
        now = time.thread_time()
        if phase == "stop":
            name = f"garbage collection, generation {about['generation']}"
            self.of[name].append(now - self.collecting)
        self.collecting = now

    def run(self, call: Callable[..., Any], name: Callable[[], str], *arguments: Any) -> Any:
        """Make a call and record its time."""
        if self.inside:
            return call(*arguments)
        self.inside = True
        known = name()  # a task has no frame any more once it has ended
        began = time.thread_time()
        try:
            return call(*arguments)
        finally:
            spent = time.thread_time() - began
            self.inside = False
            self.of[known].append(spent)

    def time_part(self, module: str, path: str) -> None:
        """Have the time of a function recorded, wherever it is called."""
        *owners, name = path.split(".")
        owner: Any = importlib.import_module(module)
        for one in owners:
            owner = getattr(owner, one)
        plain = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return plain(*arguments)
            finally:
                self.of[f"part: {path}"].append(time.thread_time() - began)

        setattr(owner, name, timed)


TIMES = CallbackTimes()


def _name(callback: Any) -> str:
    if isinstance(callback, functools.partial):
        callback = callback.func
    owner = getattr(callback, "__self__", None)
    if not isinstance(owner, asyncio.Task):
        return str(getattr(callback, "__qualname__", type(callback).__qualname__))
    coroutine: Any = owner.get_coro()
    name = str(getattr(coroutine, "__qualname__", coroutine))
    if name == "RequestResponseCycle.run_asgi":
        name += " of " + str(coroutine.cr_frame.f_locals["self"].scope["path"])
    elif not owner.get_name().startswith("Task-"):
        name = OF_ONE.sub("", owner.get_name())
    return f"task {name}"


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
    """uvloop that measures everything it calls. Its `call_at` calls `call_later`."""

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

    def add_reader(self, fd: Any, callback: Callable[[*_Ts], object], *args: *_Ts) -> None:
        """See `asyncio.AbstractEventLoop`."""
        super().add_reader(fd, _timed(callback), *args)

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
            TIMES.of.clear()

        clearing = asyncio.create_task(clear())
        try:
            return await main
        finally:
            clearing.cancel()

    def run(main: Coroutine[Any, Any, Any], **_: Any) -> Any:
        with asyncio.Runner(loop_factory=TimedLoop) as runner:
            return runner.run(measured(main))

    uvloop.run = run
    for module, path in PARTS:
        TIMES.time_part(module, path)
    from pdproxy.cli.main import main as pdproxy

    sys.argv = ["pdproxy", *arguments]
    try:
        pdproxy()
    finally:
        out.write_text(json.dumps(TIMES.of))


@contextmanager
def measured(peer: stage.Peer, at: stage.Engines) -> Iterator[tuple[str, Callable[[], None]]]:
    """Run pdproxy, and print the times at its end. Yields its URL, and what begins the
    measurement.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times"
        command = peer.cmd.replace("-m pdproxy", f"{stage.HERE / 'callbacks.py'} --inside {out}")

        def begin() -> None:
            out.touch()
            time.sleep(0.2)

        with stage.proxy(stage.Peer(command, peer.ready, env=peer.env), at) as (_, url):
            yield url, begin
        show(json.loads(out.read_text()))


def show(of: dict[str, list[float]]) -> None:
    """Print the table. `of`: seconds by name."""
    rows = [(name, sorted(1000 * one for one in times)) for name, times in of.items()]
    rows.sort(key=lambda row: -row[1][-1])
    print("| callback | count | p50 ms | p99 ms | longest ms | longer than 2 ms |")
    print("|---|---|---|---|---|---|")
    for name, times in rows[:MAX_ROWS]:
        p50, p99 = (times[int(q * len(times))] for q in (0.5, 0.99))
        long = sum(one > LONG_MS for one in times)
        print(f"| {name} | {len(times)} | {p50:.3f} | {p99:.3f} | {times[-1]:.2f} | {long} |")
    whole = sorted(
        one for name, times in rows for one in times if not name.startswith(("part: ", "garbage "))
    )
    p99, p999 = (whole[int(q * len(whole))] for q in (0.99, 0.999))
    print(
        f"\n{len(whole)} callbacks in all: p99 {p99:.3f} ms, p99.9 {p999:.3f} ms, longest "
        f"{whole[-1]:.2f} ms, {sum(one > LONG_MS for one in whole)} longer than {LONG_MS:g} ms, "
        f"{sum(whole) / 1000:.1f} s together"
    )


def under_load(options: argparse.Namespace) -> None:
    """Measure with clients."""
    shape = [
        flag for flag, asked in (("--stream", options.stream), ("--chat", options.chat)) if asked
    ]
    flags = ["--conc", 256, "--rate", options.rate, "--prompt-bytes", options.prompt_bytes, *shape]
    peer = stage.Peer(
        stage.PDPROXY.cmd, "/ready", env={"PDPROXY_OBSERVE__LOG_LEVEL": options.log_level}
    )
    with stage.engines(2, "--chunks", 64, "--itl", 0.02) as at, measured(peer, at) as (url, begin):
        stage.load(url, *flags, "--n", WARMUP_REQUESTS)
        begin()
        found = stage.load(url, *flags, "--n", int(options.rate * options.seconds))
    print(f"{found['ok']} requests in {found['wall_s']} s, failed: {found['errors'] or 'none'}")


class Publishers:
    """Somebody who publishes KV events in place of each engine."""

    def __init__(self, count: int) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 2 * count + 16)
        self.endpoints: list[str] = []
        self._sockets: list[zmq.Socket[bytes]] = []
        for _ in range(count):
            socket = self._context.socket(zmq.PUB)
            socket.bind("tcp://127.0.0.1:*")
            self.endpoints.append(socket.getsockopt_string(zmq.LAST_ENDPOINT))
            self._sockets.append(socket)
        self._numbers = itertools.count()
        self._blocks = itertools.count(step=BLOCKS)

    def burst(self) -> None:
        """Publish a burst from each engine."""
        for _ in range(BURST):
            number = next(self._numbers).to_bytes(8, "big")
            first = next(self._blocks)
            message = payload(stored(*range(first, first + BLOCKS), size=16, medium="GPU"))
            for socket in self._sockets:
                socket.send_multipart((b"", number, message))

    def close(self) -> None:
        """Close all."""
        self._context.destroy(linger=0)


def before_fleet(options: argparse.Namespace) -> None:
    """Measure without clients, in front of many engines."""
    count = options.engines // 2
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        at = stack.enter_context(stage.engines(count, "--ranks", options.ranks, processes=2))
        publishers = Publishers(2 * count)
        stack.callback(publishers.close)
        ports = [*at.prefills, *at.decodes]
        nodes = [
            {
                "url": stage.url(port),
                "role": "prefill" if place < count else "decode",
                "facts": {"kv_events": {"endpoint": endpoint}},
            }
            for place, (port, endpoint) in enumerate(zip(ports, publishers.endpoints, strict=True))
        ]
        (admin,) = stage.free_ports(1)
        settings = {
            "listen": {"admin": f"127.0.0.1:{admin}"},
            "pools": [{"policy": "prefix", "kv_events": {"enabled": True}, "nodes": nodes}],
        }
        file = folder / "fleet.yaml"
        file.write_text(json.dumps(settings))
        command = f"{{python}} -m pdproxy serve --config {file} --port {{port}}"
        peer = stage.Peer(command, "/ready", env={"PDPROXY_OBSERVE__LOG_LEVEL": options.log_level})
        url, begin = stack.enter_context(measured(peer, at))
        pages = [url + one for one in ASKED] + [stage.url(admin) + one for one in ADMIN_ASKED]

        def seconds(number: float) -> None:
            end = time.monotonic() + number
            while (began := time.monotonic()) < end:
                publishers.burst()
                for page in pages:
                    stage.get(page, 10)
                time.sleep(max(0.0, began + 1 - time.monotonic()))

        seconds(WARMUP_S)
        begin()
        seconds(options.seconds)


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["--inside"]:
        inside(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=100.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--engines", type=int, help="how many, without clients")
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks of an engine")
    parser.add_argument("--prompt-bytes", type=int, default=65536)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--log-level", default="info")
    stage.raise_files()
    options = parser.parse_args()
    (before_fleet if options.engines else under_load)(options)


if __name__ == "__main__":
    main()
