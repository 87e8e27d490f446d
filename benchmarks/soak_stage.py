"""The fleet of a soak: simulated engines, a pair of real ones if wanted, and the proxy, as
processes. `soak.py` runs it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import signal
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import simulated
from pdproxy.workers.scheduler_process import PROCESS_NAME
from stage import free_ports, stat
from tests.engines.build import ensure
from tests.engines.engine import Engine
from tests.engines.launcher import Launcher

MODEL, REAL = "sim", "tiny"
"""The models of the simulated engines and of the real ones."""
SETTINGS: dict[str, Any] = {
    "listen": {"operator_routes": "everywhere"},
    "deadlines": {
        "connect": 1,
        "prefill": 5,
        "first_token": 5,
        "between_tokens": 3,
        "continuation": 5,
        "abandoned_prefill": 3,
        "release": 3,
        "total": 120,
        "engine_drain": 20,
    },
    "probes": {"interval": 1, "scrape_interval": 4},
    "health": {"stalled_after": 4, "canary_timeout": 1},
}
"""Deadlines are 10 to 60 times shorter than the usual ones."""
ROTATED = 10
"""One of so many keys is another one whenever the file of keys is written; clients use the
others.
"""


@dataclass(frozen=True)
class Size:
    """How much there is. `pairs`: of simulated engines; `keys`: of clients; `adapters`: of each
    simulated engine; `real`: whether there is a pair of real engines, too.
    """

    pairs: int = 2
    workers: int = 1
    keys: int = 0
    adapters: int = 0
    real: bool = False


class RealPair:
    """Two real engines, which can be killed and started again."""

    def __init__(self) -> None:
        self._launcher = Launcher(ensure())
        self.engines = {
            "prefill": Engine.start(self._launcher, "soak-p", "prefill"),
            "decode": Engine.start(self._launcher, "soak-d", "decode"),
        }

    def wait(self) -> None:
        """Return when both serve."""
        for engine in self.engines.values():
            engine.wait()

    def start(self, role: str) -> None:
        """Start the engine of a role once more, at its port."""
        old = self.engines[role]
        old.stop(0.0)
        self.engines[role] = Engine.start(
            self._launcher, old.name, "prefill" if role == "prefill" else "decode", old.port
        )

    def close(self) -> None:
        """End both."""
        for engine in self.engines.values():
            engine.stop(0.0)
        self._launcher.close()


@dataclass
class Stage:
    """Where all listen, and what may change. `admin`: the engines' admin ports, each with the first
    letter of its engine's role; `ports`: their own, in the same order. `log`: what the proxy
    writes.
    """

    pid: int
    proxy: int
    judge: int
    admin: tuple[tuple[str, int], ...]
    ports: tuple[int, ...] = ()
    folder: Path = Path()
    size: Size = Size()
    real: RealPair | None = None
    turn: int = 0
    """How often the settings were written."""
    keys: list[str] = field(default_factory=list)
    """Those that stay valid."""
    asked: int = 0
    """The requests so far."""
    killed_at: float = -math.inf
    """When a worker was killed last, in monotonic seconds."""

    def next_key(self) -> str | None:
        """Return the key of the next request, None if clients need none: each in turn."""
        self.asked += 1
        return self.keys[self.asked % len(self.keys)] if self.keys else None

    @property
    def log(self) -> Path:
        """The file that the proxy logs to."""
        return self.folder / "log"

    def workers(self) -> list[int]:
        """Return the processes that serve clients, the oldest one first."""
        found = []
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        for pid in map(int, children.split()):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() != PROCESS_NAME:
                    found.append((int(stat(pid)[19]), pid))
        return [pid for _, pid in sorted(found)]

    def write(self, without: Collection[int] = ()) -> None:
        """Write the settings and the keys. `without`: the ports of engines that leave."""
        self.turn += 1
        nodes = [
            {
                "url": f"http://127.0.0.1:{port}",
                "role": "prefill" if role == "P" else "decode",
            }
            for (role, _), port in zip(self.admin, self.ports, strict=True)
            if port not in without
        ]
        pools: list[dict[str, Any]] = [{"name": "simulated", "nodes": nodes}]
        if self.real is not None:
            engines = self.real.engines.items()
            pools.append(
                {"name": "real", "nodes": [{"url": n.url, "role": role} for role, n in engines]}
            )
        settings = {**SETTINGS, "pools": pools}
        # A setting that is used at once, and decides nothing here.
        settings["deadlines"] = {**SETTINGS["deadlines"], "total": 120 + self.turn % 2}
        if self.size.keys:
            settings["auth"] = {"api_keys_file": str(self.folder / "keys")}
            names = range(self.size.keys)
            lines = [
                f"client-{n}:key-{n}-{self.turn if n % ROTATED == 0 else 0} inflight=64"
                for n in names
            ]
            self.keys = [f"key-{n}-0" for n in names if n % ROTATED]
            _put(self.folder / "keys", "\n".join(lines))
        _put(self.folder / "settings.yaml", json.dumps(settings))

    def reload(self, without: Collection[int] = ()) -> None:
        """As `write`, and have the proxy read the file at once."""
        self.write(without)
        os.kill(self.pid, signal.SIGHUP)


def _put(file: Path, text: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(text + "\n")
    new.replace(file)


def load_adapters(port: int, count: int) -> int:
    """Load so many adapters at an engine. Return how many of them it did not have."""
    connection, loaded = http.client.HTTPConnection("127.0.0.1", port, timeout=30), 0
    with contextlib.closing(connection):
        for number in range(count):
            body = json.dumps({"lora_name": f"adapter-{number}", "lora_path": "/"})
            connection.request(
                "POST", "/v1/load_lora_adapter", body, {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            answer.read()
            loaded += answer.status == 200
    return loaded


@contextmanager
def stage(seed: int, size: Size) -> Iterator[Stage]:
    """Run the engines, one that is only asked what is right, and the proxy, until the block
    ends.
    """
    roles = ("P",) * size.pairs + ("D",) * size.pairs
    proxy, judge, *rest = free_ports(2 + 2 * len(roles))
    ports, admin = rest[: len(roles)], rest[len(roles) :]
    usual = ["--model", MODEL, "--eos-every", "0", "--profile", "h200-8b"]
    usual += ["--runtime-lora"] if size.adapters else []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        real = None
        if size.real:
            real = RealPair()
            stack.callback(real.close)
        started = [["--port", str(judge), "--connector", "none"]]
        for number, role in enumerate(roles):
            own = ["--role", "prefill" if role == "P" else "decode", "--port", str(ports[number])]
            started.append([*own, "--admin-port", str(admin[number]), "--seed", str(seed + number)])
        processes = [stack.enter_context(simulated.running("sim", *own, *usual)) for own in started]
        simulated.wait([f"http://127.0.0.1:{port}/health" for port in (judge, *ports)], processes)
        for port in (judge, *ports):
            load_adapters(port, size.adapters)
        if real is not None:
            real.wait()
        at = Stage(
            0, proxy, judge, tuple(zip(roles, admin, strict=True)), tuple(ports), folder, size, real
        )
        at.write()
        serve = ["serve", "--config", str(folder / "settings.yaml"), "--port", str(proxy)]
        serve += ["--workers", str(size.workers)]
        log = stack.enter_context(at.log.open("wb"))
        processes.append(stack.enter_context(simulated.running(*serve, log=log)))
        simulated.wait([f"http://127.0.0.1:{proxy}/ready"], processes)
        at.pid = processes[-1].pid
        yield at
