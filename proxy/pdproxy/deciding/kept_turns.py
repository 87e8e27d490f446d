"""KV of finished turns that decode engines keep, until the conversation's next prompt uses it.

Owns the handles, with the token ids whose KV they hold. A turn is found by comparing ids, within
one model and one cache salt, and is given away once. It is dropped after its time, when its engine
has restarted, or when there are too many: by number, by bytes of ids, and by blocks per decode
engine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping

import msgspec

from pdproxy.fleet.engine import Engine
from pdproxy.scheduling.compatibility import prefill_and_decode
from pdproxy.scheduling.ledger_engine import LedgerEngine
from pdproxy.tokens.prefix_index import PrefixIndex
from pdproxy.transfer.kept_turn import SCOPE_BYTES, KeptTurn, TurnRecord
from pdproxy.transfer.turns import DecodeHandle, TurnRules

CANDIDATES = 8
"""Turns that are looked at for one prompt: those that have the longest beginning in common with
it.
"""


class TurnLimits(msgspec.Struct, frozen=True):
    """What is kept, and what is used. See `settings.kv.Turns`."""

    seconds: float
    """How long after its receipt a handle may be used."""
    count: int
    max_bytes: int
    max_blocks: int
    """Per decode engine."""
    min_tokens: int
    min_share: float


class Reuse(msgspec.Struct, frozen=True, eq=False, array_like=True):
    """A turn that is given to a prefill engine, once. `prefill`: its URL, `prefill_run`: the number
    of its run.

    `params`: what the engine is sent; `tokens`: whose KV it names.
    """

    turn: KeptTurn
    prefill: str
    prefill_run: int
    params: bytes
    tokens: int
    trimmed: bool


class KeptTurns:
    """All turns of one pool.

    `dropped(record, handle, reason)` is called for each that leaves unused (`turns.TURN_DROPS`).
    """

    def __init__(
        self,
        rules: TurnRules,
        limits: TurnLimits,
        engines: Mapping[str, Engine],
        dropped: Callable[[TurnRecord, DecodeHandle, str], None],
        now: Callable[[], float],
    ) -> None:
        self._rules = rules
        self._limits = limits
        self._engines = engines
        self._dropped = dropped
        self._now = now
        self._by_age: OrderedDict[int, KeptTurn] = OrderedDict()  # by the id of the object
        self._by_name: dict[str, KeptTurn] = {}
        self._index = PrefixIndex[KeptTurn]()
        self._blocks: dict[str, int] = {}
        self._bytes = 0
        self._open = 0
        """Bytes of turns whose answer or notice has not come."""

    def __len__(self) -> int:
        return len(self._by_age)

    def __contains__(self, turn: KeptTurn) -> bool:
        return id(turn) in self._by_age

    def __repr__(self) -> str:
        return f"<KeptTurns {len(self)} turns, {self._bytes} bytes>"

    @property
    def size(self) -> int:
        """Bytes of ids and handles that are held."""
        return self._bytes

    @property
    def seconds(self) -> float:
        """How long after its receipt a handle may be used."""
        return self._limits.seconds

    def blocks(self) -> dict[str, int]:
        """Return how many blocks are kept, by decode engine."""
        self.sweep()
        return dict(self._blocks)

    def add(self, turn: KeptTurn) -> bool:
        """Keep a turn; drop the oldest ones for it. Return whether it is kept."""
        limits, url = self._limits, turn.record.decode
        self.sweep()
        engine = self._engines.get(url)
        if engine is not None and engine.in_ledger.draining is not None:
            self._lose(turn, "leaving")
            return False
        if turn.size > limits.max_bytes - self._open or turn.handle.blocks > limits.max_blocks:
            self._lose(turn, "too_long")
            return False
        if (namesake := self._by_name.get(turn.record.remote_request_id)) is not None:
            # a notice that its engine has freed it could be of either one
            self.drop(namesake, "evicted")
        while self._blocks.get(url, 0) + turn.handle.blocks > limits.max_blocks:
            self.drop(
                next(one for one in self._by_age.values() if one.record.decode == url), "evicted"
            )
        self._by_age[id(turn)] = turn
        self._by_name[turn.record.remote_request_id] = turn
        self._index.add(turn.key, turn)
        self._blocks[url] = self._blocks.get(url, 0) + turn.handle.blocks
        self._bytes += turn.size
        self.leave_space(self._open)
        return True

    def leave_space(self, size: int) -> None:
        """Drop the oldest turns until those that are left fit beside so many bytes of turns whose
        answer or notice has not come.
        """
        self._open = size
        while self._by_age and (
            self._bytes + size > self._limits.max_bytes or len(self._by_age) > self._limits.count
        ):
            self.drop(next(iter(self._by_age.values())), "evicted")

    def find(
        self, key: bytes, prefill: LedgerEngine, without: Collection[int] = ()
    ) -> Reuse | None:
        """Return the turn that a prompt continues, None if there is none whose KV this prefill
        engine may pull.

        `key`: the prompt's scope and ids; `without`: runs of decode engines that are left out. Who
        uses it removes it.
        """
        self.sweep()
        gone: list[tuple[KeptTurn, str]] = []
        found = None
        oldest = self._now() - self._limits.seconds
        prompt = tokens = key.count(b",", SCOPE_BYTES)
        end = len(key)
        for common, turn in self._index.nearest(key, CANDIDATES):
            # behind the last whole id
            begin = max(key.rfind(b",", SCOPE_BYTES, common) + 1, SCOPE_BYTES)
            tokens -= key.count(b",", begin, end)
            end = begin
            if tokens < self._limits.min_tokens:
                break
            engine = self._engines.get(turn.record.decode)
            if engine is None or engine.in_ledger.run_number != turn.record.decode_run:
                gone.append((turn, "restarted"))
            elif turn.received <= oldest:  # its answer took long: it is not the oldest by its place
                gone.append((turn, "expired"))
            elif found is None and turn.record.decode_run not in without:
                found = self._reuse(turn, tokens, prompt, prefill, engine.in_ledger)
        for turn, reason in gone:
            self.drop(turn, reason)
        return found

    def keeper(self, key: bytes) -> str | None:
        """Return the URL of the decode engine whose turn a prompt continues, whatever prefill
        engine it goes to; None: there is none. `key`: as above.
        """
        for common, turn in self._index.nearest(key, CANDIDATES):
            if key.count(b",", SCOPE_BYTES, common) < self._limits.min_tokens:
                break
            engine = self._engines.get(turn.record.decode)
            if engine is not None and engine.in_ledger.run_number == turn.record.decode_run:
                return turn.record.decode
        return None

    def forget(self, name: str, reason: str) -> None:
        """Drop a turn whose blocks its engine has freed. `name`: the prefill engine's id of it; if
        unknown, nothing changes.
        """
        if (turn := self._by_name.get(name)) is not None:
            self.drop(turn, reason)

    def engine_leaves(self, url: str) -> None:
        """Drop the turns of a decode engine."""
        for turn in [turn for turn in self._by_age.values() if turn.record.decode == url]:
            self.drop(turn, "leaving")

    def sweep(self) -> None:
        """Drop the turns whose time is over."""
        oldest = self._now() - self._limits.seconds
        while self._by_age and (turn := next(iter(self._by_age.values()))).received <= oldest:
            self.drop(turn, "expired")

    def drop_all(self, reason: str) -> None:
        """Drop every turn."""
        for turn in list(self._by_age.values()):
            self.drop(turn, reason)

    def _reuse(
        self, turn: KeptTurn, common: int, prompt: int, prefill: LedgerEngine, decode: LedgerEngine
    ) -> Reuse | None:
        now, block_size = (
            self._now(),
            None if decode.evidence is None else decode.evidence.block_size,
        )
        if (
            block_size is None
            or not decode.usable(now)
            or prefill_and_decode(prefill, decode) is not None
        ):
            return None
        fit = self._rules.fit(
            turn.handle,
            known=turn.known,
            common=common,
            prompt=prompt,
            block_size=block_size,
            min_tokens=self._limits.min_tokens,
        )
        if fit is None or fit.tokens < self._limits.min_share * turn.handle.tokens:
            return None  # another prompt may continue it
        return Reuse(turn, prefill.url, prefill.run_number, fit.params, fit.tokens, fit.trimmed)

    def drop(self, turn: KeptTurn, reason: str) -> None:
        """Keep a turn no longer: its KV will not be used."""
        self.remove(turn)
        self._lose(turn, reason)

    def _lose(self, turn: KeptTurn, reason: str) -> None:
        self._dropped(turn.record, turn.handle, reason)

    def remove(self, turn: KeptTurn) -> None:
        """Keep a turn no longer: it is used."""
        url = turn.record.decode
        del self._by_age[id(turn)]
        if self._by_name.get(turn.record.remote_request_id) is turn:
            del self._by_name[turn.record.remote_request_id]
        self._index.remove(turn.key, turn)
        self._bytes -= turn.size
        self._blocks[url] -= turn.handle.blocks
        if not self._blocks[url]:
            del self._blocks[url]
