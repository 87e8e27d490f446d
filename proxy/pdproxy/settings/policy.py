"""The sections `pools[].policy` and `pools[].slo`: how a request's engines are chosen, and what is wanted of its times.

Owns names, units, bounds and defaults.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pdproxy.scheduling import placements, policies
from pdproxy.settings.section import Seconds, Section, names_of

Policy = Annotated[str, names_of(policies.names)]
PlacementName = Annotated[str, names_of(placements.names)]
HeaderName = Annotated[str, Meta(pattern=r"\A[!#-'*+.^_`|~0-9A-Za-z-]{1,100}\Z", description="a header's name")]


class PoolPolicy(Section, frozen=True):
    """How an engine is chosen among those that can serve a request.

    In place of the section, a name alone: of a placement, or of a policy for both legs.
    """

    placement: PlacementName | None = None
    """What decides whether a prompt is split. `split`: it is if it can be, and the policies below choose the engines. None: see
    `Pool.placement`."""

    prefill: Policy = "least_load"
    """For the prefill leg. Fewest outstanding prompt bytes: a prefill engine's time depends on them."""

    decode: Policy = "least_load"
    """For the decode leg. Fewest active streams: a decode engine's step time grows with them."""

    session_header: HeaderName = "X-Session-ID"
    """For policy `session`: the header that names a conversation. Without it, the body's `user` does."""

    refuse_late: bool = False
    """Whether a request is refused (503) that no engine can serve within the objective (`slo`), by the placement's prediction."""

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
    """What is wanted of a request's times, for placements that predict them. A request's own headers override it."""

    ttft: Seconds | None = None
    """From the request's arrival to its first token. None: no bound."""

    tpot: Seconds | None = None
    """The mean time per token after the first. None: no bound."""

    gap: Seconds | None = None
    """The longest time between two tokens. None: no bound."""
