"""Shared by all benchmarks: engines and proxies as processes, their cost from /proc, and the
description of the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import resource
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TICK = os.sysconf("SC_CLK_TCK")
PAGE_KB = os.sysconf("SC_PAGE_SIZE") / 1024

sys.path.insert(1, str(ROOT))  # some benchmarks use parts of `tests`


class NotStartedError(Exception):
    """A process does not serve."""


# -- the cost of a process tree


def stat(pid: int | str) -> list[str]:
    """Return what the kernel says of a process, behind its name: the state comes first.

    Raises:
        OSError: it has ended.
    """
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parents.setdefault(int(stat(entry)[1]), []).append(int(entry))
            except OSError:
                continue
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found


def cpu(pid: int) -> float:
    """Return the CPU seconds of a process tree so far, user and kernel, including ended children
    that were waited for.
    """
    total = 0.0
    for each in tree(pid):
        try:
            total += sum(int(ticks) for ticks in stat(each)[11:15]) / TICK
        except OSError:
            continue
    return total


def rss(pid: int) -> float:
    """Return the resident memory of a process tree in KB."""
    total = 0.0
    for each in tree(pid):
        try:
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * PAGE_KB
        except OSError:
            continue
    return total


# -- processes


PORTS = range(10_000, 12_000)
"""Below the ports that the system gives to connections: a process binds its port seconds after it
was chosen.
"""


def free_ports(count: int) -> list[int]:
    """Return different free ports of the loopback."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) >= count:
            return found
    raise RuntimeError(f"{count} ports are not free between {PORTS.start} and {PORTS.stop}")


def url(port: int) -> str:
    """Return a base URL on the loopback."""
    return f"http://127.0.0.1:{port}"


def any_certificate() -> ssl.SSLContext:
    """Return the context of a client that takes any certificate: it is measured how, not whom it
    reaches.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def get(address: str, seconds: float = 2.0) -> bytes:
    """Return the body that a GET answers."""
    tls = any_certificate() if address.startswith("https:") else None
    with urllib.request.urlopen(address, timeout=seconds, context=tls) as answer:
        return bytes(answer.read())


def wait_for(address: str, process: subprocess.Popen[bytes], seconds: float = 60.0) -> None:
    """Wait until a GET gets a 200. pdproxy's `/ready` must not say `degraded`: one engine of a pair
    could not be used yet.

    Raises:
        NotStartedError: the process has ended, or it took too long.
    """
    end, why = time.monotonic() + seconds, "degraded"
    while process.poll() is None:
        try:
            body = get(address)
        except (OSError, urllib.error.URLError) as error:
            why = str(error)
        else:
            if not (address.endswith("/ready") and b'"degraded"' in body):
                return
            why = "degraded"
        if time.monotonic() > end:
            raise NotStartedError(f"{address}: {why}")
        time.sleep(0.1)
    raise NotStartedError(f"{address}: exit code {process.returncode}")


@contextmanager
def running(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, cores: set[int] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in its own process group; print its output if it fails to start. `cores` pins
    it.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={"PDPROXY_OBSERVE__CORE_DUMPS": "true", **os.environ, **(env or {})},
        )
        if cores is not None:
            os.sched_setaffinity(process.pid, cores)
        try:
            yield process
        except NotStartedError:
            log.seek(0)
            sys.stderr.write(log.read()[-2000:].decode(errors="replace"))
            raise
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
        try:
            process.wait(8)
            return
        except subprocess.TimeoutExpired:
            continue


def script(name: str, *arguments: object) -> list[str]:
    """Return the command that runs a script of this folder."""
    return [sys.executable, str(HERE / name), *map(str, arguments)]


@dataclass(frozen=True)
class Engines:
    """Ports of running mock engines."""

    prefills: tuple[int, ...]
    decodes: tuple[int, ...]

    @property
    def pairs(self) -> list[str]:
        """Flags that make load.py call the engines directly."""
        return [
            part
            for p, d in zip(self.prefills, self.decodes, strict=True)
            for part in ("--direct", url(p), url(d))
        ]

    def split(self) -> float:
        """Return the share (0 to 1) of decode requests so far that had a handle."""
        counts = [json.loads(get(f"{url(port)}/_counts")) for port in self.decodes]
        return float(
            sum(c["decode_with_kv"] for c in counts) / max(1, sum(c["decode"] for c in counts))
        )


@contextmanager
def engines(
    pairs: int, *flags: object, processes: int = 0, cores: set[int] | None = None
) -> Iterator[Engines]:
    """Run `pairs` prefill and as many decode mock engines, one process each, or all in `processes`
    processes.
    """
    ports = free_ports(2 * pairs)
    count = processes or len(ports)
    with ExitStack() as stack:
        for number in range(count):
            mine = ports[number::count]
            process = stack.enter_context(
                running(script("mock_engine.py", *mine, *flags), cores=cores)
            )
            for port in mine:
                wait_for(f"{url(port)}/health", process)
        yield Engines(tuple(ports[:pairs]), tuple(ports[pairs:]))


@dataclass(frozen=True)
class Peer:
    """How a proxy is started (peers.json). `settle`: seconds to wait after it is ready."""

    cmd: str
    ready: str = "/health"
    settle: float = 1.0
    env: dict[str, str] = field(default_factory=dict)

    def command(self, at: Engines, port: int) -> list[str]:
        """Return its command line. {prefills} and {decodes} are all URLs, {p0}, {d1} and so on
        single ports; {folder} is here.
        """
        known: dict[str, object] = {
            "python": sys.executable,
            "folder": HERE,
            "port": port,
            "aux": free_ports(1)[0],
        }
        known |= {f"p{n}": p for n, p in enumerate(at.prefills)} | {
            f"d{n}": p for n, p in enumerate(at.decodes)
        }
        known |= {
            "prefills": " ".join(map(url, at.prefills)),
            "decodes": " ".join(map(url, at.decodes)),
        }
        return shlex.split(self.cmd.format(**known))


PDPROXY = Peer(
    "{python} -m pdproxy serve --prefill {prefills} --decode {decodes} --port {port}", "/ready"
)


@contextmanager
def proxy(
    peer: Peer, at: Engines, *, cores: set[int] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a proxy in front of engines; yield its process and its base URL.

    Raises:
        NotStartedError: the proxy did not become ready.
    """
    (port,) = free_ports(1)
    with running(peer.command(at, port), env=peer.env, cores=cores) as process:
        wait_for(url(port) + peer.ready, process)
        time.sleep(peer.settle)
        yield process, url(port)


def load(*arguments: object, cores: set[int] | None = None) -> dict[str, Any]:
    """Run load.py and return its figures."""
    command = script("load.py", *arguments)
    if cores is not None:
        command = ["taskset", "-c", ",".join(map(str, cores)), *command]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def raise_files() -> None:
    """Raise the limit of open files of this process and its children to the maximum."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# -- the machine


def machine() -> dict[str, Any]:
    """Return a description of this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    versions = {}
    for package in ("uvloop", "httptools", "uvicorn", "msgspec", "aiohttp", "vllm-router"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": versions,
        "commit": commit(),
        "load_average": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def commit() -> str:
    """Return this checkout's commit, and whether there are uncommitted changes."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
        ).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + (
        " with changes" if git("status", "--porcelain", "-uno") else ""
    )
