"""Run scripts through a connector scheduler of vLLM and through the simulator, and compare step by
step.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from tests.engines.build import ensure
from tests.schedulers.scripts import BLOCK, Script
from tests.schedulers.simulated import Simulated

HERE = Path(__file__).parent
SCRIPTS = 600
"""Random scripts for each connector."""


def followed(program: str, question: object) -> list[list[dict[str, Any]]]:
    """Have a program of this folder answer a question in the engines' environment.

    Raises:
        EnginesUnavailable: vLLM can't be had on this machine.
    """
    built = ensure()
    command, env = [built.python, HERE / program], os.environ | built.environment()
    done = subprocess.run(
        command, input=json.dumps(question), capture_output=True, text=True, timeout=300, env=env
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: list[list[dict[str, Any]]] = json.loads(done.stdout)
    return answer


class Comparison:
    """One connector. Subclasses name the classes and read vLLM's metadata."""

    connector = ""
    """vLLM's `kv_connector`."""
    program = "real.py"
    """What runs vLLM's class: a file of this folder."""
    scheduler = ""
    """vLLM's class, "module:class"."""
    role = "kv_both"
    """vLLM's `kv_role`."""
    extra: ClassVar[dict[str, Any]] = {}
    """vLLM's `kv_connector_extra_config`."""
    tensor_parallel_size = 1
    silent: Sequence[str] = ()
    """vLLM's methods that would send: their calls are in the metadata under `calls`."""

    def __init__(self, simulated: Callable[[], Simulated]) -> None:
        self._simulated = simulated
        self.leases: dict[str, float] = {}

    def begin(self) -> None:
        """A script begins."""
        self.leases = {}

    def asked(self, meta: dict[str, Any]) -> list[Any] | None:
        """Say what vLLM's metadata of a step have the workers ask other engines for; None: a worker
        dies of it.
        """
        raise NotImplementedError

    def state(self, meta: dict[str, Any], now: float) -> dict[str, Any]:
        """Say what else is to be compared after a step. `leases`: request ids to the seconds that
        are left.
        """
        self.leases |= meta.get("reqs_to_send", {})
        self.leases = {name: end for name, end in self.leases.items() if end > now}
        return {"leases": {name: round(end - now, 3) for name, end in self.leases.items()}}

    def run(self, scripts: Sequence[Script]) -> list[str]:
        """Follow scripts; return the differences, each with its script."""
        found = []
        for script, real in zip(scripts, self._real(scripts), strict=True):
            self.begin()
            theirs = [self._read(step, one) for step, one in zip(script, real, strict=False)]
            cut = next(
                (place + 1 for place, one in enumerate(theirs) if one == {"died": True}),
                len(theirs),
            )
            ours = self._simulated().follow(script)
            if theirs[:cut] != ours:
                place = next(
                    (
                        n
                        for n, (one, other) in enumerate(zip(theirs, ours, strict=False))
                        if one != other
                    ),
                    -1,
                )
                steps = "\n".join(f"  {step}" for step in script[: place + 1])
                died = real[place].get("died", "")
                found.append(
                    f"vLLM      {theirs[place]} {died}\nsimulated {ours[place]}\nafter\n{steps}"
                )
        return found

    def _read(self, step: dict[str, Any], seen: dict[str, Any]) -> dict[str, Any]:
        if "died" in seen:
            return {"died": True}
        if "meta" not in seen:
            return seen
        meta = seen.pop("meta")
        asks = self.asked(meta)
        if asks is None:
            return {"died": True}
        return seen | {"asks": sorted(asks, key=str)} | self.state(meta, step["now"])

    def _real(self, scripts: Sequence[Script]) -> list[list[dict[str, Any]]]:
        question = {
            "connector": self.connector,
            "scheduler": self.scheduler,
            "role": self.role,
            "extra": self.extra,
            "silent": self.silent,
            "tensor_parallel_size": self.tensor_parallel_size,
            "block_size": BLOCK,
            "scripts": scripts,
        }
        return followed(self.program, question)
