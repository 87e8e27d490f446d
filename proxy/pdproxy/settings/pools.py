"""Pools: `pools[]`, with how a request's engines are chosen and what is wanted of its times. Their
checks.

Owns names, units, bounds and defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta

from pdproxy.engine_model.profile import load
from pdproxy.scheduling import placements, policies
from pdproxy.scheduling.placements import AUTO, SPLIT
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.errors import KeyPath, Mistakes, quote, spell_key
from pdproxy.settings.kv import Cpu, KvEvents, LMCache, Prefixes, Turns
from pdproxy.settings.section import (
    AtOnce,
    Count,
    File,
    HeaderName,
    Option,
    Port,
    Seconds,
    Section,
    Text,
    WhileSame,
    names_of,
)
from pdproxy.settings.tls import EngineTls
from pdproxy.transfer import encoders, registry

Connector = Annotated[str, names_of(registry.choices)]
EcConnector = Annotated[str, names_of(lambda: encoders.CONTRACTS)]
Dispatch = Literal["sequential", "concurrent"]
RemoteHost = Literal["engine", "url"]
AloneLimit = Literal["always", "never"] | Count
VLLM_BOOTSTRAP_PORT = 8998
"""vLLM's default for VLLM_MOONCAKE_BOOTSTRAP_PORT. vllm-omni assumes 25201 if its stages name
none.
"""
Tokenize = Literal["off", "auto", "always"]
Weight = Annotated[float, Meta(ge=0, le=1_000_000)]
MissWeight = Annotated[float, Meta(ge=0.01, le=100)]

Policy = Annotated[str, names_of(policies.names)]
PlacementName = Annotated[str, names_of(placements.names)]


def _connectors() -> str:
    return (
        f"how KV is transferred, as the engines are configured: {', '.join(registry.names())}; "
        f"auto: ask the engines"
    )


def _policies() -> str:
    return (
        f"who serves a request: a placement ({', '.join(placements.names())}), or a policy for "
        f"all legs "
        f"({', '.join(policies.names())}) "
        f"(default: {placements.AUTO} where it has something to decide by, else "
        f"{PoolPolicy().prefill})"
    )


_WHILE_SAME_PARTS = WhileSame("placement", "asks_the_index")
"""A pool has its parts from the start: what decides whether prompts are split, and perhaps an index
of prefixes.
"""


class PoolPolicy(Section, frozen=True):
    """How an engine is chosen among those that can serve a request (docs/guide/policies.md).

    In place of the section, a name alone: of a placement, or of a policy for both legs.
    """

    placement: PlacementName | None = None
    """What decides whether a prompt is split. null: auto with an engine of role any, with slo or
    with profile, if no other policy than least_load is named below; else split.
      split  it is if it can be, and the policies below choose the engines
      auto   by predicted times, which also choose the engines: least cost against slo
             (docs/internals/auto.md)
    """

    prefill: AtOnce[Policy] = "least_load"
    """For the prefill leg. least_load: the fewest outstanding prompt bytes, which determine a
    prefill engine's time.
      least_load    the least load; engines with the same load take turns
      round_robin   engines take turns, whatever their load
      random        any engine, whatever its load
      power_of_two  of two engines that chance draws, the one with less load; for several proxies
                    before the same engines
      session       a conversation's requests go to one engine, as far as load allows; see
                    session_header
      prefix        the engine that has most of the prompt in its cache, weighed against its load
    """

    decode: AtOnce[Policy] = "least_load"
    """For the decode leg, and for requests that one engine serves: as above. least_load: the fewest
    active streams, which determine a decode engine's step time.
    """

    session_header: AtOnce[HeaderName] = "X-Session-ID"
    """For policy session: the header that names a conversation. In requests without it, the body's
    user does.
    """

    refuse_late: AtOnce[bool] = False
    """Whether a request is refused with 503 and Retry-After that no engine can serve within slo.
    Only with a placement that predicts times.
    """

    @classmethod
    def of_text(cls, text: str) -> dict[str, object] | None:
        """See `Section`."""
        if text in placements.names():
            return {"placement": text}
        if text not in policies.names():
            return None
        return {"placement": placements.SPLIT, "prefill": text, "decode": text}

    @classmethod
    def texts(cls) -> tuple[str, ...]:
        """See `Section`."""
        return (*placements.names(), *policies.names())


class PoolSlo(Section, frozen=True):
    """What is wanted of a request's times, in seconds, for placements that predict them. How many
    engines are needed depends on tpot, too (docs/guide/scaling.md).

    null: no bound. A request can name its own in milliseconds: X-PDProxy-SLO-TTFT-MS,
    X-PDProxy-SLO-TPOT-MS, X-PDProxy-SLO-Gap-MS.
    """

    ttft: AtOnce[Seconds | None] = None
    """From the request's arrival to its first token."""

    tpot: AtOnce[Seconds | None] = None
    """The mean time per token after the first."""

    gap: AtOnce[Seconds | None] = None
    """The longest time between two tokens."""

    long_prompt: AtOnce[Count | None] = None
    """Tokens from which on a prompt is long: a request that misses the objective with such a prompt
    counts long_weight. null: all prompts count the same.
    """

    long_weight: AtOnce[MissWeight] = 1.0
    """As many misses of other requests as one of a long prompt counts. Above 1 fewer long prompts
    are late, and more of the others; below 1 it is the reverse.
    """


