"""The sections `pools[].policy` and `pools[].slo`: how a request's engines are chosen, and what is wanted of its times.

Owns names, units, bounds and defaults.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pdproxy.scheduling import placements, policies
from pdproxy.settings.section import AtOnce, Seconds, Section, names_of

Policy = Annotated[str, names_of(policies.names)]
PlacementName = Annotated[str, names_of(placements.names)]
HeaderName = Annotated[str, Meta(pattern=r"\A[!#-'*+.^_`|~0-9A-Za-z-]{1,100}\Z", description="a header's name")]


class PoolPolicy(Section, frozen=True):
    """How an engine is chosen among those that can serve a request (docs/guide/policies.md).

    In place of the section, a name alone: of a placement, or of a policy for both legs.
    """

    placement: PlacementName | None = None
    """What decides whether a prompt is split. null: auto with an engine of role any, with slo or with profile, if no other policy
    than least_load is named below; else split.
      split  it is if it can be, and the policies below choose the engines
      auto   by predicted times, which also choose the engines: least cost against slo (docs/internals/auto.md)
    """

    prefill: AtOnce[Policy] = "least_load"
    """For the prefill leg. least_load: the fewest outstanding prompt bytes, which determine a prefill engine's time.
      least_load    the least load; engines with the same load take turns
      round_robin   engines take turns, whatever their load
      random        any engine, whatever its load
      power_of_two  of two engines that chance draws, the one with less load; for several proxies before the same engines
      session       a conversation's requests go to one engine, as far as load allows; see session_header
      prefix        the engine that has most of the prompt in its cache, weighed against its load
    """

    decode: AtOnce[Policy] = "least_load"
    """For the decode leg, and for requests that one engine serves: as above. least_load: the fewest active streams, which
    determine a decode engine's step time."""

    session_header: AtOnce[HeaderName] = "X-Session-ID"
    """For policy session: the header that names a conversation. In requests without it, the body's user does."""

    refuse_late: AtOnce[bool] = False
    """Whether a request is refused with 503 and Retry-After that no engine can serve within slo. Only with a placement that
    predicts times."""

    @classmethod
    def of_text(cls, text: str) -> dict[str, object] | None:
        """See `Section`."""
        if text in placements.names():
            return {"placement": text}
        if text not in policies.names():
            return None
        return {"placement": placements.SPLIT, "prefill": text, "decode": text}

    @classmethod
    def texts(cls) -> tuple[str, ...]:
        """See `Section`."""
        return (*placements.names(), *policies.names())


class PoolSlo(Section, frozen=True):
    """What is wanted of a request's times, in seconds, for placements that predict them.

    null: no bound. A request can name its own in milliseconds: X-PDProxy-SLO-TTFT-MS, X-PDProxy-SLO-TPOT-MS,
    X-PDProxy-SLO-Gap-MS.
    """

    ttft: AtOnce[Seconds | None] = None
    """From the request's arrival to its first token."""

    tpot: AtOnce[Seconds | None] = None
    """The mean time per token after the first."""

    gap: AtOnce[Seconds | None] = None
    """The longest time between two tokens."""
