"""What an engine does while it starts, from the lines of its log. Pure.

The words are those of vLLM 0.26 to 0.33; of words that change, a stage is skipped, no more.
"""

from __future__ import annotations

from collections.abc import Iterable

STAGES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("loads the weights", ("Starting to load model", "Loading weights", "Loading safetensors")),
    ("compiles", ("Model loading took", "torch.compile", "Dynamo bytecode transform")),
    ("makes room for KV", ("GPU KV cache size", "KV cache size:", "# GPU blocks")),
    ("warms up", ("Capturing CUDA graphs", "Graph capturing", "Warming up")),
    ("opens its port", ("Application startup complete", "Starting vLLM API server")),
)


def stage_of(lines: Iterable[str], before: int = -1) -> int:
    """Return the place in `STAGES` of the last stage that lines tell of, not before `before`."""
    found = before
    for line in lines:
        for number, (_, words) in enumerate(STAGES):
            if number > found and any(word in line for word in words):
                found = number
    return found
