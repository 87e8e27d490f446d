"""Turns that hand KV back: what decode engines keep of finished turns, given to prefill engines
with the next prompt.

Owns the finished turns of one pool until their use: those kept (`kept_turns`), and the release of
the others (`turn_release`); and which pairs must not be given any for now.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from pdproxy.deciding.kept_turns import KeptTurns, Reuse, TurnLimits
from pdproxy.deciding.turn_release import TurnReleases
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.clock import Clock
from pdproxy.observe.description import NODE, Label, MergeRule, counter, gauge
from pdproxy.observe.events import Observers, TurnDropped, TurnKept, TurnReused
from pdproxy.scheduling.engine_states import EngineStates
from pdproxy.scheduling.ledger_engine import LedgerEngine
from pdproxy.scheduling.turn_before import TurnEnd
from pdproxy.settings.limits import Deadlines
from pdproxy.transfer.kept_turn import KeptTurn, TurnRecord
from pdproxy.transfer.turns import DecodeHandle, TurnRules

FAILURES = 3
"""Handles that must fail in a row before a pair is given none for a while: an engine that can't
pull takes seconds to fail.
"""
PAUSE = 60.0
"""Seconds of that while."""
_NOT_RELEASED = frozenset({"expired", "restarted", "released", "unanswered"})
"""Reasons for which there are no blocks any more, or a prefill engine may still read them."""
SILENT = 20
"""Finished turns in a row without a notice after which `/ready` reports it."""
_DECAY = 0.95
"""The weight of a prefill engine's earlier prompts in its speed."""
_MAX_PAIRS = 1024
TURN_DROPS = (
    ("evicted", "a newer turn took its place (turns.max_kept, max_blocks, max_bytes)"),
    ("expired", "its time was over (turns.decoder_kv_blocks_ttl, less the margin)"),
    ("restarted", "its decode engine was started again or removed"),
    ("released", "its decode engine freed it"),
    ("leaving", "its decode engine is being drained"),
    ("too_long", "it alone is more than may be kept"),
    ("no_ids", "the token ids of the prompt are not known"),
    ("groups", "its model has several groups of layers, whose blocks can't be cut"),
    ("unusable", "what the decode engine sent of it is not a handle"),
    ("no_notice", "its stream has ended, and no notice has named its KV"),
    ("abandoned", "its answer was not complete: its client has left, or its stream has failed"),
    (
        "unused",
        "the prefill engine that was to get it could not be asked, or has refused the prompt",
    ),
    ("failed", "the prefill engine that was given it has failed"),
    ("unanswered", "the prefill engine that was given it has not answered"),
    ("shutdown", "the proxy has stopped"),
    ("process_ended", "the process that kept it was killed"),
)
TURNS_KEPT = counter(
    "pdproxy_turns_kept_total",
    "turns",
    "Finished turns whose KV a decode engine keeps for the conversation's next prompt, with a "
    "handle that was kept here",
    of=TurnKept,
    counts=lambda _: [((), 1)],
)
TURNS_REUSED = counter(
    "pdproxy_turns_reused_total",
    "prompts",
    "Prompts that were prefilled with KV of the turn before",
    Label(
        "part",
        (
            ("whole", "all that the decode engine kept"),
            ("trimmed", "the whole blocks that they have in common"),
        ),
    ),
    of=TurnReused,
    counts=lambda event: [(("trimmed" if event.trimmed else "whole",), 1)],
)
TURNS_DROPPED = counter(
    "pdproxy_turns_dropped_total",
    "turns",
    "Finished turns whose KV will not be used",
    Label("reason", TURN_DROPS),
    of=TurnDropped,
)
TURN_TOKENS = counter(
    "pdproxy_turn_tokens_reused_total",
    "tokens",
    "Prompt tokens whose KV prefill engines were given from decode engines. What they had in "
    "their own cache they did not pull",
    of=TurnReused,
    by="tokens",
)
TURN_SECONDS = counter(
    "pdproxy_turn_prefill_seconds_saved_total",
    "seconds",
    "Prefill engines' seconds saved by these tokens, estimated: the tokens beyond the prompt "
    "that the same engine prefilled "
    "in the turn before, multiplied by its seconds per computed token. These are measured on its "
    "legs without such KV, queues "
    "included, with a weight of 0.95 from prompt to prompt",
    of=TurnReused,
    by="saved_s",
)
TURNS = gauge(
    "pdproxy_turns", "turns", "Finished turns whose KV may be used", workers=MergeRule.SUM
)
TURN_BLOCKS = gauge(
    "pdproxy_turn_blocks",
    "blocks",
    "Blocks of these turns at a decode engine (turns.max_blocks)",
    NODE,
    workers=MergeRule.SUM,
)


