"""Where other engines reach an engine for KV transfer, for contracts whose legs name the other
engine before it has answered.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class PeerSource(Enum):
    """How the proxy learns where engines reach each other."""

    ANSWERS = "answers"  # from the prefill engine's own answers
    BOOTSTRAP = "bootstrap"  # from a bootstrap server beside each prefill engine
    REGISTRATION = "registration"  # engines report it themselves, again and again


class Peer(msgspec.Struct, frozen=True):
    """One data-parallel rank of an engine, as other engines reach it. What a contract does not use,
    or is not known yet, is None.

    - `rank`: the data-parallel rank; an engine without data parallelism has rank 0 alone. `ranks`:
      how many there are.
    - `engine_id`: the name of the rank in its contract.
    - `host`, `port`: of its side channel.
    - `address`: an address in the contract's own form: a bootstrap server's URL, a ZMQ address.
    - `tp_size`, `pp_size`: how many tensor-parallel and pipeline-parallel ranks it has.
    - `mode`: the direction of transfers, in the contract's own words.
    """

    rank: int = 0
    ranks: int = 1
    engine_id: str | None = None
    host: str | None = None
    port: int | None = None
    address: str | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    mode: str | None = None

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """The header that sends a leg to this rank. Without data parallelism there is none: engines
        refuse some values of it.
        """
        return ((b"x-data-parallel-rank", b"%d" % self.rank),) if self.ranks > 1 else ()
