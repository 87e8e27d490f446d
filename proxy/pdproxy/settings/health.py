"""How engines are watched: the sections `probes`, `health`, `outliers` and `continuations`.

How often engines are looked at; those that stand still, and how one that was out of use is let in
again; those that fail more often, or are slower, than their peers; and what is kept of streams
whose engines fail. Owns names, units, bounds and defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from pdproxy.settings.section import AtOnce, Count, OffOrSeconds, Seconds, Section, Switch

Share = Annotated[float, Meta(gt=0, le=1)]


class Probes(Section, frozen=True):
    """How often engines are probed, in seconds."""

    interval: AtOnce[Seconds] = 2.0
    """Between two probes of an engine's health: without traffic, an engine that is down is noticed
    after this time.
    """

    scrape_interval: AtOnce[Seconds] = 5.0
    """Between two readings of an engine's metrics, which cost it more than a probe."""


class Health(Section, frozen=True):
    """Engines that stand still, and engines that come back. In seconds."""

    stalled_after: Switch[OffOrSeconds] = 10.0
    """An engine counts as standing still if its legs, its metrics and a request for one token show
    no sign for so long, or for as long as it was silent before while it worked, four times over.
    Its legs end then, and others serve what they can; a request under which a second engine stands
    still stays there for up to deadlines.prefill. 0: off.
    """

    canary_timeout: AtOnce[Seconds] = 5.0
    """The answer to a request for one token, by which an engine is asked whether it works."""

    canary_interval: AtOnce[Seconds] = 2.0
    """Between two such requests to an engine that stands still, doubled up to 30."""

    slow_start: AtOnce[OffOrSeconds] = 10.0
    """Behind the first good request of an engine that was excluded: it has two places, and twice as
    many after each good request, until this time is over. 0: it gets any number of requests at
    once.
    """


class OutlierSettings(Section, frozen=True):
    """Engines that fail more often, or are slower, than the others of their role: they are excluded
    for a time.
    """

    former: ClassVar[Mapping[str, str]] = {"eject_for": "exclude_for"}
    interval: Switch[Annotated[float, Meta(ge=0, le=604_800)]] = 10.0
    """Seconds between two comparisons, each of the last half minute. 0: engines are not
    compared.
    """

    error_share: AtOnce[Share] = 0.5
    """Of an engine's requests: if so many fail, and at most half as many of its peers', it is
    excluded.
    """

    min_requests: AtOnce[Count] = 10
    """Requests by which an engine is judged at least."""

    slower_than: AtOnce[Annotated[float, Meta(gt=1, le=1000)]] = 3.0
    """Times the median of its peers, in seconds per prompt byte, per event in batches of its size,
    or until KV has come: an engine that is slower is excluded.
    """

    exclude_for: AtOnce[Seconds] = 30.0
    """Seconds for which an engine is excluded, times how often it was: 300 at most. Then one
    request shows how it is.
    """

    max_share: AtOnce[Share] = 0.34
    """Of the engines of a role, so many are excluded for this at once, at most. Of two, one may be;
    never the last.
    """


class Continuations(Section, frozen=True):
    """Streams that other engines go on with when theirs fails (limits.continuations)."""

    sampled: bool = True
    """Also answers that are drawn by chance (temperature above 0, no seed): another rest than the
    one that was lost, as good as that.
    """

    max_bytes: Count = 268_435_456
    """Bytes that are kept of all streams for that, 256 MiB: mostly the token ids of their prompts,
    6 bytes each. That is enough for 1000 streams with prompts of 40,000 tokens. What exceeds it
    ends with an error when its engine fails.
    """

    parsed: Literal["auto", "off"] = "auto"
    """auto: also chats with tools, or in the middle of their reasoning, where all engines of the
    model run with --enable-scale-out: they parse what the engine that goes on makes. off: such
    chats end with an error, and engines are not asked whether they can parse.
    """

    max_parsed_tokens: Count = 8192
    """Tokens of a prompt and its answer together up to which such a chat goes on: engines parse all
    of it again for each piece.
    """
