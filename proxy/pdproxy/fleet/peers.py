"""What is known of the ranks of one engine's run, for contracts whose legs name the other engine.
See `transfer.peers`.
"""

from __future__ import annotations

from pdproxy.transfer.peers import Peer


class Peers:
    """The data-parallel ranks of one run of an engine, `ranks` in all. Written by the contract's
    source of peers.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._known: dict[int, Peer] = {}
        self._turn = -1

    def __repr__(self) -> str:
        return f"<Peers {len(self._known)} of {self.ranks} known>"

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that are not known."""
        return tuple(rank for rank in range(self.ranks) if rank not in self._known)

    def learn(self, peer: Peer) -> None:
        """Take note of a rank. Ranks that the engine does not have are ignored."""
        if 0 <= peer.rank < self.ranks:
            self._known[peer.rank] = peer

    def forget(self) -> None:
        """Forget all ranks."""
        self._known.clear()

    def get(self, rank: int) -> Peer:
        """Return what is known of a rank: its number alone if it is nothing."""
        return self._known.get(rank) or Peer(rank, self.ranks)

    def take_turn(self) -> Peer:
        """Return the rank whose turn it is: the engine's next leg goes to this rank."""
        self._turn = (self._turn + 1) % self.ranks
        return self.get(self._turn)
