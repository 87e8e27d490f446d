"""What was measured: rows of latencies at one rate and arrangement, from a JSON file.

The file's shape is `Measured`. Values are in milliseconds and requests per second; a cell has one
value per run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from pdproxy.kit.regular_file import UnusableFileError, read_regular

Way = Literal["split", "plain", "hybrid"]
"""`split`: a prefill and a decode engine. `plain`: one or two engines, each serves whole requests,
least load first. `hybrid`: split, unless the prefill engine has two legs; then the decode engine
serves the request whole.
"""
COLUMNS = (
    "ttft_p50",
    "ttft_p95",
    "ttft_p99",
    "tpot_p50",
    "tpot_p95",
    "itl_p50",
    "itl_p99",
    "goodput",
    "throughput",
)
MAX_BYTES = 1 << 20


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The load that all rows share."""

    prompt_tokens: int
    """In each prompt; no two prompts share a prefix."""
    output_tokens: int
    seconds: float
    """The time in which all requests of a row arrive: Poisson."""
    ttft_slo_ms: float
    tpot_slo_ms: float

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        for name in self.__struct_fields__:
            if not 0 < getattr(self, name) <= 1e6:
                raise ValueError(
                    f"{name} must be above 0 and at most 1000000, got {getattr(self, name)}"
                )


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One arrangement at one rate."""

    name: str
    way: Way
    rate: float
    """Requests per second for all engines together."""
    engines: int = 2
    max_num_batched_tokens: int | None = None
    """None: the profile's."""
    cells: dict[str, list[float]]
    """By column. Each run has its own value."""

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        if not 0 < self.rate <= 1000:
            raise ValueError(f"rate must be above 0 and at most 1000, got {self.rate}")
        if (
            self.max_num_batched_tokens is not None
            and not 1 <= self.max_num_batched_tokens <= 1 << 20
        ):
            raise ValueError(
                f"max_num_batched_tokens must be 1 to {1 << 20}, got {self.max_num_batched_tokens}"
            )
        if self.engines not in ((1, 2) if self.way == "plain" else (2,)):
            raise ValueError(f"engines must be 2, or 1 of way plain, got {self.engines}")
        for column, values in self.cells.items():
            if column not in COLUMNS:
                raise ValueError(f"cells must be of {', '.join(COLUMNS)}, got {column}")
            if not values or any(value <= 0 for value in values):
                raise ValueError(f"cells of {column} must be above 0, got {values}")


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of measurements."""

    source: str
    """What was measured how, and when."""
    load: Load
    rows: list[Row]


def read(path: Path) -> Measured:
    """Read a file.

    Raises:
        ValueError: it can't be used; one line that names it.
    """
    try:
        content = read_regular(path, MAX_BYTES)
    except UnusableFileError as error:
        raise ValueError(f"{path}: {error}") from None
    try:
        return msgspec.json.decode(content, type=Measured)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
