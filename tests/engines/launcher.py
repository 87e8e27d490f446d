"""Starts the fork server process (fork_server.py) for the first engine, and orders engines from
it.
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .build import Built

ENVIRONMENT = {
    "PYTHONFAULTHANDLER": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "UCX_TLS": "tcp,sm,self",
    "UCX_NET_DEVICES": "lo",
    # With 0 the worker may run in the engine core (`uni`): one process less to start, no queue
    # between the two.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


class ForkServerFailed(Exception):  # noqa: N818 - reads as what it reports
    """vLLM can't be imported; the message ends with Python's output."""


class Launcher:
    """Owns the fork server process, which starts with the first order and ends with `close` (or
    with this process).

    `overlays`: folders of packages that come before the environment's. `env`: additional variables
    for all engines; variables that Python reads at its start work only here.
    """

    def __init__(
        self,
        built: Built,
        overlays: Sequence[Path] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.built = built
        self._fork_server: subprocess.Popen[str] | None = None
        self._env = ENVIRONMENT | built.environment(*overlays) | dict(env or {})
        name = "-".join(["fork-server", *(folder.name for folder in overlays)])
        self._log = built.root / "logs" / f"{name}-{os.getpid()}.log"

    def launch(self, argv: list[str], env: dict[str, str], log: Path) -> int:
        """Start an engine; return its process id, which is also its session id. The first call
        takes 20 to 40 s.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        return self._order({"argv": argv, "env": env, "log": str(log)})

    def close(self) -> None:
        """End the fork server; the engines keep running."""
        if self._fork_server:
            self._fork_server.communicate()
            self._fork_server = None

    def _order(self, order: dict[str, Any]) -> int:
        fork_server = self._fork_server = self._fork_server or self._start()
        assert fork_server.stdin
        fork_server.stdin.write(json.dumps(order) + "\n")
        fork_server.stdin.flush()
        return self._answer(fork_server)

    def _start(self) -> "subprocess.Popen[str]":
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("w") as out:
            fork_server = subprocess.Popen(
                [str(self.built.python), str(Path(__file__).with_name("fork_server.py"))],
                env=os.environ | self._env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                start_new_session=True,  # Ctrl-C is handled by the owner of the engines
            )
        self._answer(fork_server)
        return fork_server

    def _answer(self, fork_server: "subprocess.Popen[str]") -> int:
        assert fork_server.stdout
        if line := fork_server.stdout.readline():
            return json.loads(line)["pid"]
        raise ForkServerFailed(
            f"the fork server exited with {fork_server.wait()}\n"
            f"{self._log.read_text(errors='replace')[-3000:]}"
        )
