"""One engine and all that the proxy knows about it: one object, which every part of the proxy uses.

Owns no behaviour. Each part of the state has one writer, which its docstring names.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pdproxy.fleet.open_legs import OpenLegs
from pdproxy.fleet.peers import Peers
from pdproxy.scheduling.ledger_engine import LedgerEngine
from pdproxy.tokens.canaries import Agreement, CanaryIds
from pdproxy.tokens.tokenizer import LocalTokenizer
from pdproxy.transfer.contract import Receiver
from pdproxy.upstream.client import EngineClient
from pdproxy.wire.route import Route

PromptKind = tuple[str | None, Route, bool]
"""Model, route, and whether there are tools: prompts of one kind are tokenized in the same way."""


@dataclass(frozen=True, slots=True)
class EngineCredentials:
    """The bearer token for an engine, and the TLS context for its connections. Both may change:
    call them at each use.
    """

    key: Callable[[], str | None] = lambda: None
    tls: Callable[[], ssl.SSLContext | None] = lambda: None


@dataclass(slots=True)
class ProbeState:
    """Written by the `Prober`. `late`: health questions in a row that timed out; `wake`: set when a
    probe is wanted now.
    """

    late: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class AuditAccount:
    """The audit of one run of a decode engine, in prompt tokens. Written by the `Auditor`.

    `loading` is under way; `expected` has shown data; `due` is what `expected` was two scrapes
    before, so that an engine has at least that time to count what it was sent last. `surplus` is
    what the engine counted beyond `expected`: requests whose clients left before the first data, or
    another proxy's requests. A surplus that lasts for two scrapes is written off, so that it can't
    hide a later shortfall.
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


@dataclass(slots=True)
class AuditState:
    """Written by the `Auditor`. `account` is None until the first scrape; `blind`: the engine's
    metrics show no sources.
    """

    account: AuditAccount | None = None
    blind: bool = False


@dataclass(slots=True)
class ReceiveBuffer:
    """A decode engine's receive buffer, in chunks of KV. Written by `serving.kv.buffers`."""

    capacity: int
    taken: int = 0


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one run of an engine answered for one base model. `why`: why nothing is tokenized here
    for it, "" if it is.

    `answers`: the engine's own ids, by the canaries' names.
    """

    tokenizer: LocalTokenizer | None
    agreement: Agreement
    why: str
    answers: Mapping[str, CanaryIds] = field(default_factory=dict)

    def compatible(self, other: Judgement) -> bool:
        """Return whether a tokenizer that agrees with one agrees with both: they share it, or gave
        the same answers.
        """
        return self.tokenizer is other.tokenizer or self.answers == other.answers


@dataclass(slots=True)
class EngineRun:
    """What was learned of one run of an engine. A restart begins another one.

    `judgements` by base model, None until the engine has answered; written by `Canaries`. `proven`:
    how many prompts of a kind were sent since the engine has shown the same ids; written by
    `TokenizerCheck`. `peers`: where other engines reach its ranks; written by what
    `Capabilities.peers_from` names.
    """

    number: int
    peers: Peers
    judgements: dict[str, Judgement] | None = None
    proven: dict[PromptKind, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Engine:
    """One engine. Made by `EngineRegistry.add`.

    - `in_ledger`: the engine as the ledger has it.
    - `client`, `credentials`: how legs are sent to it.
    - `block_size`: tokens in a KV block, as configured. None: as its metrics show.
    - `receiver`: where it receives KV that is pushed; `buffer`: its bounded receive buffer. None
      where there is none.
    - `ranks`: its data-parallel size: how many ranks answer at its URL, 1 without data parallelism.
      A leg goes to a rank of the engine's choice unless it has the header `X-data-parallel-rank`
      (`transfer.peers.Peer.headers`).
    - `tp_size`: its tensor-parallel size: how many GPUs one data-parallel rank has. None: not
      known.
    - `kv_host`: the host at which other engines reach its KV. None: the one that it names itself.
    - `bootstrap`: the URL of its bootstrap server, None if it has none.
    - `ec_address`: the `host:port` at which it receives encoder outputs that are pushed; None: not
      known.
    - `registered_as`: the `host:port` that it registers as its HTTP address; "" if its connector's
      engines do not register.
    - `kv_lease`: seconds for which it keeps KV that nobody reads, as configured. None: as its
      connector does.
    - `kv_expired`: how many of its KV handles have expired, as it has reported last; None: it does
      not report it. Written by `app.capacity`, or taken over with the engine's state.
    - `kv_usage`: the part of its KV blocks that are in use, 0 to 1, as it has reported last; None:
      it does not report it. Written by `app.capacity`, in the process that probes engines.
    - `probes`, `audit`, `run`: state, each with one writer. `open_legs`: legs add and remove
      themselves.
    """

    in_ledger: LedgerEngine
    client: EngineClient
    credentials: EngineCredentials = EngineCredentials()
    block_size: int | None = None
    receiver: Receiver | None = None
    buffer: ReceiveBuffer | None = None
    ranks: int = 1
    kv_host: str | None = None
    tp_size: int | None = None
    bootstrap: str | None = None
    registered_as: str = ""
    kv_lease: float | None = None
    ec_address: str | None = None
    kv_expired: float | None = None
    kv_usage: float | None = None
    probes: ProbeState = field(default_factory=ProbeState)
    audit: AuditState = field(default_factory=AuditState)
    open_legs: OpenLegs = field(default_factory=OpenLegs)
    _run: EngineRun | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """The engine's identity."""
        return self.in_ledger.spec.url

    @property
    def run(self) -> EngineRun:
        """What was learned of the engine's present run."""
        if self._run is None or self._run.number != self.in_ledger.run_number:
            self._run = EngineRun(self.in_ledger.run_number, Peers(self.ranks))
        return self._run
