"""The options of a demo."""

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
"""The exit code if the demo can't start: a port, a program or a GPU is not available."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The command line of a demo. `seconds`: when it ends by itself; `wait`: seconds until engines
    must be ready.
    """

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
