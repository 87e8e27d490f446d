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
    """Between two probes of an engine's health: without traffic, an engine that is down is noticed after this time."""

    scrape_interval: AtOnce[Seconds] = 5.0
    """Between two readings of an engine's metrics, which cost it more than a probe."""


class Observe(Section, frozen=True):
    """The proxy's own log."""

    log_level: Annotated[
        AtOnce[LogLevel], Option("lowest level that is written: debug, info, warning, error", "LEVEL", "--log-level")
    ] = "info"
    """Lowest level that is written: debug, info, warning or error. No level contains prompts or keys."""

    log_format: Annotated[LogFormat, Option("text, or json: one object per line", "FORMAT", "--log-format")] = "text"
    """text for people, json for a log collector: one object per line."""

    core_dumps: bool = False
    """Whether a process that crashes may leave a core dump, and other processes of the same user may read its memory (debuggers,
    py-spy). Its memory holds keys and prompts."""
