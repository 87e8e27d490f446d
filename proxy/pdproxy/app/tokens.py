"""Wiring of tokenizing in this process. Where it is not wanted, there are no threads, no library
and no requests for it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from pdproxy.app.share import PoolShare
from pdproxy.fleet.canary import Canaries
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.clock import Clock
from pdproxy.observe.events import Observers
from pdproxy.serving.dispatch.tokenizing import THREADS, Tokenizing
from pdproxy.settings.errors import SettingsError, quote
from pdproxy.settings.schema import Settings
from pdproxy.tokens import tokenizer as local
from pdproxy.tokens.errors import UnusableError
from pdproxy.tokens.ids import TokenIds
from pdproxy.tokens.tokenizer import LocalTokenizer
from pdproxy.upstream.admin import EngineAdmin


class Library(Protocol):
    """Where tokenizers come from: the module `pdproxy.tokens.tokenizer`, or a stand-in in tests."""

    def load(self, path: str) -> LocalTokenizer:
        """Load the tokenizer in a model's folder. Raises UnusableError if it can't be loaded."""

    def find(self, name: str) -> LocalTokenizer:
        """Find a tokenizer by the root that an engine reports for its model. Raises UnusableError
        if there is none here.
        """


class _Transformers:
    def load(self, path: str) -> LocalTokenizer:
        return local.load(path)

    def find(self, name: str) -> LocalTokenizer:
        return local.find(name)


TRANSFORMERS: Library = _Transformers()


@dataclass(frozen=True, slots=True)
class Tokens:
    """The parts that tokenize in this process."""

    canaries: Canaries
    tokenizing: Tokenizing
    threads: tuple[ThreadPoolExecutor, ...]

    def stop(self) -> None:
        """End the threads. Each one finishes the prompt that it is at work on."""
        for threads in self.threads:
            threads.shutdown(wait=False, cancel_futures=True)


def build_tokens(
    settings: Settings,
    engines: EngineRegistry,
    admin: EngineAdmin,
    observers: Observers,
    clock: Clock,
    own: PoolShare | None,
    *,
    needed: bool,
    wanted: bool,
    own_keys: bool,
    library: Library = TRANSFORMERS,
) -> Tokens | None:
    """Return what tokenizes for the pool of these settings, None if nothing does.

    `own`: see `build_ledger`. `needed`: the connector needs ids; `wanted`: something else uses them
    where they can be made; `own_keys`: clients send keys of the proxy, so engines are asked with
    the proxy's key.

    Raises:
        SettingsError: the tokenizer that the settings name can't be used, or nothing can tokenize.
    """
    pool, deadlines = settings.pool, settings.deadlines
    if pool.tokenize == "off" or (pool.tokenize == "auto" and not needed and not wanted):
        return None
    named: LocalTokenizer | None = None
    setting = "tokenize: always"
    try:
        if pool.tokenizer is not None:
            setting = f"tokenizer: {quote(pool.tokenizer)}"
            named = library.load(pool.tokenizer)
        elif pool.tokenize == "always":
            local.check_installed()
    except UnusableError as error:
        raise SettingsError(f"pools[0].{setting}: {error}") from None
    threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")
    behind = ThreadPoolExecutor(1, thread_name_prefix="tokenize behind")
    canaries = Canaries(engines, admin, observers, threads, tokenizer=named, find=library.find)
    if own is not None:
        own.share_canaries(canaries, engines)

    async def ask(url: str, body: bytes, authorization: bytes | None) -> TokenIds:
        # As on the data path: without keys of clients, their own header is forwarded. Our key would
        # open engines to everybody.
        own = None if own_keys else (authorization or b"").decode("latin-1")
        return await admin.token_ids(url, body, timeout=deadlines.tokenize, authorization=own)

    tokenizing = Tokenizing(
        canaries,
        ask,
        engines,
        observers,
        clock,
        clock.now,
        threads,
        behind,
        deadlines=deadlines,
        required=needed,
    )
    return Tokens(canaries, tokenizing, (threads, behind))
