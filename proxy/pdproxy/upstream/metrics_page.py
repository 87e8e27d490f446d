"""What an engine's `/metrics` says: about a dozen lines of it are read.

Owns the names (vLLM 0.32.0) and the limits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pdproxy.kit.errors import EngineError
from pdproxy.upstream.metrics_lines import lines_of, read_line

MAX_PAGE = 8 << 20
"""Bytes of a page. An engine's has 60 KB, and each data-parallel rank adds as much."""
MAX_SAMPLES = 512
"""Lines of a page that are read. A rank has 12 to 14 of them."""
MAX_LINES_BYTES = 64 << 10
"""Bytes of the lines that are read: one of 1000 with all settings of the KV cache, and others of
100.
"""


@dataclass(frozen=True, slots=True)
class Scrape:
    """The values of an engine's `/metrics` (names of vLLM 0.32.0). Token counts are since the
    engine's start.

    `waiting`: requests that are not running yet, those that wait for KV included; None if the
    engine does not report it. `by_source`: prompt tokens by the source of their KV; empty if the
    engine does not report it.
    """

    started: float
    block_size: int | None
    running: float
    waiting: float | None
    kv_usage: float
    by_source: Mapping[str, float]
    kv_blocks: int | None = None
    """KV blocks of one rank."""
    caches_prefixes: bool = False
    """Whether a prompt that comes again finds its KV: it says that its prefix cache is on, and each
    data-parallel rank would have one of its own.
    """
    queued: float | None = None
    """Those of `waiting` that wait for a place, and not for KV; None if the engine does not report
    it.
    """
    asleep: str | None = None
    """How it sleeps, in words; None: it is awake, or does not report it."""
    expired: float | None = None
    """KV handles whose lease has ended before a decode engine had read the KV; None if the engine
    does not report it.
    """
    progress: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Values that change as a core works, by the rank that it is of ("" where lines name none);
    empty if it reports none. Only the core's own reports change them, so that those of a core that
    stands still do not.
    """


NO_METRICS = Scrape(0.0, None, 0.0, None, 0.0, {})
"""The values of an engine without metrics."""


def names_in(page: bytes, beginnings: Iterable[str]) -> frozenset[str]:
    """Return those beginnings of names that a metric of a page has, whether it has values yet or
    not.
    """
    text = b"\n" + page
    return frozenset(
        name
        for name in beginnings
        if any(start + name.encode() in text for start in (b"\n", b"\n# TYPE "))
    )


def read_metrics(page: bytes) -> Scrape:
    """Read the Prometheus text of an engine; raise EngineError if the lines that are read are
    invalid.

    A page is 60 KB, of which a dozen lines are read, and a fleet has hundreds of pages. So only
    these lines are parsed.
    """
    found: dict[bytes, list[tuple[dict[str, str], float]]] = {}
    size = 0
    try:
        for name, lines in lines_of(page, _READ, MAX_SAMPLES).items():
            if name in _SINGLE:
                del lines[:-1]
            size += sum(map(len, lines))
            if size > MAX_LINES_BYTES:
                raise ValueError(f"more than {MAX_LINES_BYTES} bytes in the lines that are read")
            found[name] = [read_line(line) for line in lines]
    except ValueError as error:
        raise EngineError(f"/metrics has {error}") from None
    by_source: dict[str, float] = {}
    for labels, value in found[_BY_SOURCE]:
        source = labels.get("source", "")
        by_source[source] = by_source.get(source, 0.0) + value
    progress: dict[str, tuple[float, ...]] = {}
    for name in _PROGRESS:
        for labels, value in found[name]:
            rank = labels.get("engine", "")
            progress[rank] = (*progress.get(rank, ()), value)
    queued = [value for labels, value in found[_BY_REASON] if labels.get("reason") == "capacity"]
    cache = next((labels for labels, _ in found[_CACHE]), {})
    block_size, kv_blocks = cache.get("block_size", ""), cache.get("num_gpu_blocks", "")
    return Scrape(
        started=next((value for _, value in found[_STARTED]), 0.0),
        block_size=int(block_size) if _SIZE.fullmatch(block_size) else None,
        running=sum(value for _, value in found[_RUNNING]),
        waiting=sum(value for _, value in found[_WAITING]) if found[_WAITING] else None,
        kv_usage=max((value for _, value in found[_USAGE]), default=0.0),
        by_source=by_source,
        queued=sum(queued) if queued else None,
        kv_blocks=int(kv_blocks) if _SIZE.fullmatch(kv_blocks) else None,
        caches_prefixes=cache.get("enable_prefix_caching") == "True" and len(progress) < 2,
        asleep=_asleep(found[_SLEEP]),
        expired=sum(value for _, value in found[_EXPIRED]) if found[_EXPIRED] else None,
        progress=progress,
    )


_SIZE = re.compile(r"[0-9]{1,9}", re.ASCII)
_READ = (
    _STARTED := b"process_start_time_seconds",
    _RUNNING := b"vllm:num_requests_running",
    _WAITING := b"vllm:num_requests_waiting",
    _BY_REASON := b"vllm:num_requests_waiting_by_reason",
    _USAGE := b"vllm:kv_cache_usage_perc",
    _BY_SOURCE := b"vllm:prompt_tokens_by_source_total",
    _GENERATED := b"vllm:generation_tokens_total",
    _CACHE := b"vllm:cache_config_info",
    _SLEEP := b"vllm:engine_sleep_state",
    _EXPIRED := b"vllm:nixl_num_kv_expired_reqs_total",
)
_PROGRESS = (_GENERATED, _BY_SOURCE, _USAGE, _RUNNING, _WAITING)
_SINGLE = (_STARTED, _CACHE)
"""Metrics with one value: the last line counts."""


_LEVELS = {"weights_offloaded": "level 1", "discard_all": "level 2"}
"""Labels of the metric of sleep, and what an operator calls that."""


def _asleep(samples: Iterable[tuple[Mapping[str, str], float]]) -> str | None:
    """Return how an engine sleeps, None if all its ranks are awake."""
    states = [(labels.get("sleep_state", ""), value) for labels, value in samples]
    if all(value for state, value in states if state == "awake"):
        return None
    level = next(
        (_LEVELS[state] for state, value in states if value and state in _LEVELS),
        "its level is not known",
    )
    return f"it sleeps ({level}): vllm:engine_sleep_state"
