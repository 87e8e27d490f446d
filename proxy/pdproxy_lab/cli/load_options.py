"""Options that several commands have: a load's lengths and trace, and the limits of virtual
engines.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from pdproxy.settings.errors import SettingsError
from pdproxy_lab.bench import reading

if TYPE_CHECKING:
    from pdproxy.engine_model.profile import EngineLimits
    from pdproxy_lab.bench.trace import TraceEntry
    from pdproxy_lab.simulate.shape import Shape

T = TypeVar("T")
DEFAULT_PROFILE = "h200-8b"
DEFAULT_BURSTINESS = 0.25


def typed(read: Callable[[str], T]) -> Callable[[str], T]:
    """Return a reader for argparse, which shows the text of its own error alone."""

    def typed(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return typed


def add_lengths(group: argparse._ArgumentGroup) -> None:
    """Add the lengths of prompts and answers."""
    for name, word, default in (("input", "a prompt", 1024), ("output", "an answer", 128)):
        group.add_argument(
            f"--{name}-tokens",
            metavar="N",
            type=typed(reading.lengths),
            help=f"tokens of {word}, or a range A:B (default: {default})",
        )


def add_trace(group: argparse._ArgumentGroup, use_of_rate: str) -> None:
    """Add a trace and which part of it is used. `use_of_rate`: what --rate does to it, for the
    help.
    """
    group.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help=f"JSON lines with timestamp (ms), input_length, output_length and hash_ids, as "
        f"Mooncake's{use_of_rate} "
        "(default: none)",
    )
    group.add_argument(
        "--slice",
        metavar="A:B",
        type=typed(reading.window),
        help="use these seconds of the trace alone (default: all)",
    )
    group.add_argument(
        "--spread",
        action="store_true",
        help="spread requests with equal times evenly until the trace's next time",
    )
    group.add_argument(
        "--max-tokens",
        metavar="N",
        type=typed(reading.whole(2, 10_000_000)),
        help="leave out requests of the file with more tokens in prompt and answer (default: none)",
    )


def add_burstiness(group: argparse._ArgumentGroup) -> None:
    """Add the shape of bursts."""
    group.add_argument(
        "--burstiness",
        metavar="B",
        type=typed(reading.number(0.0, 100.0, "a number")),
        help="shape of the gamma distribution of --arrivals burst: the lower, the more at once; 1 "
        "is poisson "
        f"(default: {DEFAULT_BURSTINESS})",
    )


def mistakes_with_arrivals(arguments: argparse.Namespace) -> list[str]:
    """Return which options of arrivals have no effect."""
    if arguments.burstiness is not None and arguments.arrivals != "burst":
        return ["--burstiness: has no effect without --arrivals burst"]
    return []


def add_scale(group: argparse._ArgumentGroup) -> None:
    """Add the speed of a trace."""
    group.add_argument(
        "--scale",
        metavar="X",
        type=typed(reading.number(0.0, 1e6, "a number")),
        help="how many times faster than in the trace requests come (default: 1)",
    )


def entries_of(arguments: argparse.Namespace) -> list[TraceEntry]:
    """Return the requests of --trace that the options leave."""
    from pdproxy_lab.bench.trace import cut, read_trace, spread

    with as_settings_error("--trace: "):
        entries = cut(read_trace(arguments.trace), *(arguments.slice or (0.0, math.inf)))
        entries = spread(entries) if arguments.spread else entries
        longest = arguments.max_tokens or math.inf
        entries = [
            entry for entry in entries if entry.input_tokens + entry.output_tokens <= longest
        ]
        if not entries:
            raise ValueError("no requests are left of it")
    return entries


def add_profile(group: argparse._ArgumentGroup) -> None:
    """Add what virtual engines are."""
    group.add_argument(
        "--profile",
        metavar="NAME",
        default=DEFAULT_PROFILE,
        help=f"what the engines are: a shipped profile, or a file (default: {DEFAULT_PROFILE})",
    )


def add_engine_limits(group: argparse._ArgumentGroup) -> None:
    """Add vLLM's limits of virtual engines."""
    group.add_argument(
        "--max-num-seqs",
        metavar="N",
        type=typed(reading.whole(1, 1_000_000)),
        help="vLLM's --max-num-seqs (default: the profile's)",
    )
    group.add_argument(
        "--kv-tokens",
        metavar="N",
        type=typed(reading.whole(512, 1_000_000_000)),
        help="tokens whose KV fits into an engine (default: the profile's)",
    )
    group.add_argument(
        "--no-prefix-caching",
        action="store_true",
        help="as vLLM's --no-enable-prefix-caching (default: caching)",
    )


def mistakes_with_trace(arguments: argparse.Namespace, names: tuple[str, ...]) -> list[str]:
    """Return which options have no effect, with or without --trace. `names`: those that need it."""
    if arguments.trace is not None:
        return [
            f"--{name}-tokens: has no effect with --trace"
            for name in ("input", "output")
            if getattr(arguments, f"{name}_tokens") is not None
        ]
    return [
        f"--{name}: has no effect without --trace"
        for name in names
        if getattr(arguments, name.replace("-", "_"))
    ]


def shape_of(arguments: argparse.Namespace, limits: EngineLimits, chunk: int) -> Shape:
    """Return a virtual engine: the profile's, with the options of `add_engine_limits`. `chunk`:
    `--max-num-batched-tokens`.

    Raises:
        ValueError: there can't be such an engine.
    """
    from pdproxy_lab.simulate.shape import Shape

    return Shape(
        max_num_batched_tokens=chunk,
        max_num_seqs=arguments.max_num_seqs or limits.max_num_seqs,
        kv_tokens=arguments.kv_tokens or limits.block_size * limits.num_gpu_blocks,
        block_size=limits.block_size,
        enable_prefix_caching=not arguments.no_prefix_caching,
    )


def opened(path: Path | None, stack: contextlib.ExitStack) -> IO[bytes] | None:
    """Open the file of --json."""
    if path is None:
        return None
    try:
        return stack.enter_context(path.open("wb"))
    except OSError as error:
        raise SettingsError(f"--json: {path.name} can't be written: {error.strerror}") from None


def check_writable(path: Path | None, option: str) -> None:
    """Refuse a file that can't be written before minutes are spent. An existing one keeps its
    content.
    """
    if path is None:
        return
    try:
        existed = path.exists() or path.is_symlink()
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise SettingsError(f"{option}: {path.name} can't be written: {error.strerror}") from None


@contextlib.contextmanager
def as_settings_error(prefix: str) -> Iterator[None]:
    """Report a ValueError as a mistake in the options."""
    try:
        yield
    except ValueError as error:
        raise SettingsError(f"{prefix}{error}") from None
