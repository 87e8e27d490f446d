"""One real vLLM engine as a process: start it, wait until it is healthy, kill or freeze it, read
its counters, stop it.

An engine is two processes (API server, engine core with its worker) in their own session, so that a
signal reaches all of them and nothing else.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tests.fakes.ports import free_port

from .counters import Counters
from .launcher import Launcher

Role = Literal["plain", "encode", "prefill", "decode"]

MODEL = "tiny"
BLOCK = 32  # tokens per KV block; the CPU attention accepts only multiples of 32
CONTEXT = 2048  # --max-model-len
START_TIMEOUT = 300.0
FATAL = re.compile("fatal|Fatal|died unexpectedly|Segmentation|AssertionError")

FLAGS = (
    f"--served-model-name {MODEL} --host 127.0.0.1 --dtype float32 --enforce-eager "
    f"--max-model-len {CONTEXT} "
    f"--max-num-seqs 16 --block-size {BLOCK} --num-gpu-blocks-override 512 "
    f"--distributed-executor-backend uni "
    "--enable-prompt-tokens-details --enable-auto-tool-choice --tool-call-parser hermes "
    # A model of random weights generates endless whitespace where a grammar allows it.
    """--structured-outputs-config '{"backend": "xgrammar", "disable_any_whitespace": true}'"""
)
KV: dict[Role, dict[str, Any]] = {
    "prefill": {"kv_role": "kv_producer", "kv_connector_extra_config": {"kv_lease_duration": 30}},
    "decode": {"kv_role": "kv_consumer", "kv_load_failure_policy": "fail"},
}


class EngineFailed(Exception):  # noqa: N818 - reads as what it reports
    """An engine died or didn't become healthy in time; the message ends with its log's last
    lines.
    """


@dataclass
class Engine:
    """A started engine. All fields are plain data, so that a later run can reuse it."""

    name: str
    role: Role
    port: int
    pid: int
    log: str
    # the kernel's start time of the process, in ticks: another process may get the same id later
    born: str = ""

    @classmethod
    def start(
        cls,
        launcher: Launcher,
        name: str,
        role: Role,
        port: int = 0,
        flags: str = "",
        kv: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
    ) -> "Engine":
        """Start a process and return at once; `wait` returns when it serves.

        `flags`: additions to FLAGS for `vllm serve`. `kv`: changes to its --kv-transfer-config.
        `env`: additional variables.
        """
        port, side_port = port or free_port(), free_port()
        argv = [
            "--model",
            str(launcher.built.model),
            *shlex.split(f"{FLAGS} {flags}"),
            "--port",
            str(port),
        ]
        if role in KV:
            argv += [
                "--kv-transfer-config",
                json.dumps(
                    {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
                    | KV[role]
                    | (kv or {})
                ),
            ]
        log = launcher.built.root / "logs" / f"{name}.log"
        pid = launcher.launch(
            argv, {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)} | (env or {}), log
        )
        return cls(name, role, port, pid, str(log), _born(pid))

    def dump(self) -> dict[str, Any]:
        """Return the arguments of `Engine(**...)` for attaching to the same processes later."""
        return asdict(self)

    @property
    def url(self) -> str:
        """The engine's base URL without a trailing slash."""
        return f"http://127.0.0.1:{self.port}"

    def wait(self, timeout: float = START_TIMEOUT) -> "Engine":
        """Return when /health answers 200; raise EngineFailed if the process ended or after
        `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not self.healthy():
            if not _alive(self.pid):
                raise EngineFailed(f"{self.name} died while starting\n{self.tail()}")
            if time.monotonic() > deadline:
                raise EngineFailed(
                    f"{self.name} wasn't healthy within {timeout:.0f} s\n{self.tail()}"
                )
            time.sleep(0.3)
        return self

    def healthy(self) -> bool:
        """Return whether /health answers 200 within two seconds."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return answer.status == 200
        except (OSError, urllib.error.URLError):
            return False

    def pids(self) -> list[int]:
        """Return the ids of the engine's running processes: all of the session that `start`
        made.
        """
        if self.born and _born(self.pid) not in {self.born, ""}:
            return []
        found = []
        for entry in os.listdir("/proc"):
            if (
                entry.isdigit()
                and (stat := _stat(int(entry)))
                and stat[0] != "Z"
                and int(stat[3]) == self.pid
            ):
                found.append(int(entry))
        return found

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of the engine's processes, which simulates a lost or frozen host."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Send SIGKILL to all processes: simulates a lost host."""
        self.signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM to the API server only, as a container runtime does."""
        if self.pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def stop(self, grace: float = 20.0) -> None:
        """Send SIGTERM, and after `grace` seconds SIGKILL to the rest."""
        self.signal(signal.SIGCONT)
        self.terminate()
        deadline = time.monotonic() + grace
        while self.pids() and time.monotonic() < deadline:
            _reap(self.pid)
            time.sleep(0.1)
        self.signal(signal.SIGKILL)
        _reap(self.pid)

    def counters(self) -> Counters:
        """Return the engine's current metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            return Counters.parse(answer.read().decode())

    def post(self, path: str, body: dict[str, Any], timeout: float = 180.0) -> dict[str, Any]:
        """POST JSON and return the JSON answer; an HTTP error status raises urllib's HTTPError."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)

    def tail(self, lines: int = 30) -> str:
        """Return the end of the engine's log. The core's fatal error comes first, since many lines
        follow it.
        """
        with contextlib.suppress(OSError):
            text = Path(self.log).read_text(errors="replace").splitlines()
            # lines of scrapes and probes would hide the rest
            text = [line for line in text if '"GET /' not in line]
            fatal = next((at for at, line in enumerate(text) if FATAL.search(line)), -2 * lines)
            shown = text[max(0, fatal - 5) : max(0, fatal + 2 * lines)]
            text = [*shown, *text[max(len(text) - lines, fatal + 2 * lines) :]]
            return f"--- {self.log}\n" + "\n".join(text)
        return f"--- {self.log}: no log"


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the command name: state, parent, group, session,
    ...
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _born(pid: int) -> str:
    """Return a process's start time; empty if there is no such process. Its id is not reused while
    its session lasts.
    """
    stat = _stat(pid)
    return stat[19] if stat else ""


def _alive(pid: int) -> bool:
    _reap(pid)
    stat = _stat(pid)
    return stat is not None and stat[0] != "Z"


def _reap(pid: int) -> None:
    """Collect a child that ended; an engine of another run is not a child of this process."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
