"""The options of a demo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

EngineKind = Literal["sim", "vllm"]

Say = Callable[[str], None]
"""Prints one line, or several, for the user."""

CHUNK = 4096
"""`--max-num-batched-tokens` of engines that are compared: as on the H200s whose measurements are
in docs/evidence/auto-h200.txt.
"""
MAX_COMPARED = 8
"""Engines of a fleet that is compared. More would run too slowly on two cores."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The command line of a demo. `seconds`: when it ends by itself; `wait`: seconds until engines
    must be ready; `plain_chunk`: `--max-num-batched-tokens` of plain engines; `capture`: the folder
    for pictures of the last view.
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
    plain_chunk: int = CHUNK
    capture: Path | None = None

    @property
    def compares(self) -> bool:
        """Whether the same requests also go to as many plain engines."""
        few = self.prefill + self.decode <= MAX_COMPARED
        return self.engine == "sim" and not self.quiet and few