class Pool(Section, frozen=True):
    """Engines that can work together, and how."""

    name: Text = "default"
    """The pool's name in logs, metrics and /ready. Each pool has one of its own."""

    models: AtOnce[tuple[Text, ...]] = ()
    """Models whose requests this pool gets although no engine of it lists them, if no other pool's
    does: names, or patterns such as "llama-*" or "*". The longest pattern that fits a name counts.
    """

    aliases: AtOnce[dict[str, Text]] = {}  # noqa: RUF012 - a struct copies its defaults
    """Other names of models, each with the name that the engines know, such as {fast: llama-8b}."""

    weight: AtOnce[Weight] = 1.0
    """Where several pools serve a model, this pool's part of the requests. 0: only what no other
    pool serves.
    """

    connector: Annotated[Connector, Option(_connectors, "NAME", "--connector")] = "nixl"
    """How KV gets from prefill to decode engines: the kv_connector that they were started with
    (docs/guide/connectors.md).
      nixl        NixlConnector: the decode engine pulls
      nixl-push   NixlPushConnector: both legs at once, the prefill engine pushes
      mooncake    MooncakeConnector: both legs at once, by an id of the proxy's; needs the prefill
                  engines' bootstrap servers
      lmcache-pd  LMCache with enable_pd: the prefill engine pushes, and sends a notice over ZMQ
                  when it has finished
      lmcache-mp  LMCache as a separate process: it posts to /api/v1/telemetry at kv_ready's port
                  when KV is stored
      shared      storage that both engines reach: ExampleConnector, Mooncake's store, LMCache's
                  shared storage
      moriio      MoRIIOConnector: the decode engine reads, or the prefill engine writes; engines
                  register with the proxy
      p2p-nccl    P2pNcclConnector (vLLM up to 0.23): the prefill engine sends; engines register
                  with the proxy
      kvstore-keys  a store under keys that the proxy makes (vLLM's pull request 12957; historic)
      cpu         vLLM's CPUConnector (pull request 18332; historic): the prefill engine pushes to
                  the decode engine's host memory
      auto        the engines are asked at the start; if they do not show it, the proxy does not
                  start
    """

    ec_connector: EcConnector = "example"
    """How the outputs of encoder engines get to those that use them: the ec_connector that all of
    them were started with (docs/guide/models.md).
      example   ECExampleConnector: files in a folder that all of them reach
      cpu       ECCPUConnector with ec_enable_nixl: the other engine reads them from host memory
      mooncake  ECMooncakeConnector: they are pushed to the other engine's facts.ec_address
    """

    dispatch: Dispatch | None = None
    """The order of a prompt's two legs: sequential (the prefill leg first) or concurrent (both at
    once: the decode engine waits for the KV while the prompt is prefilled). null: the connector's
    usual order, and sequential with engines of role any or by_label: at once, two of them can wait
    for each other's KV for ever. Most connectors can do one of them only.
    """

    alone: AtOnce[AloneLimit] = "always"
    """Which prompts a decode engine may serve whole where they are not split
    (docs/guide/policies.md): always; never; or up to so many tokens, such as 4000: it computes a
    prompt between the tokens of its streams, which wait. Tokens that are not known are taken to be
    a fourth of the text's bytes. Others get 503 with Retry-After, unless an engine of another role
    serves whole.
    """

    remote_host: RemoteHost = "engine"
    """Which host decode engines connect to for KV (nixl, nixl-push): the one that the prefill
    engine names in its KV handles (engine), or the one of its URL (url), for engines that do not
    know how others reach them (address translation). With turns.bidirectional also which host
    prefill engines connect to.
    """

    lmcache: LMCache = LMCache()

    cpu: Cpu = Cpu()

    kv_ready_port: Port | None = None
    """Port to which this pool's engines send notices. null: kv_ready.port. Two pools can't share
    one.
    """

    registration_port: Port | None = None
    """Port at which this pool's engines register. null: registration.port. Two pools can't share
    one.
    """

    bootstrap_port: Port = VLLM_BOOTSTRAP_PORT
    """Port of a prefill engine's Mooncake bootstrap server, if its facts and its stage
    (--stage-config) name none. The default is vLLM's own, VLLM_MOONCAKE_BOOTSTRAP_PORT; vllm-omni's
    stages assume 25201, and mostly name it.
    """

    tokenize: Annotated[
        Tokenize,
        Option(
            "when the proxy makes the token ids of prompts: off; auto: where the connector needs "
            "them, or prefixes or turns use them; always: also to save engines this work",
            "WHEN",
            "--tokenize",
        ),
    ] = "auto"
    """Whether the proxy turns prompts into token ids (--tokenize): off, auto (only if the connector
    needs ids, or turns use them, or a policy or placement that asks for prefixes: prefix, auto), or
    always, which saves the prefill engine the same work (not with shared and lmcache-mp, whose
    engines take no ids). The ids are compared with each engine's when it starts; a difference
    switches this off, and the log, /ready and pdproxy_tokenize_agrees report it.
    """

    tokenizer: Annotated[
        File | None,
        Option(
            "folder of a model with its tokenizer (default: the model that the engines report, "
            "if it is on this machine)",
            "FOLDER",
            "--tokenizer",
        ),
    ] = None
    """A model's folder with its tokenizer and chat template (--tokenizer). null: the model that the
    engines report, if this machine has it; otherwise an engine is asked for the ids that the
    connector needs.
    """

    turns: Turns = Turns()

    kv_events: KvEvents = KvEvents()
    """Engines' reports of the blocks of KV that they have cached (their --kv-events-config), over
    ZMQ (docs/guide/connectors.md).
    """

    prefixes: Prefixes = Prefixes()

    policy: Annotated[
        Annotated[PoolPolicy, _WHILE_SAME_PARTS], Option(_policies, "NAME", "--policy")
    ] = PoolPolicy()

    slo: Annotated[PoolSlo, _WHILE_SAME_PARTS] = PoolSlo()

    profile: File | None = None
    """How long an engine's work takes: the name of a profile that pdproxy ships (h200-8b), or the
    file of one, which `pdproxy calibrate` makes. null: not known. For placements that predict
    times, and for how many engines are needed (docs/guide/scaling.md).
    """

    pair_within: tuple[Text, ...] | None = None
    """Labels of engines (nodes[].labels): two engines share work only if they have the same values
    of all of these, such as [rack]. null: of the label revision, which engines need not have. With
    revision among them, or null, requests go by revision, too (docs/guide/policies.md).
    """

    tls: EngineTls = EngineTls()
    """TLS to engines with an https:// URL. Files are read again when they change, like those of
    listen.tls. An engine whose certificate is not trusted counts as down; /ready and the log give
    the reason.
    """

    nodes: AtOnce[tuple[ConfiguredEngine, ...]] = ()
    """The engines; --encode, --prefill, --decode, --aggregated and --any add to these. Prefill
    engines need a decode engine.
    """

    @property
    def fixed_nodes(self) -> tuple[ConfiguredEngine, ...]:
        """The nodes that are an engine each: the settings have its URL."""
        return tuple(node for node in self.nodes if not node.is_source)

    @property
    def source_nodes(self) -> tuple[ConfiguredEngine, ...]:
        """The nodes that stand for all engines that a source finds."""
        return tuple(node for node in self.nodes if node.is_source)

    @property
    def alone_up_to(self) -> int | None:
        """How many tokens a prompt may have that a decode engine serves whole; None: any number."""
        return (
            {"always": None, "never": 0}[self.alone] if isinstance(self.alone, str) else self.alone
        )

    @property
    def placement(self) -> str:
        """What decides whether a prompt is split: `policy.placement`, by default `auto` where it
        has something to decide by.

        That is an engine of role any, an objective or a profile. With a policy for a leg it is
        `split`.
        """
        policy, usual = self.policy, PoolPolicy()
        if policy.placement is not None:
            return policy.placement
        if (policy.prefill, policy.decode) != (usual.prefill, usual.decode):
            return SPLIT
        decides = (
            self.slo != PoolSlo()
            or self.profile is not None
            or any(one.role == "any" for one in self.nodes)
        )
        return AUTO if decides else SPLIT

    @property
    def asks_the_index(self) -> bool:
        """Whether engines are chosen by what they have cached."""
        asked = {self.policy.prefill, self.policy.decode} & policies.ASK_THE_INDEX
        return bool(asked) or self.placement in placements.ASK_THE_INDEX


