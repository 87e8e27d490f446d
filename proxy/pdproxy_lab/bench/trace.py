"""Reads a trace of requests: JSON lines as in Mooncake's public traces.

A line is `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [id,
...]}`. A hash id stands for 512 tokens of the prompt (the last one for what is left), and the same
id for the same tokens with the same tokens before them. Source:
https://github.com/kvcache-ai/Mooncake, FAST25-release/traces.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

BLOCK = 512
"""Tokens that a hash id stands for."""
MAX_LINES = 1_000_000
MAX_LINE = 1 << 20
"""Bytes."""
MAX_FILE = 1 << 30
"""Bytes."""
MAX_TOKENS = 10_000_000
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]


class TraceError(ValueError):
    """What is wrong with a trace, in one line with the number of the trace's line."""


class TraceEntry(msgspec.Struct, frozen=True):
    """A request of a trace: when it came (seconds from the trace's own zero), tokens of prompt and
    answer, and its hash ids.
    """

    time: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None
    """None: nothing is known of its prefix."""


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] | None = None


def read_trace(path: Path) -> list[TraceEntry]:
    """Read a file.

    Raises:
        TraceError: it can't be read, a line is wrong, or it has no or too many lines.
    """
    try:
        with path.open("rb") as file:
            return parse_trace(path.name, file)
    except OSError as error:
        raise TraceError(f"{path.name} can't be read: {error.strerror}") from None


def parse_trace(name: str, lines: BinaryIO) -> list[TraceEntry]:
    """Read a trace. `name` is shown in errors; empty lines are ignored.

    Raises:
        TraceError: a line is wrong or too long, time goes back, or there are no or too many lines.
    """
    decoder = msgspec.json.Decoder(_Line)
    entries: list[TraceEntry] = []
    number, size, last = 0, 0, 0.0
    while line := lines.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise TraceError(f"{name}, line {number}: longer than {MAX_LINE} bytes")
        size += len(line)
        if size > MAX_FILE:
            raise TraceError(f"{name}, line {number}: the trace is larger than {MAX_FILE} bytes")
        if not line.strip():
            continue
        if len(entries) >= MAX_LINES:
            raise TraceError(f"{name}, line {number}: more than {MAX_LINES} requests")
        try:
            entry = decoder.decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise TraceError(f"{name}, line {number}: {' '.join(str(error).split())}") from None
        if entry.timestamp < last:
            raise TraceError(
                f"{name}, line {number}: timestamp {entry.timestamp:g} is before {last:g} of the "
                f"line before"
            )
        if entry.hash_ids is not None and len(entry.hash_ids) != math.ceil(
            entry.input_length / BLOCK
        ):
            raise TraceError(
                f"{name}, line {number}: {entry.input_length} tokens need "
                f"{math.ceil(entry.input_length / BLOCK)} hash_ids of"
                f" {BLOCK}, got {len(entry.hash_ids)}"
            )
        last = entry.timestamp
        entries.append(
            TraceEntry(
                entry.timestamp / 1000, entry.input_length, entry.output_length, entry.hash_ids
            )
        )
    if not entries:
        raise TraceError(f"{name}: no requests")
    return entries


def cut(
    entries: Sequence[TraceEntry], start: float = 0.0, end: float = math.inf
) -> list[TraceEntry]:
    """Return the requests that came from `start` until before `end`, in seconds, with times from
    `start` on.
    """
    return [
        msgspec.structs.replace(entry, time=entry.time - start)
        for entry in entries
        if start <= entry.time < end
    ]


def spread(entries: Sequence[TraceEntry]) -> list[TraceEntry]:
    """Return the requests with equal times spread evenly until the next time of the trace.

    Traces may have rounded times: Mooncake's have steps of 3 s, and a replay of them as they are
    would be bursts that nobody had. Those of the last time are spread over the step before it.
    """
    times = sorted({entry.time for entry in entries})
    steps = {before: after - before for before, after in pairwise(times)}
    if times:
        steps[times[-1]] = steps[times[-2]] if len(times) > 1 else 0.0
    counts = Counter(entry.time for entry in entries)
    seen: Counter[float] = Counter()
    found = []
    for entry in entries:
        late = steps[entry.time] * seen[entry.time] / counts[entry.time]
        seen[entry.time] += 1
        found.append(msgspec.structs.replace(entry, time=entry.time + late))
    return found
