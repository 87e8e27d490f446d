"""What a plan chooses between: engines by role, their chunk sizes, and the policy. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from pdproxy.scheduling.ledger_engine import Role
from pdproxy_lab.simulate.shape import Fleet, Shape

ArrangementKind = Literal["plain", "split", "auto"]
STATIC: tuple[ArrangementKind, ArrangementKind] = ("plain", "split")
"""Kinds whose engines keep their roles."""
AUTO = "auto"
"""The policy of engines of role `any`: the placement of this name."""
CHUNKS = (512, 1024, 2048, 4096, 8192)
"""Values of `--max-num-batched-tokens` that are tried by default."""


class Arrangement(msgspec.Struct, frozen=True, kw_only=True):
    """Either all engines plain, or prefill and decode engines, or all of role `any`, for the
    placement `auto`.

    The proxy splits all prompts of a pool that has prefill and decode engines, unless its placement
    decides.

    `chunk`: vLLM's `--max-num-batched-tokens` of plain or decode engines; `prefill_chunk`: of
    prefill engines, 0 without them.
    """

    aggregated: int = 0
    prefill: int = 0
    decode: int = 0
    any: int = 0
    chunk: int
    prefill_chunk: int = 0
    policy: str

    @property
    def engines(self) -> int:
        """All of them."""
        return self.aggregated + self.prefill + self.decode + self.any

    @property
    def kind(self) -> ArrangementKind:
        """Whether its engines are plain, split, or of role `any`."""
        if self.any:
            return "auto"
        return "split" if self.prefill else "plain"

    @property
    def fleet(self) -> Fleet:
        """As `simulate` takes it."""
        return Fleet(
            prefill=self.prefill, decode=self.decode, aggregated=self.aggregated, any=self.any
        )

    def shapes(self, shape: Shape) -> dict[Role, Shape]:
        """Return the engines of each role, which but for the chunk size are as `shape`."""
        other = msgspec.structs.replace(shape, max_num_batched_tokens=self.chunk)
        prefill = msgspec.structs.replace(
            shape, max_num_batched_tokens=self.prefill_chunk or self.chunk
        )
        return {role: prefill if role is Role.PREFILL else other for role in Role}

    @property
    def name(self) -> str:
        """Such as `8 plain`, `5P3D` or `8 any`."""
        if self.any:
            return f"{self.any} any"
        return f"{self.prefill}P{self.decode}D" if self.prefill else f"{self.aggregated} plain"

    @property
    def chunks(self) -> str:
        """The chunk sizes, for a table."""
        return f"P {self.prefill_chunk}, D {self.chunk}" if self.prefill else str(self.chunk)

    @property
    def rank(self) -> tuple[int, int, int, int, str]:
        """The order of arrangements that are equally good: plain ones first, then split ones, then
        those with larger chunks.
        """
        return (self.any, self.prefill, -self.prefill_chunk, -self.chunk, self.policy)


def plain(engines: int, chunk: int, policy: str) -> Arrangement:
    """Return engines that serve requests whole."""
    return Arrangement(aggregated=engines, chunk=chunk, policy=policy)


def split(prefill: int, decode: int, prefill_chunk: int, chunk: int, policy: str) -> Arrangement:
    """Return prefill and decode engines."""
    return Arrangement(
        prefill=prefill, decode=decode, prefill_chunk=prefill_chunk, chunk=chunk, policy=policy
    )


def any_role(engines: int, chunk: int) -> Arrangement:
    """Return engines of role `any`: `auto` decides for each request where it runs."""
    return Arrangement(any=engines, chunk=chunk, policy=AUTO)


def everything(
    engines: int, chunks: Sequence[int], policies: Sequence[str]
) -> Iterator[Arrangement]:
    """Yield all arrangements of so many engines."""
    for policy in policies:
        for chunk in chunks:
            yield plain(engines, chunk, policy)
            for prefill in range(1, engines):
                for prefill_chunk in chunks:
                    yield split(prefill, engines - prefill, prefill_chunk, chunk, policy)
    if engines > 1:
        yield from (any_role(engines, chunk) for chunk in chunks)


def neighbours(
    one: Arrangement, chunks: Sequence[int], policies: Sequence[str]
) -> Iterator[Arrangement]:
    """Yield the arrangements that differ in one thing: the chunk size, an engine of another role,
    the policy.

    Of decode engines only the next chunk size, larger and smaller: they compute one token of each
    prompt. Of engines of role `any` too: `auto` makes the best of each size.
    """
    replace = msgspec.structs.replace
    for policy in policies if one.kind in STATIC else ():
        if policy != one.policy:
            yield replace(one, policy=policy)
    for more in (1, -1):
        if one.prefill and 1 <= one.prefill + more < one.engines:
            yield replace(one, prefill=one.prefill + more, decode=one.decode - more)
    if one.prefill:
        yield from (
            replace(one, prefill_chunk=chunk) for chunk in chunks if chunk != one.prefill_chunk
        )
    if one.kind == "plain":
        yield from (replace(one, chunk=chunk) for chunk in chunks if chunk != one.chunk)
    else:
        place = chunks.index(one.chunk)
        yield from (
            replace(one, chunk=chunks[at]) for at in (place - 1, place + 1) if 0 <= at < len(chunks)
        )
