"""GPUs of a machine, whoever made them: their memory, what runs on them, and how they are linked.
Pure.

`nvidia_gpus` and `amd_gpus` read them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

DEADLINE = 30.0
"""Seconds for a program that lists GPUs: a driver that is not kept loaded takes several, one that
hangs never answers.
"""
MAX_GPUS = 64
IDLE_SHARE = 0.05
"""Of its memory, so much may be in use on a GPU that nobody uses: drivers and displays take some.
More is in use by a process that this machine's container does not show.
"""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that has memory on a GPU. `memory`: bytes, None where it is not known."""

    pid: int
    name: str
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `memory`, `used`: bytes. `divided`: how it is divided, such as MIG, so that engines
    can't use it whole; None: it is not.
    """

    index: int
    uuid: str
    name: str
    memory: int
    used: int
    divided: str | None = None
    processes: tuple[GpuProcess, ...] = ()

    @property
    def in_use(self) -> str | None:
        """By what it is in use, None if by nothing."""
        if self.processes:
            first = max(self.processes, key=lambda one: one.memory or 0)
            size = "" if first.memory is None else f", {gib(first.memory)}"
            more = f" and {len(self.processes) - 1} more" if len(self.processes) > 1 else ""
            return f"process {first.pid} ({first.name}{size}){more}"
        if self.used > IDLE_SHARE * self.memory:
            return f"a process that is not shown here ({gib(self.used)} are taken)"
        return None


Links = Mapping[tuple[int, int], str]
"""How two GPUs are linked, by their indices, the lower one first: NV18, XGMI, PIX, SYS, ..."""


@dataclass(frozen=True, slots=True)
class Vendor:
    """What differs between those who make GPUs. `program`: lists them. `link`: the name of the fast
    link between two of them, `fast`: the kinds of `Links` that are this link.

    `masks`: the variables that name the GPUs that a process sees. An engine gets all of them, and
    `variables`. `sharing`: defaults for an engine that exchanges KV.
    """

    program: str
    link: str
    fast: re.Pattern[str]
    masks: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    sharing: Mapping[str, str] = field(default_factory=dict)

    def is_fast(self, link: str | None) -> bool:
        """Return whether a link is the fast one."""
        return link is not None and self.fast.fullmatch(link) is not None

    def visible(self, env: Mapping[str, str]) -> tuple[str, str] | None:
        """Return the variable that names the GPUs to use, and its text; None if none is set."""
        found = [(name, env[name]) for name in self.masks if name in env]
        # an empty one hides no GPU that another one names
        return next((one for one in found if one[1]), found[0] if found else None)


@dataclass(frozen=True, slots=True)
class Gpus:
    """All of a machine, by ascending index."""

    vendor: Vendor
    listed: Sequence[Gpu] = ()
    links: Links = field(default_factory=dict)


def gib(size: int) -> str:
    """Return a number of bytes for people."""
    return f"{size / (1 << 30):.1f} GiB"
