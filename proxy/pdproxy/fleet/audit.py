"""The audit: whether the KV that was sent to each decode engine arrived, or was silently computed
again.

Compares two sums for each decode engine: the prompt tokens that split requests should have moved
(counted when their first data came), and the engine's own counters since the same time. A decode
engine that never pulls sends right answers, slowly: only its `vllm:prompt_tokens_by_source_total`
shows that.
"""

from __future__ import annotations

from pdproxy.fleet.engine import AuditAccount, Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.observe.description import NODE, Label, MergeRule, counter, gauge
from pdproxy.observe.events import KvCounted, KvShortfall, Observers, PairEjected
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.upstream.metrics_page import Scrape

EXTERNAL = "external_kv_transfer"
LOCAL_HIT = "local_cache_hit"
KV_MOVED = counter(
    "pdproxy_kv_moved_total",
    "tokens",
    "Prompt tokens (whole blocks) sent to decode engines by KV transfer, by what those engines' "
    "own counters show",
    Label(
        "result",
        (
            ("transferred", "they arrived"),
            ("recomputed", "they did not: the engine computed them again"),
        ),
    ),
    of=KvCounted,
    counts=lambda event: [(("transferred",), event.moved), (("recomputed",), event.missing)],
)
KV_MISSING = gauge(
    "pdproxy_kv_missing_tokens",
    "tokens",
    "Prompt tokens that never arrived by KV transfer since the decode engine's start",
    NODE,
    workers=MergeRule.MOST,
)
PAIRS_EJECTED = counter(
    "pdproxy_pairs_ejected_total",
    "pairs",
    "Pairs ejected because they counted different prompt lengths",
    of=PairEjected,
)


class Auditor:
    """Compares what was sent with what arrived, for every decode engine."""

    def __init__(self, engines: EngineRegistry, ledger: Ledger, observers: Observers) -> None:
        self._engines = engines
        self._ledger = ledger
        self._observers = observers
        observers.show(
            KV_MISSING, lambda: [((url,), tokens) for url, tokens in self.missing().items()]
        )

    def asked(self, decode: Engine, prompt_tokens: int) -> None:
        """Count a prompt whose KV a decode engine was given. The engine may count the KV long
        before it sends data.
        """
        if (account := decode.audit.account) is not None:
            account.loading += self._blocks(prompt_tokens)

    def over(self, decode: Engine, prompt_tokens: int, *, loaded: bool) -> None:
        """Count the end of that leg. `loaded`: the engine has sent data for it, so the KV must have
        arrived.
        """
        if (account := decode.audit.account) is not None:
            moved = self._blocks(prompt_tokens)
            account.loading = max(0, account.loading - moved)
            account.expected += moved if loaded else 0

    def moved(self, url: str, loading: int, arrived: int) -> None:
        """Count what many legs have shown: how the prompt tokens under way have changed, and how
        many have arrived.
        """
        engine = self._engines.known.get(url)
        if engine is not None and (account := engine.audit.account) is not None:
            account.loading = max(0, account.loading + loading)
            account.expected += arrived

    def _blocks(self, prompt_tokens: int) -> int:
        block = self._ledger.block_size or 1
        return prompt_tokens // block * block

    def compared(self, prefill: str, decode: str, prefill_tokens: int, decode_tokens: int) -> None:
        """Compare a split prompt's length by both engines. Different lengths mean different
        prompts: the pair is ejected.
        """
        if prefill_tokens and decode_tokens and prefill_tokens != decode_tokens:
            self._ledger.eject(prefill, decode)
            self._observers.notify(PairEjected(prefill, decode, prefill_tokens, decode_tokens))

    def scraped(self, engine: Engine, scrape: Scrape) -> None:
        """Process an engine's counters, which have just been read."""
        state, url = engine.audit, engine.url
        if Role.DECODE not in engine.in_ledger.uses:
            return
        state.blind = not scrape.by_source
        if state.blind:
            return
        external = scrape.by_source.get(EXTERNAL, 0.0)
        local = scrape.by_source.get(LOCAL_HIT, 0.0)
        account = state.account
        restarted = (
            account is None or account.started != scrape.started or external < account.last_external
        )
        if account is None or restarted:
            state.account = AuditAccount(scrape.started, external, local, last_external=external)
            return
        account.last_external = external
        # Prompts that the decode engine had cached need not move; it can't have had more of them
        # than its own hits.
        arrived = int(external - account.base_external) + int(local - account.base_local)
        surplus = max(0, arrived - account.expected - account.loading)
        account.base_external += min(surplus, account.surplus)
        account.surplus = max(0, surplus - account.surplus)
        due, account.due, account.next_due = account.due, account.next_due, account.expected
        missing = max(account.missing, due - arrived)
        fresh = due - account.settled
        if fresh > 0 or missing > account.missing:
            new_missing = missing - account.missing
            self._observers.notify(
                KvCounted(url, moved=max(0, fresh - new_missing), missing=new_missing)
            )
            account.settled = max(account.settled, due)
        if missing > account.missing:
            self._observers.notify(KvShortfall(url, missing - account.missing, fresh))
            account.missing = missing

    def follow(self, engine: Engine, account: AuditAccount | None, *, blind: bool) -> None:
        """Go on with an account that another auditor has begun."""
        engine.audit.account, engine.audit.blind = account, blind

    def missing(self) -> dict[str, int]:
        """Return for each decode engine how many prompt tokens never arrived since it started."""
        return {url: account.missing for url, account in self._accounts()}

    def shortcomings(self) -> list[str]:
        """Return of which engines it counts nothing, a sentence each."""
        blind = sorted(url for url, engine in self._engines.items() if engine.audit.blind)
        return [
            f"decode {url}: its /metrics do not say where prompt tokens come from" for url in blind
        ]

    def _accounts(self) -> list[tuple[str, AuditAccount]]:
        accounts = ((url, engine.audit.account) for url, engine in self._engines.items())
        return [(url, account) for url, account in accounts if account is not None]
