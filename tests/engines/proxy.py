"""`pdproxy serve` as a subprocess, as an operator runs it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fakes.ports import free_port

from .counters import Counters
from .engine import Engine

READY_TIMEOUT = 90.0  # engines answer slowly while others start on the same two cores
STOP_TIMEOUT = 30.0


class ProxyFailed(Exception):  # noqa: N818 - reads as what it reports
    """The proxy ended or didn't become ready; the message ends with its log's last lines."""


@dataclass
class Proxy:
    """A running `pdproxy serve`."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @classmethod
    def start(
        cls,
        prefills: list[Engine],
        decodes: list[Engine],
        folder: Path,
        *,
        settings: dict[str, Any] | None = None,
        config: Path | None = None,
        port: int = 0,
        ready: bool = True,
    ) -> "Proxy":
        """Start it in front of these engines. `settings`: a tree for --config, or `config` its
        file; flags name the nodes.
        """
        port = port or free_port()
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pdproxy.cli.main", "serve", "--port", str(port)]
        for engine in prefills:
            command += ["--prefill", engine.url]
        for engine in decodes:
            command += ["--decode", engine.url]
        if settings:
            config = folder / f"proxy-{port}.yaml"
            config.write_text(json.dumps(settings, indent=1))  # JSON is YAML
        if config is not None:
            command += ["--config", str(config)]
        log = folder / f"proxy-{port}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                env={
                    **{
                        name: value
                        for name, value in os.environ.items()
                        if not name.startswith("PDPROXY_")
                    },
                    "PDPROXY_LISTEN__LINGER": "0",
                },
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        proxy = cls(process, port, log)
        if ready:
            try:
                proxy.wait_ready()
            except BaseException:
                process.kill()
                process.wait()
                raise
        return proxy

    @property
    def url(self) -> str:
        """The proxy's base URL without a trailing slash."""
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self, timeout: float = READY_TIMEOUT) -> None:
        """Return when /ready answers 200."""
        deadline = time.monotonic() + timeout
        while self.ready() != 200:
            if self.process.poll() is not None:
                raise ProxyFailed(
                    f"pdproxy serve exited with {self.process.returncode}\n{self.tail()}"
                )
            if time.monotonic() > deadline:
                raise ProxyFailed(f"pdproxy wasn't ready within {timeout:.0f} s\n{self.tail()}")
            time.sleep(0.1)

    def ready(self) -> int:
        """Return the status of /ready; 0 if nothing listens."""
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def counters(self) -> Counters:
        """Return the proxy's current metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            return Counters.parse(answer.read().decode())

    def stop(self) -> int:
        """Send SIGTERM, as an orchestrator does; return the exit code."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise ProxyFailed(
                f"pdproxy didn't stop within {STOP_TIMEOUT:.0f} s of SIGTERM\n{self.tail()}"
            ) from None

    def tail(self, lines: int = 40) -> str:
        """Return the end of the proxy's log."""
        with contextlib.suppress(OSError):
            return f"--- {self.log}\n" + "\n".join(
                self.log.read_text(errors="replace").splitlines()[-lines:]
            )
        return f"--- {self.log}: no log"
