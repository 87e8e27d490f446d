"""What a demo is asked to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

EngineKind = Literal["sim", "vllm"]

Say = Callable[[str], None]
"""Prints one line, or several, for the user."""


class DemoError(Exception):
    """The demo can't run, or has failed. Its text is for the user; `code` is the exit code."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


CANT_START = 2
"""The exit code where the demo can't even begin: a port, a program or a GPU is not to be had."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of a demo. `seconds` after which it ends by itself, `wait` seconds for engines to be ready."""

    engine: EngineKind = "sim"
    prefill: int = 2
    decode: int = 2
    model: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    quiet: bool = False
    seconds: float | None = None
    wait: float = 600.0
    vllm: str = "vllm"
    vllm_args: tuple[str, ...] = ()
    capture: Path | None = None