class PrefillSpeeds:
    """How long prefill engines take for a token, from the prompts that they computed. By the number
    of their run.
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float]] = {}

    def measured(self, run: int, tokens: int, seconds: float) -> None:
        """Add a prompt of a run: the tokens that were computed, and the seconds of its leg."""
        if tokens > 0 and seconds > 0:
            total, took = self._sums.pop(run, (0.0, 0.0))
            self._sums[run] = (_DECAY * total + tokens, _DECAY * took + seconds)
            if len(self._sums) > _MAX_PAIRS:
                del self._sums[next(iter(self._sums))]

    def seconds(self, run: int, tokens: int) -> float:
        """Return how long so many tokens would take a run; 0 while that is not known."""
        total, took = self._sums.get(run, (1.0, 0.0))
        return tokens * took / total


class PoolTurns:
    """The finished turns of one pool. `kept`: makes what keeps them; the arguments: those of
    `KeptTurns`.
    """

    def __init__(
        self,
        rules: TurnRules,
        limits: TurnLimits,
        states: EngineStates,
        engines: EngineRegistry,
        deadlines: Deadlines,
        observers: Observers,
        clock: Clock,
        kept: Callable[..., KeptTurns] = KeptTurns,
    ) -> None:
        self._observers = observers
        self._now = clock.now
        self._failed: dict[tuple[int, int], tuple[int, float]] = {}
        """By the runs of a pair: failed handles in a row, and when the last one failed."""
        self._hung: dict[int, str] = {}
        self._ends = {
            TurnEnd.USED: self._used,
            TurnEnd.UNUSED: self._unused,
            TurnEnd.REFUSED: self._refused,
            TurnEnd.LEFT: self._left,
            TurnEnd.HUNG: self._hung_up,
        }
        self._silent = 0
        self._engines = engines
        self.speeds = PrefillSpeeds()
        self.releases = TurnReleases(
            rules, states, engines.known, deadlines, observers, clock.now, limits.count
        )
        self.kept = kept(rules, limits, engines, self.dropped, clock.now)
        self._open: dict[Hashable, int] = {}
        """Bytes of turns whose answer or notice has not come, by who serves them."""
        observers.show(TURNS, lambda: [((), len(self.kept))])
        observers.show(
            TURN_BLOCKS, lambda: [((url,), count) for url, count in self.kept.blocks().items()]
        )

    def __repr__(self) -> str:
        return f"<Turns {self.kept!r}, {self.releases!r}>"

    # -- keeping them

    def keep(self, turn: KeptTurn) -> None:
        """Keep a turn that has just finished."""
        if self.kept.add(turn):
            self._silent = 0
            self._observers.notify(TurnKept(turn.record.decode, turn.handle.tokens))

    def dropped(self, record: TurnRecord, handle: DecodeHandle | None, reason: str) -> None:
        """Count a turn whose KV will not be used (`TURN_DROPS`), and release what is left of it."""
        self._silent += reason == "no_notice" and not record.may_stop
        self._observers.notify(TurnDropped(record.decode, reason))
        if handle is not None and reason not in _NOT_RELEASED:
            self.releases.release(record, handle)

    def freed(self, name: str, reason: str) -> None:
        """Drop a turn whose blocks its engine has freed. `name`: the prefill engine's id of it; if
        unknown, nothing changes.
        """
        self.kept.forget(name, reason)

    def leave_space(self, size: int, by: Hashable = None) -> None:
        """Leave space for turns whose answer or notice has not come: so many bytes. `by`: who
        serves them, if several do.
        """
        if size:
            self._open[by] = size
        else:
            self._open.pop(by, None)
        self.kept.leave_space(sum(self._open.values()))

    # -- using one

    def find(self, key: bytes, prefill: LedgerEngine) -> KeptReuse | None:
        """Return the turn that a prompt continues, None if there is none for this prefill engine.
        It is kept until it is taken.
        """
        if not len(self.kept) or prefill.run_number in self._hung:
            return None
        run, begin = prefill.run_number, self._now() - PAUSE
        paused = {
            decode
            for (one, decode), (count, at) in self._failed.items()
            if one == run and count >= FAILURES and at > begin
        }
        found = self.kept.find(key, prefill, paused)
        return None if found is None else KeptReuse(self, found)

    def give_back(self, reuse: Reuse) -> None:
        """Keep a turn again that was taken, and not given to its prefill engine."""
        self.kept.add(reuse.turn)

    def is_there(self, reuse: Reuse) -> bool:
        """Return whether a decode engine still keeps what was taken: not if it was restarted, or if
        the time is over.
        """
        record = reuse.turn.record
        engine = self._engines.get(record.decode)
        fresh = reuse.turn.received > self._now() - self.kept.seconds
        return fresh and engine is not None and engine.in_ledger.run_number == record.decode_run

    def end(self, reuse: Reuse, how: TurnEnd) -> None:
        """End a turn that was taken."""
        self._ends[how](reuse)

    def _used(self, reuse: Reuse) -> None:
        record, run = reuse.turn.record, reuse.prefill_run
        self._failed.pop((run, record.decode_run), None)
        # What this engine computed of the turn's own prompt is probably still in its prefix cache.
        had = record.prompt_tokens if record.prefill_run == run else 0
        saved = self.speeds.seconds(run, max(reuse.tokens - had, 0))
        self.releases.contacts.add(run, record.decode_run)
        self._observers.notify(TurnReused(reuse.tokens, reuse.trimmed, saved))

    def _unused(self, reuse: Reuse) -> None:
        self.dropped(reuse.turn.record, reuse.turn.handle, "unused")

    def _refused(self, reuse: Reuse) -> None:
        pair = reuse.prefill_run, reuse.turn.record.decode_run
        count, _ = self._failed.pop(pair, (0, 0.0))
        self._failed[pair] = count + 1, self._now()
        if len(self._failed) > _MAX_PAIRS:
            del self._failed[next(iter(self._failed))]
        self.dropped(reuse.turn.record, reuse.turn.handle, "failed")

    def _left(self, reuse: Reuse) -> None:
        # It may still pull, and must not find other KV: nothing is released.
        self.dropped(reuse.turn.record, reuse.turn.handle, "unanswered")

    def _hung_up(self, reuse: Reuse) -> None:
        # One without the option never answers: its run gets no more handles.
        self._hung[reuse.prefill_run] = reuse.prefill
        if len(self._hung) > _MAX_PAIRS:
            del self._hung[next(iter(self._hung))]
        self._left(reuse)

    def engine_leaves(self, url: str) -> None:
        """Drop the turns that a decode engine keeps: it gets no more requests that could use
        them.
        """
        self.kept.engine_leaves(url)

    # -- for an operator

    def shortcomings(self) -> list[str]:
        """Return what is wrong with them, a sentence each."""
        runs = {engine.in_ledger.run_number for engine in self._engines.values()}
        found = [
            f"{url} did not answer a prompt with KV of a decode engine: it gets none until it is "
            f"started again "
            "(is it started with bidirectional_kv_xfer?)"
            for run, url in self._hung.items()
            if run in runs
        ]
        if self._silent >= SILENT:
            options = "bidirectional_kv_xfer and the notifier"
            found.append(
                f"no notice has named the KV of the last {self._silent} turns: do decode engines "
                f"run with {options}?"
            )
        return found

    def named(self) -> set[str]:
        """Return the URLs of engines whose blocks are being released."""
        return self.releases.named

    async def close(self, timeout: float) -> int:
        """Release all that is kept, `timeout` seconds at most. Return how many turns are left to
        their engines' own time.
        """
        self.kept.drop_all("shutdown")
        return await self.releases.settle(timeout)


class KeptReuse:
    """A `scheduling.turn_before.FoundTurn` of the turns that this process keeps."""

    __slots__ = ("_turns", "reuse")

    def __init__(self, turns: PoolTurns, reuse: Reuse) -> None:
        self._turns = turns
        self.reuse = reuse

    def __repr__(self) -> str:
        return f"<KeptReuse of {self.decode}, {self.tokens} tokens>"

    @property
    def decode(self) -> str:
        """See `FoundTurn`."""
        return self.reuse.turn.record.decode

    @property
    def params(self) -> bytes:
        """See `FoundTurn`."""
        return self.reuse.params

    @property
    def tokens(self) -> int:
        """See `FoundTurn`."""
        return self.reuse.tokens

    def take(self) -> bool:
        """See `FoundTurn`."""
        kept, turn = self._turns.kept, self.reuse.turn
        if turn not in kept:
            return False
        kept.remove(turn)
        return True

    def is_there(self) -> bool:
        """See `FoundTurn`."""
        return self._turns.is_there(self.reuse)

    def end(self, how: TurnEnd) -> None:
        """See `FoundTurn`."""
        self._turns.end(self.reuse, how)
