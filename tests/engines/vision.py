"""A tiny vision-language model, its launcher, and what its encoder has done."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from .build import Built, ensure_overlay, ensure_vision_model
from .engine import Engine
from .launcher import Launcher

FLAGS = """--limit-mm-per-prompt '{"image": 8, "video": 0}' --enable-logging-iteration-details"""
"""Additional flags for `vllm serve`. The details are `encoded`'s source."""
ENCODED = re.compile(r"encoder inputs: (\d+)")


def vision_launcher(
    built: Built, more: Sequence[Path] = (), env: Mapping[str, str] | None = None
) -> Launcher:
    """Return a launcher whose engines serve the vision-language model. `more`: further overlays;
    `env`: additional variables.

    Raises EnginesUnavailable.
    """
    overlay = ensure_overlay(built, "vision")
    model = ensure_vision_model(built, overlay)
    return Launcher(dataclasses.replace(built, model=model), [overlay, *more], env)


def encoded(engine: Engine) -> int:
    """Return how many pictures the engine's encoder has computed so far, by its log: no metric says
    it.
    """
    text = Path(engine.log).read_text(errors="replace")
    return sum(int(found[1]) for found in ENCODED.finditer(text))
