"""Turns that hand KV back: what decode engines keep of finished turns, given to prefill engines
with the next prompt.

Owns the turns of one pool from the question to their use: those under way (`open_turns`), those
kept (`kept_turns`), the release of the others (`turn_release`); and which pairs must not be given
any for now.
"""

from __future__ import annotations

from collections.abc import Collection

from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.handle_hosts import HandleHosts
from pdproxy.kit.clock import Clock
from pdproxy.observe.description import NODE, Label, MergeRule, counter, gauge
from pdproxy.observe.events import Observers, TurnDropped, TurnKept, TurnReused
from pdproxy.scheduling.engine_states import EngineStates
from pdproxy.scheduling.ledger_engine import LedgerEngine
from pdproxy.serving.kv.kept_turns import KeptTurn, KeptTurns, Reuse, TurnLimits, TurnRecord
from pdproxy.serving.kv.open_turns import OpenTurns
from pdproxy.serving.kv.turn_release import TurnReleases
from pdproxy.settings.limits import Deadlines
from pdproxy.transfer.turns import DecodeHandle, TurnRules
from pdproxy.wire.notices import Notice, NoticeEvent

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
    ("worker_ended", "the worker that kept it has ended"),
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
TURN_BYTES = gauge(
    "pdproxy_turn_bytes",
    "bytes",
    "Bytes of token ids and handles that are held (turns.max_bytes)",
    Label(
        "of",
        (("kept", "turns that may be used"), ("open", "turns whose answer or notice has not come")),
    ),
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
    """All turns of one pool. `by_notice`: whether engines report the handles of streams. `hosts`:
    which hosts these may name.
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
        *,
        by_notice: bool,
        hosts: HandleHosts,
    ) -> None:
        self._observers = observers
        self._clock = clock
        self._now = clock.now
        self._failed: dict[tuple[int, int], tuple[int, float]] = {}
        """By the runs of a pair: failed handles in a row, and when the last one failed."""
        self._hung: dict[int, str] = {}
        self._silent = 0
        self._engines = engines
        self.speeds = PrefillSpeeds()
        self.releases = TurnReleases(
            rules, states, engines.known, deadlines, observers, clock.now, limits.count
        )
        self.kept = KeptTurns(rules, limits, engines, self._dropped, clock.now)
        self.open = OpenTurns(
            rules,
            self.kept,
            self._dropped,
            self._added,
            clock.now,
            max_bytes=limits.max_bytes,
            by_notice=by_notice,
            host_of=self._host_of,
            checked=hosts.checked,
        )
        observers.show(TURNS, lambda: [((), len(self.kept.own))])
        observers.show(
            TURN_BLOCKS, lambda: [((url,), count) for url, count in self.kept.blocks().items()]
        )
        observers.show(
            TURN_BYTES, lambda: [(("kept",), self.kept.size), (("open",), self.open.size)]
        )

    def __repr__(self) -> str:
        return f"<Turns {self.open!r}, {self.kept!r}, {self.releases!r}>"

    # -- using one

    async def take(self, key: bytes, prefill: LedgerEngine) -> Reuse | None:
        """Return the turn that a prompt continues, None if there is none for this prefill engine.
        It is not kept any longer.
        """
        found = self._find(key, prefill)
        if found is not None:
            self.kept.remove(found.turn)
        return found

    def _find(
        self, key: bytes, prefill: LedgerEngine, silent: Collection[int] = ()
    ) -> Reuse | None:
        """See `KeptTurns.find`."""
        if not len(self.kept) or prefill.run_number in self._hung:
            return None
        run, begin = prefill.run_number, self._now() - PAUSE
        paused = {
            decode
            for (one, decode), (count, at) in self._failed.items()
            if one == run and count >= FAILURES and at > begin
        }
        return self.kept.find(key, prefill, paused, silent)

    def is_there(self, reuse: Reuse) -> bool:
        """Return whether a decode engine still keeps what was taken: not if it was restarted, or if
        the time is over.
        """
        record = reuse.turn.record
        engine = self._engines.get(record.decode)
        fresh = reuse.turn.received > self._now() - self.kept.seconds
        return fresh and engine is not None and engine.in_ledger.run_number == record.decode_run

    def used(self, reuse: Reuse) -> None:
        """The prefill engine has answered: it has pulled the KV, or has had it, and the decode
        engine frees it.
        """
        record, run = reuse.turn.record, reuse.prefill_run
        self._failed.pop((run, record.decode_run), None)
        # What this engine computed of the turn's own prompt is probably still in its prefix cache.
        had = record.prompt_tokens if record.prefill_run == run else 0
        saved = self.speeds.seconds(run, max(reuse.tokens - had, 0))
        self.releases.contacts.add(run, record.decode_run)
        self._observers.notify(TurnReused(reuse.tokens, reuse.trimmed, saved))

    def unused(self, reuse: Reuse) -> None:
        """The prefill engine was not asked, or has refused the prompt: nobody will read the KV."""
        self._dropped(reuse.turn.record, reuse.turn.handle, "unused")

    def refused(self, reuse: Reuse) -> None:
        """The prefill engine has failed, perhaps because it could not pull."""
        pair = reuse.prefill_run, reuse.turn.record.decode_run
        count, _ = self._failed.pop(pair, (0, 0.0))
        self._failed[pair] = count + 1, self._now()
        if len(self._failed) > _MAX_PAIRS:
            del self._failed[next(iter(self._failed))]
        self._dropped(reuse.turn.record, reuse.turn.handle, "failed")

    def left(self, reuse: Reuse) -> None:
        """Nobody awaits the prefill engine's answer. It may still pull, and must not find other KV:
        nothing is released.
        """
        self._dropped(reuse.turn.record, reuse.turn.handle, "unanswered")

    def hung(self, reuse: Reuse) -> None:
        """The prefill engine has not answered in time. One without the option never does: its run
        gets no more handles.
        """
        self._never_answers(reuse.prefill_run, reuse.prefill)
        self.left(reuse)

    def engine_leaves(self, url: str) -> None:
        """Drop the turns that a decode engine keeps: it gets no more requests that could use
        them.
        """
        self.kept.engine_leaves(url)

    # -- notices

    def receive(self, notice: Notice) -> None:
        """Take a decode engine's notice about KV that it keeps."""
        name = notice.remote_request_id
        if notice.role != "D" or name is None:
            return
        if notice.event is NoticeEvent.KEPT and notice.params is not None:
            self.open.receive(name, notice.params)
        elif notice.event is NoticeEvent.EXPIRED:
            self.kept.forget(name, "expired")
        elif notice.event is NoticeEvent.RELEASED:
            self.kept.forget(name, "released")

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
        self.open.drop_all()
        self.kept.drop_all("shutdown")
        return await self.releases.settle(timeout)

    def _never_answers(self, run: int, prefill: str) -> None:
        self._hung[run] = prefill
        if len(self._hung) > _MAX_PAIRS:
            del self._hung[next(iter(self._hung))]

    def _host_of(self, decode: str) -> str | None:
        engine = self._engines.known.get(decode)
        return None if engine is None else engine.kv_host

    def _added(self, turn: KeptTurn) -> None:
        self._silent = 0
        self._observers.notify(TurnKept(turn.record.decode, turn.handle.tokens))

    def _dropped(self, record: TurnRecord, handle: DecodeHandle | None, reason: str) -> None:
        self._silent += reason == "no_notice" and not record.may_stop
        self._observers.notify(TurnDropped(record.decode, reason))
        if handle is not None and reason not in _NOT_RELEASED:
            self.releases.release(record, handle)
