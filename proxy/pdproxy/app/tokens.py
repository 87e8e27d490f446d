"""Wiring of what tokenizes here, or of nothing at all: who doesn't want it has no thread, no library and no question for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from pdproxy.fleet.canary import Canaries
from pdproxy.kit.clock import Clock
from pdproxy.observe.events import Event, NodeChanged, Observers
from pdproxy.observe.metrics import Gauge
from pdproxy.scheduling.ledger import Ledger
from pdproxy.serving.dispatch.tokenizing import THREADS, Tokenizing
from pdproxy.settings.errors import SettingsError, quote
from pdproxy.settings.schema import Pool
from pdproxy.tokens import tokenizer as local
from pdproxy.tokens.errors import UnusableError
from pdproxy.tokens.ids import TokenIds
from pdproxy.tokens.tokenizer import LocalTokenizer
from pdproxy.upstream.admin import EngineAdmin


class Library(Protocol):
    """Where tokenizers come from: the module `pdproxy.tokens.tokenizer`, or a test's own."""

    def load(self, path: str) -> LocalTokenizer:
        """Load that of a model's folder; UnusableError if it can't be."""

    def find(self, name: str) -> LocalTokenizer:
        """Find that of a model by what an engine calls its root; UnusableError if there is none here."""


class _Transformers:
    def load(self, path: str) -> LocalTokenizer:
        return local.load(path)

    def find(self, name: str) -> LocalTokenizer:
        return local.find(name)


TRANSFORMERS: Library = _Transformers()


class ChangeHeard:
    """An observer that has the canaries asked again when an engine has changed."""

    def __init__(self) -> None:
        self.canaries: Canaries | None = None

    def notify(self, event: Event) -> None:
        """Take note."""
        if isinstance(event, NodeChanged) and self.canaries is not None:
            self.canaries.changed()


@dataclass(frozen=True, slots=True)
class Tokens:
    """What tokenizes here."""

    canaries: Canaries
    tokenizing: Tokenizing
    threads: ThreadPoolExecutor

    def gauges(self) -> list[Gauge]:
        """Return what the metrics page shows of it."""
        text = "Whether prompts may become token ids here, as the engine would make them"
        return [Gauge("pdproxy_tokenize_agrees", text, ("node", "model"), self.canaries.agreements)]

    def stop(self) -> None:
        """Let go of the threads; what they are at work on ends by itself."""
        self.threads.shutdown(wait=False, cancel_futures=True)


def tokens(
    pool: Pool,
    ledger: Ledger,
    admin: EngineAdmin,
    observers: Observers,
    clock: Clock,
    now: Callable[[], float],
    *,
    deadline: float,
    needed: bool,
    own_keys: bool,
    library: Library = TRANSFORMERS,
) -> Tokens | None:
    """Return what tokenizes for a pool, None if nothing is to be.

    `needed`: the connector can do nothing without ids; `own_keys`: clients bring keys of ours, so an engine is asked with ours.

    Raises:
        SettingsError: the tokenizer that the settings name can't be used.
    """
    if pool.tokenize == "off" or (pool.tokenize == "auto" and not needed):
        return None
    named: LocalTokenizer | None = None
    if pool.tokenizer is not None:
        try:
            named = library.load(pool.tokenizer)
        except UnusableError as error:
            raise SettingsError(f"pools[0].tokenizer: {quote(pool.tokenizer)}: {error}") from None
    threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")
    canaries = Canaries(ledger, admin, observers, threads, tokenizer=named, find=library.find)

    async def ask(url: str, body: bytes, authorization: bytes | None) -> TokenIds:
        # As on the data path: without keys of clients, theirs go on, and ours would open the engines to everybody.
        own = None if own_keys else (authorization or b"").decode("latin-1")
        return await admin.token_ids(url, body, timeout=deadline, authorization=own)

    tokenizing = Tokenizing(canaries, ask, ledger, observers, clock, now, threads, deadline=deadline, required=needed)
    return Tokens(canaries, tokenizing, threads)
