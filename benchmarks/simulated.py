"""Simulated engines with a pdproxy in front of one pair, as processes: for benchmarks without
GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from stage import free_ports

PATIENCE = 60.0
"""Seconds until all must serve."""
_PUSHES = ("cpu",)
"""Connectors whose prefill engine is configured with the decode engine's port."""
_SHARES = ("shared", "kvstore-keys")
"""Connectors whose engines share a folder."""
CONNECTORS = ("nixl", "nixl-push", *_PUSHES, *_SHARES)
"""Those that need nothing but engines and a proxy."""


@dataclass(frozen=True)
class Stage:
    """Where the proxy and a plain engine listen."""

    proxy: str
    plain: str


@contextmanager
def running(*arguments: str, log: IO[bytes] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of pdproxy until the block ends. `log`: a file for what it writes to its error
    stream, None: ours.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "pdproxy", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=log,
        env=environment,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait(urls: Sequence[str], processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all URLs answer with 200, and those of `/ready` with the state `ok`: both engines
    of a pair can be used.

    Raises:
        RuntimeError: one does not, or a process has ended.
    """
    end = time.monotonic() + PATIENCE
    for url in urls:
        while True:
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:
                    if not url.endswith("/ready") or json.load(answer)["state"] == "ok":
                        break
            except (urllib.error.URLError, OSError):
                pass
            ended = [process.args for process in processes if process.poll() is not None]
            if ended or time.monotonic() > end:
                raise RuntimeError(
                    f"{url} does not serve" + (f": {ended[0]!r} has ended" if ended else "")
                )
            time.sleep(0.1)


@contextmanager
def pair(
    connector: str, orders: Sequence[str], flags: Sequence[str]
) -> Iterator[Mapping[str, str]]:
    """Run P, D, and in front of them one proxy per order of the legs (`pools[].dispatch`), until
    the block ends.

    `flags`: of both engines, see `pdproxy sim`. Returns the base URL of each order's proxy. A file
    names the order, since no flag of `pdproxy serve` does.
    """
    prefill, decode, *rest = free_ports(2 + len(orders))
    proxies = dict(zip(orders, rest, strict=True))
    engines = ["--eos-every", "0", "--model", "sim", "--connector", connector, *flags]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        started = [
            ("sim", "--role", "decode", "--port", str(decode), *engines),
            ("sim", "--role", "prefill", "--port", str(prefill), *engines),
        ]
        for order, port in proxies.items():
            file = folder / f"{order}.yaml"
            ledger_engines = "".join(
                f"      - {{url: 'http://127.0.0.1:{at}', role: {role}}}\n"
                for at, role in ((prefill, "prefill"), (decode, "decode"))
            )
            file.write_text(
                f"pools:\n  - connector: {connector}\n    dispatch: {order}\n    nodes:\n"
                f"{ledger_engines}"
            )
            started.append(
                ("serve", "--config", str(file), "--port", str(port), "--log-level", "error")
            )
        processes = [stack.enter_context(running(*arguments)) for arguments in started]
        urls = {order: f"http://127.0.0.1:{port}" for order, port in proxies.items()}
        wait([f"{url}/ready" for url in urls.values()], processes)
        yield urls


@contextmanager
def stage(connector: str, *, speed: float = 1.0) -> Iterator[Stage]:
    """Run P, D, a plain engine and a proxy until the block ends. `speed`: see `pdproxy sim`."""
    prefill, decode, plain, proxy, link = free_ports(5)
    with ExitStack() as stack:
        own: list[str] = []
        if connector in _PUSHES:
            own = ["--cpu-port", str(link), "--no-enable-prefix-caching"]
        if connector in _SHARES:
            own = ["--shared-storage-path", stack.enter_context(TemporaryDirectory())]
        usual = ["--eos-every", "0", "--speed", str(speed), "--model", "sim"]
        pair = [*usual, "--connector", connector, *own]
        pair_urls = ("--prefill", f"127.0.0.1:{prefill}", "--decode", f"127.0.0.1:{decode}")
        started = [
            ("sim", "--role", "decode", "--port", str(decode), *pair),
            ("sim", "--role", "prefill", "--port", str(prefill), *pair),
            ("sim", "--port", str(plain), *usual, "--connector", "none"),
            (
                "serve",
                "--port",
                str(proxy),
                "--connector",
                connector,
                "--log-level",
                "error",
                *pair_urls,
            ),
        ]
        processes = [stack.enter_context(running(*arguments)) for arguments in started]
        made = Stage(f"http://127.0.0.1:{proxy}", f"http://127.0.0.1:{plain}")
        wait([f"{made.plain}/health", f"{made.proxy}/ready"], processes)
        yield made
