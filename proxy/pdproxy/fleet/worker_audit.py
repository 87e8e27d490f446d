"""The audit of several workers: one compares, and expects the KV that the requests of all have
moved.

Owns this worker's column of the table of moved KV: for each decode engine, the prompt tokens that
are under way, and those of all legs that have shown data. The second are sums that outlive a
worker. A restart of the engine begins a new account at the sum of then.
"""

from __future__ import annotations

from pdproxy.fleet.audit import Auditor
from pdproxy.fleet.engine import AuditAccount, Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.shared_table import Column, Others, key_of
from pdproxy.observe.events import Observers
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.upstream.metrics_page import Scrape

LOADING, ARRIVED = range(2)
MEASURES = 2
"""Numbers of the table for each decode engine, in prompt tokens: under way, arrived."""
KEPT = frozenset({ARRIVED})


class WorkerAuditor(Auditor):
    """The `Auditor` of one of several workers. `column`: its own part of the table of moved KV,
    `others`: other parts.
    """

    def __init__(
        self,
        engines: EngineRegistry,
        ledger: Ledger,
        observers: Observers,
        column: Column,
        others: Others,
    ) -> None:
        super().__init__(engines, ledger, observers)
        self._column = column
        self._others = others
        self._rows: dict[Engine | str, memoryview] = {}
        """This worker's numbers, by the engines and URLs for which it was asked. The table has no
        space for others.
        """
        self._bases: dict[str, int] = {}
        """By the URL of a decode engine: what had arrived when its account began."""

    def asked(self, decode: Engine | str, prompt_tokens: int) -> None:
        """See `Auditor`."""
        row = self._rows.get(decode) or self._row(decode)
        if row is not None:
            row[LOADING] += self._blocks(prompt_tokens)

    def over(self, decode: Engine | str, prompt_tokens: int, *, loaded: bool) -> None:
        """See `Auditor`."""
        row = self._rows.get(decode) or self._row(decode)
        if row is not None:
            moved = self._blocks(prompt_tokens)
            left = row[LOADING] - moved
            row[LOADING] = max(0, left)
            if loaded:
                row[ARRIVED] += moved

    def _row(self, decode: Engine | str) -> memoryview | None:
        url = decode if isinstance(decode, str) else decode.url
        row = self._rows.get(decode)
        if (
            row is None
            and url in self._engines.known
            and (row := self._column.row(key_of(url))) is not None
        ):
            self._rows[decode] = row
        return row

    def scraped(self, engine: Engine, scrape: Scrape) -> None:
        """See `Auditor`."""
        if Role.DECODE not in engine.in_ledger.uses:
            return
        url, account = engine.url, engine.audit.account
        loading, arrived = self._others.sums(key_of(url))
        if (row := self._row(url)) is not None:
            loading, arrived = loading + row[LOADING], arrived + row[ARRIVED]
        if account is not None:
            account.loading = loading
            account.expected = arrived - self._bases.setdefault(url, arrived - account.expected)
        super().scraped(engine, scrape)
        if engine.audit.account is not account:
            self._bases[url] = arrived

    def base(self, url: str) -> int:
        """Return what had arrived at an engine when its account began."""
        return self._bases.get(url, 0)

    def follow(
        self, engine: Engine, account: AuditAccount | None, base: int, *, blind: bool
    ) -> None:
        """Take over the account of the worker that compares: this one may have to go on with it."""
        engine.audit.account, engine.audit.blind = account, blind
        self._bases[engine.url] = base

    def forget(self, url: str) -> None:
        """Forget an engine: nothing needs it any more."""
        self._column.drop(key_of(url))
        for one in [one for one in self._rows if (one if isinstance(one, str) else one.url) == url]:
            del self._rows[one]
        self._bases.pop(url, None)
