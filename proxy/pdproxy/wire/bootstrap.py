"""What a prefill engine's Mooncake bootstrap server answers: which data-parallel ranks the engine
has, and where.

Source: vLLM 0.32.0 `mooncake/mooncake_utils.py`. `GET /query` answers {"<rank>": {"engine_id",
"worker_addr": {"<tensor-parallel rank>": {"<pipeline-parallel rank>": address}}}}, with the ranks
that have registered by now. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pdproxy.kit.text import truncate
from pdproxy.wire.engine import UNREADABLE

MAX_ANSWER = 256 << 10
"""Bytes of an answer. A rank has about 40."""
MAX_RANKS = 1024
MAX_ENGINE_ID = 256
"""Characters. vLLM's own are a UUID and a rank."""
MAX_ADDRESS = 512


class BootstrapAnswerError(Exception):
    """The text is not what a bootstrap server answers. `str()` gives the reason."""


class RankAddresses(msgspec.Struct, frozen=True):
    """One data-parallel rank: its engine id, and the address of each of its processes by
    tensor-parallel and pipeline-parallel rank.
    """

    engine_id: str
    worker_addr: dict[int, dict[int, str]]

    @property
    def tp_size(self) -> int:
        """How many tensor-parallel ranks have registered."""
        return len(self.worker_addr)

    @property
    def pp_size(self) -> int:
        """How many pipeline-parallel ranks the first of them has registered."""
        return len(next(iter(self.worker_addr.values()), {}))

    def missing(self, tp_size: int | None) -> str | None:
        """Return which ranks have not registered, None if all have. `tp_size`: how many ranks there
        are, if that is known.
        """
        expected = range(max(self.tp_size, 1) if tp_size is None else tp_size)
        for rank in expected:
            stages = self.worker_addr.get(rank)
            if (
                not stages
                or sorted(stages) != list(range(len(stages)))
                or len(stages) != self.pp_size
            ):
                return f"not all workers of tensor-parallel rank {rank}"
        return None


Ranks = Mapping[int, RankAddresses]
"""By data-parallel rank."""

_decoder = msgspec.json.Decoder(dict[int, RankAddresses])


def read_ranks(body: bytes) -> Ranks:
    """Read an answer. It may have no ranks, or ranks of which a part is known.

    Raises:
        BootstrapAnswerError: it is something else, or names what no engine has.
    """
    try:
        ranks = _decoder.decode(body)
    except UNREADABLE as error:
        raise BootstrapAnswerError(f"something else: {truncate(error)}") from None
    if len(ranks) > MAX_RANKS:
        raise BootstrapAnswerError(f"{len(ranks)} data-parallel ranks")
    for rank, one in ranks.items():
        if not 0 < len(one.engine_id) <= MAX_ENGINE_ID or not one.engine_id.isprintable():
            raise BootstrapAnswerError(f"an engine id of rank {rank} that can't be one")
        for stages in one.worker_addr.values():
            if any(not address or len(address) > MAX_ADDRESS for address in stages.values()):
                raise BootstrapAnswerError(f"an address of rank {rank} that can't be one")
    return ranks
