"""The sections `probes` and `observe`: how often engines are looked at, and what is logged.

Owns names, units, bounds and defaults.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pdproxy.settings.section import AtOnce, Option, Seconds, Section

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


class Probes(Section, frozen=True):
    """How often engines are probed, in seconds."""

    interval: AtOnce[Seconds] = 2.0
    """Between two probes of an engine's health: without traffic, it takes that long until an engine that is down is noticed."""

    scrape_interval: AtOnce[Seconds] = 5.0
    """Between two scrapes of an engine's metrics, which cost it more than a probe."""


class Observe(Section, frozen=True):
    """Logs, and what else an operator may look at."""

    log_level: Annotated[
        AtOnce[LogLevel], Option("lowest level that is written: debug, info, warning, error", "LEVEL", "--log-level")
    ] = "info"
    """Least severe record that is written. No record holds prompts or keys."""

    log_format: Annotated[LogFormat, Option("text, or json: one object per line", "FORMAT", "--log-format")] = "text"
    """`text` for people, `json` for a log collector: one object per line."""

    core_dumps: bool = False
    """Whether the system may write the memory of a process that has crashed to a file, and debuggers may read it."""
