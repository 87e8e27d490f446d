"""Our end of the nursery: start it when the first engine is wanted, order engines from it."""

import json
import os
import subprocess
from collections.abc import Mapping
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
    # With this off the worker may live in the engine core (`uni`): one process less to start, no queue between the two.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


class NurseryFailed(Exception):  # noqa: N818 - reads as what it reports
    """vLLM can't be imported; the message ends with what Python said."""


class Launcher:
    """Owns the nursery process, which is started at the first order and ends with `close` (or with us).

    `overlay`: a folder of packages ahead of the environment's. `env`: more variables for all engines; those that Python reads
    when it starts take effect here alone.
    """

    def __init__(
        self,
        built: Built,
        overlay: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.built = built
        self._nursery: subprocess.Popen[str] | None = None
        self._env = ENVIRONMENT | dict(env or {})
        name = "nursery"
        if overlay is not None:
            name += f"-{overlay.name}"
            self._env["PYTHONPATH"] = str(overlay)
        self._log = built.root / "logs" / f"{name}-{os.getpid()}.log"

    def launch(self, argv: list[str], env: dict[str, str], log: Path) -> int:
        """Start an engine; its process id, which is its session's id too. The first call takes 20 to 40 s."""
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        return self._order({"argv": argv, "env": env, "log": str(log)})

    def close(self) -> None:
        """Let the nursery end; the engines go on."""
        if self._nursery:
            self._nursery.communicate()
            self._nursery = None

    def _order(self, order: dict[str, Any]) -> int:
        nursery = self._nursery = self._nursery or self._start()
        assert nursery.stdin
        nursery.stdin.write(json.dumps(order) + "\n")
        nursery.stdin.flush()
        return self._answer(nursery)

    def _start(self) -> "subprocess.Popen[str]":
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("w") as out:
            nursery = subprocess.Popen(
                [str(self.built.python), str(Path(__file__).with_name("nursery.py"))],
                env=os.environ | self._env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                start_new_session=True,  # Ctrl-C is for whoever owns the engines
            )
        self._answer(nursery)
        return nursery

    def _answer(self, nursery: "subprocess.Popen[str]") -> int:
        assert nursery.stdout
        if line := nursery.stdout.readline():
            return json.loads(line)["pid"]
        raise NurseryFailed(
            f"the nursery exited with {nursery.wait()}\n{self._log.read_text(errors='replace')[-3000:]}"
        )
