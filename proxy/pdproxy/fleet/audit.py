"""The audit: did the KV that we sent to each decode engine really arrive, or was it silently computed again?

Owns two sums for each decode engine: the prompt tokens that split requests should have moved (counted when their first data
came), and what the engine's own counters say since the same moment. A decode engine that never pulls answers rightly and
slowly; only its `vllm:prompt_tokens_by_source_total` tells.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdproxy.observe.events import KvCounted, KvShortfall, Observers, PairEjected
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.nodes import Node, Role
from pdproxy.upstream.metrics_page import Scrape

EXTERNAL = "external_kv_transfer"
LOCAL_HIT = "local_cache_hit"


@dataclass(slots=True)
class _Account:
    """One decode engine's books, in prompt tokens.

    `loading` is under way; `expected` has shown data; `due` is what `expected` was two scrapes before, so that an engine has
    at least that time to count what it was just sent. `surplus` is what the engine counted beyond `expected`: requests whose
    clients left before the first data, or another proxy's. What stays over for two scrapes is written off, lest it hide a
    later shortfall.
    """

    started: float
    base_external: float
    base_local: float
    expected: int = 0
    loading: int = 0
    due: int = 0
    next_due: int = 0
    last_external: float = 0.0
    settled: int = 0
    missing: int = 0
    surplus: int = 0


class Auditor:
    """Compares what was sent with what arrived, for every decode engine."""

    def __init__(self, ledger: Ledger, observers: Observers) -> None:
        self._ledger = ledger
        self._observers = observers
        self._accounts: dict[str, _Account] = {}
        self._blind: set[str] = set()

    def asked(self, decode: str, prompt_tokens: int) -> None:
        """A decode engine was given the KV of a prompt. It may count it at once, long before we see any data."""
        if (account := self._accounts.get(decode)) is not None:
            account.loading += self._blocks(prompt_tokens)

    def over(self, decode: str, prompt_tokens: int, *, loaded: bool) -> None:
        """That leg is over; `loaded`: the engine has shown data for it, so the KV must have arrived."""
        if (account := self._accounts.get(decode)) is not None:
            account.loading = max(0, account.loading - self._blocks(prompt_tokens))
            account.expected += self._blocks(prompt_tokens) if loaded else 0

    def _blocks(self, prompt_tokens: int) -> int:
        block = self._ledger.block_size() or 1
        return prompt_tokens // block * block

    def compared(self, prefill: str, decode: str, prefill_tokens: int, decode_tokens: int) -> None:
        """A split answer is whole: its prompt's length by both engines. Different lengths mean different prompts."""
        if prefill_tokens and decode_tokens and prefill_tokens != decode_tokens:
            self._ledger.eject(prefill, decode)
            self._observers.notify(PairEjected(prefill, decode, prefill_tokens, decode_tokens))

    def scraped(self, node: Node, scrape: Scrape) -> None:
        """An engine's counters have been read."""
        if node.role is not Role.DECODE:
            return
        if not scrape.by_source:
            self._blind.add(node.url)
            return
        self._blind.discard(node.url)
        external = scrape.by_source.get(EXTERNAL, 0.0)
        local = scrape.by_source.get(LOCAL_HIT, 0.0)
        account = self._accounts.get(node.url)
        restarted = account is None or account.started != scrape.started or external < account.last_external
        if account is None or restarted:
            self._accounts[node.url] = _Account(scrape.started, external, local, last_external=external)
            return
        account.last_external = external
        # Prompts that the decode engine had cached need not move; its own hits are all it can have had.
        arrived = int(external - account.base_external) + int(local - account.base_local)
        surplus = max(0, arrived - account.expected - account.loading)
        account.base_external += min(surplus, account.surplus)
        account.surplus = max(0, surplus - account.surplus)
        due, account.due, account.next_due = account.due, account.next_due, account.expected
        missing = max(account.missing, due - arrived)
        fresh = due - account.settled
        if fresh > 0 or missing > account.missing:
            new_missing = missing - account.missing
            self._observers.notify(KvCounted(node.url, moved=max(0, fresh - new_missing), missing=new_missing))
            account.settled = max(account.settled, due)
        if missing > account.missing:
            self._observers.notify(KvShortfall(node.url, missing - account.missing, fresh))
            account.missing = missing

    def missing(self) -> dict[str, int]:
        """Return for each decode engine how many prompt tokens never arrived since it started."""
        return {url: account.missing for url, account in self._accounts.items()}

    def shortcomings(self) -> list[str]:
        """Return what an operator must know, a sentence each."""
        found = [
            f"decode {url}: {account.missing} of {account.settled} prompt tokens never arrived by KV transfer: it computes "
            "them again (is its --kv-transfer-config right, can it reach the prefill engine's side channel?)"
            for url, account in self._accounts.items()
            if account.missing
        ]
        found += [f"decode {url}: its /metrics do not say where prompt tokens come from" for url in sorted(self._blind)]
        return found
