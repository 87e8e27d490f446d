"""Adds engines from the settings to the registry and removes them, at the start and while requests
are served.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from pdproxy.app.credentials import Credentials
from pdproxy.app.transfer import buffer_capacity, kv_host_of, receiver_of
from pdproxy.engine_model.fitted import FittedRanges
from pdproxy.engine_model.hardware import Hardware
from pdproxy.engine_model.profile import Profile, load
from pdproxy.fleet.engine import Engine, EngineCredentials
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.registration import of_url
from pdproxy.kit.clock import Clock
from pdproxy.scheduling.auto.times import WorkTimes
from pdproxy.scheduling.ledger_engine import EngineSpec, LedgerEngine, Role
from pdproxy.scheduling.wanted_engines import EngineSize
from pdproxy.settings.crosscheck import checked_node, checked_nodes
from pdproxy.settings.engines import (
    ConfiguredEngine,
    Facts,
    both_schemes,
    engine_url,
    refuse_networks,
)
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.kv import EngineKvEvents
from pdproxy.settings.schema import Settings
from pdproxy.settings.transfer import bootstrap_address, within
from pdproxy.transfer.registry import entry_of
from pdproxy.upstream.answer_budget import AnswerBudget
from pdproxy.upstream.client import EngineClient


class Profiles:
    """How long engines' work takes, by the profiles that the settings name. `pool`: of all engines
    that have none of their own.

    Raises:
        SettingsError: a profile can't be read any more.
    """

    def __init__(self, pool: str | None) -> None:
        self._pool = _read(pool)
        self._engines: dict[str, Profile] = {}
        self._chunks: dict[str, int] = {}
        self._facts: dict[str, Facts] = {}

    def set(self, engine: ConfiguredEngine) -> None:
        """Read an engine's own profile, if it has one, and note the most tokens of its steps.

        Raises:
            SettingsError: it can't be read any more.
        """
        own, chunk = _read(engine.facts.profile), engine.facts.max_num_batched_tokens
        if own is None:
            self._engines.pop(engine.url, None)
        else:
            self._engines[engine.url] = own
        if chunk is None:
            self._chunks.pop(engine.url, None)
        else:
            self._chunks[engine.url] = chunk
        self._facts[engine.url] = engine.facts

    def forget(self, url: str) -> None:
        """Forget a removed engine."""
        self._engines.pop(url, None)
        self._chunks.pop(url, None)
        self._facts.pop(url, None)

    def hardware(self, url: str) -> Hardware | None:
        """Return the times of an engine, None where no profile has them."""
        profile = self._engines.get(url, self._pool)
        return None if profile is None else profile.hardware

    def fitted(self, url: str) -> FittedRanges | None:
        """Return what the times of an engine were fitted to, None where no profile says it."""
        profile = self._engines.get(url, self._pool)
        return None if profile is None else profile.fitted

    def chunk(self, url: str) -> int | None:
        """Return the most tokens of a step of an engine, None where neither its settings nor a
        profile has them.
        """
        if url in self._chunks:
            return self._chunks[url]
        profile = self._engines.get(url, self._pool)
        return None if profile is None else profile.engine.max_num_batched_tokens

    def size(self, engine: LedgerEngine) -> EngineSize:
        """Return what an engine can do. What it has reported itself, and then its settings, go
        before its profile.
        """
        url, evidence = engine.url, engine.evidence
        profile, facts = self._engines.get(url, self._pool), self._facts.get(url)
        seqs, kv_tokens, times = None if facts is None else facts.max_num_seqs, None, None
        if evidence is not None and evidence.kv_blocks and evidence.block_size:
            ranks = 1 if facts is None else facts.data_parallel_size
            kv_tokens = evidence.kv_blocks * evidence.block_size * ranks
        if profile is not None:
            limits = profile.engine
            seqs = limits.max_num_seqs if seqs is None else seqs
            kv_tokens = kv_tokens or limits.num_gpu_blocks * limits.block_size
            if profile.hardware.speed:
                times = WorkTimes(
                    profile.hardware, self._chunks.get(url, limits.max_num_batched_tokens)
                )
        return EngineSize(times=times, max_num_seqs=seqs, kv_tokens=kv_tokens)


def _read(name: str | None) -> Profile | None:
    try:
        return None if name is None else load(name)
    except ValueError as error:
        raise SettingsError(str(error)) from None


class EngineSetup:
    """Adds engines with all that belongs to them. `client`: the class of engines' clients."""

    def __init__(
        self,
        settings: Settings,
        credentials: Credentials,
        engines: EngineRegistry,
        clock: Clock,
        answers: AnswerBudget,
        client: type[EngineClient],
        profiles: Profiles,
    ) -> None:
        self._profiles = profiles
        self._settings = settings
        self._credentials = credentials
        self._engines = engines
        self._clock = clock
        self._answers = answers
        self._client = client
        self._decode_waits = (
            entry_of(settings.pool.connector).contract(settings).holder.decode_waits
        )
        self._networks = settings.engines.allowed
        self._ledger_engines: dict[str, ConfiguredEngine] = {}

    def add_configured(self) -> tuple[ConfiguredEngine, ...]:
        """Add the engines of the settings, which were checked together when the settings were read.
        Return them.
        """
        engines = self._settings.pool.fixed_nodes
        for engine in engines:
            self._add(engine)
        return engines

    def add(self, engine: ConfiguredEngine, *, is_checked: bool = False) -> Engine:
        """Add an engine. It gets requests once it has answered a probe. What fails changes nothing.

        `is_checked`: it is as `checked` or `checked_all` has just returned it.

        Raises:
            SettingsError: it can't work in this pool, or a file of its key or certificates can't be
                used.
            ValueError: there is an engine with this URL.
        """
        if engine.url in self._engines:
            raise ValueError(f"{engine.url} is there already")
        if not is_checked:
            engine = checked_node(engine, self._settings.pool, tuple(self._ledger_engines.values()))
        return self._add(engine)

    def checked(self, engine: ConfiguredEngine) -> ConfiguredEngine:
        """Return the settings of an engine that is to be added, or is to take the place of the one
        with its URL.

        Raises:
            SettingsError: it can't work in this pool, or one of its files can't be used.
        """
        url = engine.url
        with contextlib.suppress(SettingsError):  # which the check below reports
            url = engine_url(url, ("url",))
        self._check_other_pools(url)
        engine = checked_node(
            engine,
            self._settings.pool,
            [one for known, one in self._ledger_engines.items() if known != url],
        )
        self._check_files(engine)
        return engine

    def checked_all(self, engines: Sequence[ConfiguredEngine]) -> list[ConfiguredEngine]:
        """Do as `checked` for several engines that are to be added together, none of which is
        there.

        Raises:
            SettingsError: as there.
        """
        found = checked_nodes(engines, self._settings.pool, tuple(self._ledger_engines.values()))
        for engine in found:
            self._check_other_pools(engine.url)
            self._check_files(engine)
        return found

    def _check_other_pools(self, url: str) -> None:
        if any(
            one not in self._ledger_engines and self._credentials.knows(one)
            for one in both_schemes(url)
        ):
            raise SettingsError(
                f"{url} can't be added: it is an engine of another pool, or is still leaving it"
            )

    def _check_files(self, engine: ConfiguredEngine) -> None:
        refuse_networks([engine], self._networks)
        self._credentials.check(engine, self._settings.pool.tls)
        _read(engine.facts.profile)

    def _add(self, ledger_engine: ConfiguredEngine) -> Engine:
        credentials = self._credentials.of_engine(ledger_engine, self._settings.pool.tls)
        try:
            engine = self._made(ledger_engine, credentials)
        except Exception:
            self._credentials.forget(ledger_engine.url)
            raise
        self._ledger_engines[ledger_engine.url] = ledger_engine
        return engine

    def _made(self, engine: ConfiguredEngine, credentials: EngineCredentials) -> Engine:
        self._profiles.set(engine)
        receiver = receiver_of(engine)
        client = self._client(
            engine.url,
            connect_timeout=self._settings.deadlines.connect,
            keepalive=self._settings.limits.engine_keepalive,
            clock=self._clock,
            budget=self._answers,
            # Without keys of clients, their own header is forwarded: our key would open the engines
            # to everybody.
            key=credentials.key if self._credentials.keys.wanted else no_key,
            tls=credentials.tls,
            unacknowledged=self._settings.deadlines.unacknowledged,
            networks=self._networks,
        )
        return self._engines.add(
            EngineSpec(
                engine.url,
                Role(engine.role),
                frozenset(engine.sources),
                places=self._places(engine),
                serves_whole=engine.serves_whole,
                within=within(engine, self._settings.pool),
            ),
            client,
            credentials,
            block_size=engine.facts.block_size,
            receiver=receiver,
            buffer_capacity=buffer_capacity(self._settings.pool.lmcache)
            if receiver is not None
            else None,
            ranks=engine.facts.data_parallel_size,
            kv_host=kv_host_of(engine, self._settings.pool),
            tp_size=engine.facts.tensor_parallel_size,
            bootstrap=bootstrap_address(engine, self._settings.pool),
            ec_address=engine.facts.ec_address,
            registered_as=of_url(engine.url, engine.facts.registered_as),
            kv_lease=engine.facts.kv_lease_duration,
        )

    def _places(self, engine: ConfiguredEngine) -> int | None:
        """Return how many requests an engine may have before it gets no more prompts with pushed
        KV, None: any number.
        """
        return engine.facts.max_num_seqs if self._decode_waits and engine.decodes else None

    def kv_events(self, url: str) -> EngineKvEvents:
        """Return the settings of an engine's KV events."""
        return self._ledger_engines[url].facts.kv_events

    def remove(self, url: str) -> Engine:
        """Remove an engine. Legs to it that are under way go on.

        Raises:
            KeyError: there is no engine with this URL.
        """
        engine = self._engines.remove(url)
        self._credentials.forget(url)
        self._profiles.forget(url)
        del self._ledger_engines[url]
        return engine


def no_key(url: str = "") -> None:
    """Return the key of an engine whose clients send it themselves: none."""
