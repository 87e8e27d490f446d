"""What requests to the admin API may say, and the shapes of its answers."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdproxy.fleet.entries import EngineEntry
from pdproxy.observe.prompt_shares import PoolPrompts
from pdproxy.observe.recent import RecentRequest
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.listen import LogLevel
from pdproxy.settings.section import Section

Silent = Annotated[
    list[int],
    Meta(
        description="of several workers, the numbers of those that have not answered in time: what "
        "they have is missing here"
    ),
]
DrainSeconds = Annotated[float, Meta(ge=0, le=604_800)]


class EngineOrder(ConfiguredEngine, frozen=True):
    """An engine that is to be added: its settings, without those that name files, and its pool."""

    pool: Annotated[
        str | None, Meta(description="the name of its pool, or null where there is one")
    ] = None


class DrainOrder(Section, frozen=True):
    """How an engine is drained."""

    seconds: Annotated[
        DrainSeconds | None,
        Meta(
            description="a number from 0 to 604800 until its requests are ended, or null for "
            "deadlines.engine_drain"
        ),
    ] = None
    keep: Annotated[
        bool,
        Meta(
            description="true: it stays without requests until it is undrained; false: it is "
            "removed "
            "then"
        ),
    ] = True


class LogLevelOrder(Section, frozen=True):
    """The least severe record that is to be written."""

    level: LogLevel


class LevelShown(msgspec.Struct, frozen=True):
    """The least severe record that is written."""

    level: str
    set_by: Annotated[str, Meta(description="settings, or admin: who has set it last")]


class EngineChanged(msgspec.Struct, frozen=True):
    """What was done, and how the engine is now."""

    result: Annotated[
        str,
        Meta(
            description="added, wanted, serving_again, draining, undrained, removing, removed or "
            "not_wanted"
        ),
    ]
    note: Annotated[str, Meta(description="what that means, for people")]
    engine: Annotated[EngineEntry | None, Meta(description="null if it was removed")]


class EngineList(msgspec.Struct, frozen=True):
    """All engines, pool by pool, in the order in which they were added; and how the pools' prompts
    of the last 5 minutes were served.
    """

    engines: list[EngineEntry]
    silent_workers: Silent = []
    prompts: list[PoolPrompts] = []
    scaling: Annotated[
        list[str],
        Meta(description="which engines are missing, or are too many, as /ready says it"),
    ] = []


class RequestList(msgspec.Struct, frozen=True):
    """Up to 256 requests that run, the longest-running first, and the last 256 that have ended, the
    newest first.
    """

    requests: list[RecentRequest]
    silent_workers: Silent = []
