"""Checks of what can't work with several workers yet, and the limits of one of them.

Several workers serve as one only where what they need to know is shared, or is the same for each. The rest is refused: otherwise
it would seem to work, and choose engines by a part of the requests.
"""

from __future__ import annotations

import msgspec

from pdproxy.settings.errors import KeyPath, Mistakes, spell_key
from pdproxy.settings.limits import Limits, least_buffered_bytes
from pdproxy.settings.schema import Pool, Settings

_KEY = ("listen", "workers")


def check_workers(settings: Settings, found: Mistakes) -> None:
    """Refuse what works with one worker only. Mistakes are added to `found`."""
    if settings.listen.workers == 1:
        return
    where = found.source(_KEY)
    usable = not found.within("pools")
    for key, text in refused(settings if usable else msgspec.structs.replace(settings, pools=())):
        found.add(_KEY, f"{spell_key(key)}: {text} works with one worker only{found.source(key) or where}")


def refused(settings: Settings) -> list[tuple[KeyPath, str]]:
    """Return the settings that work with one worker only, and their values."""
    return [one for at, pool in enumerate(settings.pools) for one in _of_pool(("pools", at), pool)]


def _of_pool(key: KeyPath, pool: Pool) -> list[tuple[KeyPath, str]]:
    wrong: list[tuple[KeyPath, str]] = []
    if pool.turns.bidirectional:
        wrong.append(((*key, "turns", "bidirectional"), "true"))
    return wrong


def of_each(limits: Limits, workers: int) -> Limits:
    """Return the limits of one of several workers: what is not shared among them is divided.

    Places, tokens in flight and the queue stay whole: they are shared. Each worker has space for one of the largest bodies and
    answers, so that many workers may hold more than what was set.
    """
    if workers == 1:
        return limits
    return msgspec.structs.replace(
        limits,
        max_connections=-(-limits.max_connections // workers),
        max_buffered_bytes=max(limits.max_buffered_bytes // workers, least_buffered_bytes(limits)),
        max_buffered_answer_bytes=max(limits.max_buffered_answer_bytes // workers, limits.max_answer_bytes),
        body_readers=max(1, limits.body_readers // workers),
        min_retries=-(-limits.min_retries // workers),
    )


def of_worker(settings: Settings, workers: int) -> Settings:
    """Return the settings of one of so many workers, whatever number these settings ask for: that needs a restart."""
    return msgspec.structs.replace(settings, limits=of_each(settings.limits, workers))
