"""The limits of one of several workers: what is not shared among them is divided."""

from __future__ import annotations

import msgspec

from pdproxy.settings.limits import Limits, least_buffered_bytes
from pdproxy.settings.schema import Settings


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