def check_placing(
    pool: Pool, nodes: Sequence[ConfiguredEngine], path: KeyPath, found: Mistakes
) -> None:
    """Check a pool's labels and profiles. Mistakes are added to `found`."""
    if pool.placement == SPLIT:
        useless = {
            (*path, "policy", "refuse_late"): pool.policy.refuse_late,
            (*path, "slo"): pool.slo != PoolSlo(),
            (*path, "profile"): pool.profile is not None,
        }
        for key in (key for key, given in useless.items() if given):
            text = f"has no effect with placement {SPLIT}, which predicts no times"
            found.add(key, f"{spell_key(key)}: {text}{found.source(key)}")
    if pool.slo.long_weight != PoolSlo().long_weight and pool.slo.long_prompt is None:
        key = (*path, "slo", "long_weight")
        text = "has no effect without long_prompt, the tokens from which on a prompt is long"
        found.add(key, f"{spell_key(key)}: {text}{found.source(key)}")
    for at, name in enumerate(pool.pair_within or ()):
        key = (*path, "pair_within", at)
        without = [
            node.url
            for node in nodes
            if (node.prefills or node.decodes) and name not in node.labels
        ]
        if without:
            more = f" and {len(without) - 1} more" if len(without) > 1 else ""
            text = f"{quote(name)}: {without[0]}{more} has no such label"
            found.add(key, f"{spell_key(key)}: {text}{found.source(key)}")
    named: dict[KeyPath, str | None] = {(*path, "profile"): pool.profile}
    named |= {
        (*path, "nodes", index, "facts", "profile"): node.facts.profile
        for index, node in enumerate(nodes)
    }
    read: dict[str, str | None] = {}
    for key, profile in named.items():
        if profile is None:
            continue
        if profile not in read:
            read[profile] = _why_not(profile)
        if (why := read[profile]) is not None:
            found.add(key, f"{spell_key(key)}: {why}{found.source(key)}")


def _why_not(name: str) -> str | None:
    """Return why a profile can't be used, in one line; None if it can."""
    try:
        load(name)
    except ValueError as error:
        return " ".join(str(error).split())
    return None
