"""What became of the blocks of engines' events."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Blocks of events, since the start.

    `stored`, `removed`: entered and taken out. `repeated`: stored ones that were known.
    `unknown_parent`: not entered, for the block before them is not known. `unknown_block`: removed
    ones that were not known, and stored ones without token ids that were not. `odd`: not entered,
    for they have no keys (sizes, ids). `not_counted`: of groups that say nothing about hits.
    `no_space`: not entered, or taken out, for `max_blocks`.
    """

    stored: int = 0
    removed: int = 0
    repeated: int = 0
    unknown_parent: int = 0
    unknown_block: int = 0
    odd: int = 0
    not_counted: int = 0
    no_space: int = 0
