"""A machine with an environment that looks like vLLM's, whose engines are simulated, and with GPUs
as `nvidia-smi` shows them.
"""

from __future__ import annotations

import json
import shlex
import sys
import uuid
from pathlib import Path
from typing import Any

CPU = {"version": "0.32.0", "connectors": ["nixl"], "cpu": True}
GPU = {"version": "0.32.0", "connectors": ["nixl"], "cpu": False}


class VllmBox:
    """`orders`: what `vllm_python.py` does."""

    def __init__(self, folder: Path, **orders: Any) -> None:
        self.folder = folder
        # A number of seconds that no other process sleeps: engines and what they start are found by
        # it.
        self.child = f"{600 + uuid.uuid4().int % 10**9 / 10**9:.9f}"
        self.orders = {"look": CPU, "notes": str(folder / "notes"), "child": self.child, **orders}
        for name in ("bin", "notes", "tmp"):
            (folder / name).mkdir()
        python = folder / "bin" / "python"
        fake = Path(__file__).with_name("vllm_python.py")
        _program(python, f'exec {shlex.quote(sys.executable)} {shlex.quote(str(fake))} "$@"')
        self.vllm = folder / "bin" / "vllm"
        self.vllm.write_text(f"#!{python}\n")
        self.vllm.chmod(0o755)

    @property
    def env(self) -> dict[str, str]:
        """The variables of a command on this machine."""
        return {
            "FAKE_VLLM": json.dumps(self.orders),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "TMPDIR": str(self.folder / "tmp"),
        }

    def notes(self, role: str) -> list[dict[str, Any]]:
        """What engines of a role were started with."""
        found = sorted((self.folder / "notes").glob(f"{role}-*"))
        return [json.loads(note.read_text()) for note in found]


def nvidia_smi(folder: Path, listed: str, used: str = "", topo: str = "") -> None:
    """Write a program that prints these texts as nvidia-smi prints its answers."""
    for name, text in (("listed", listed), ("used", used), ("topo", topo)):
        (folder / name).write_text(text)
    files = {name: shlex.quote(str(folder / name)) for name in ("listed", "used", "topo")}
    _program(
        folder / "nvidia-smi",
        'case "$1" in\n'
        f"--query-gpu*) cat {files['listed']};;\n"
        f"--query-compute-apps*) cat {files['used']};;\n"
        f"*) cat {files['topo']};;\n"
        "esac",
    )


def amd_smi(folder: Path, **answers: str) -> None:
    """Write a program that prints these texts as amd-smi prints its answers, by its first word."""
    lines = []
    for word, text in answers.items():
        (folder / word).write_text(text)
        lines.append(f"{word}) cat {shlex.quote(str(folder / word))};;")
    _program(folder / "amd-smi", 'case "$1" in\n' + "\n".join(lines) + "\n*) exit 2;;\nesac")


def _program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
