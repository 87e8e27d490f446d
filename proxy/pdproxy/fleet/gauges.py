"""The gauges of engines, and which engines have metrics of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter

from pdproxy.fleet.engine import Engine
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.fleet.member import Member
from pdproxy.kit.text import truncate
from pdproxy.observe.description import NODE, ROLE, Label, MergeRule, Samples, gauge
from pdproxy.observe.events import Observers
from pdproxy.observe.metrics import Metrics
from pdproxy.scheduling.ledger import Ledger
from pdproxy.scheduling.ledger_engine import PREFILL, STATES
from pdproxy.scheduling.revisions import Revisions

NODE_INFO = gauge(
    "pdproxy_node_info",
    "bool",
    "Always 1; the labels are an engine's role, its pool, and labels of its own",
    NODE,
    ROLE,
    Label("pool", text="the name of its pool"),
    # Prometheus has a label pod of its own there: the pod of the proxy.
    Label("engine_pod", text="its label pod: the name of its pod on Kubernetes, or nothing"),
    Label("revision", text="its label revision, or nothing"),
    workers=MergeRule.MOST,
)
NODE_INFLIGHT = gauge(
    "pdproxy_node_inflight",
    "legs",
    "Legs in flight on an engine",
    NODE,
    ROLE,
    workers=MergeRule.SUM,
)
NODE_UP = gauge(
    "pdproxy_node_up",
    "bool",
    "Whether an engine may be used: probes find it up, it does not stand still, and its breaker "
    "is closed",
    NODE,
    ROLE,
    workers=MergeRule.MEAN,  # the part of the workers that see it so
)
NODE_STATE = gauge(
    "pdproxy_node_state",
    "bool",
    "1 for the state that an engine is in, 0 for the others",
    NODE,
    Label(
        "state",
        (
            ("up", "it gets requests"),
            ("down", "probes find it down: it gets none"),
            ("draining", "it is to leave, or has been drained: it gets none"),
            ("stalled", "its core stands still (health.stalled_after): it gets none"),
            ("asleep", "it sleeps, as its vllm:engine_sleep_state says: it gets none"),
            (
                "excluded",
                (
                    "by its breaker, or as an outlier: it gets requests only if there is no other "
                    "engine"
                ),
            ),
            (
                "half_open",
                "it gets one request at a time, until one has shown that it serves again",
            ),
            (
                "kv_failing",
                (
                    "KV does not move to or from it: no prompt is split with it, it may serve "
                    "prompts whole"
                ),
            ),
            ("slow_start", "it gets more and more requests (health.slow_start)"),
        ),
    ),
    workers=MergeRule.MEAN,  # the part of the workers that see it so
)
REVISION_SHARE = gauge(
    "pdproxy_revision_share_ratio",
    "ratio",
    "The part of a pool's requests that a revision of its engines gets, by what these can do; 0: "
    "it is not complete, and gets none. Only while there are several",
    Label("pool", text="the pool's name"),
    Label("revision", text="the value of the engines' label revision, or nothing"),
    workers=MergeRule.MOST,
    pools=MergeRule.MOST,
)
SPLITS = gauge(
    "pdproxy_pool_splits",
    "bool",
    "Whether prompts of a pool can be split now; pools without prefill engines have none to split, "
    "and are not shown",
    Label("pool", text="the pool's name"),
    workers=MergeRule.MEAN,  # the part of the workers that see it so
)
MAX_REVISIONS = 16
"""How many revisions of a pool are shown, those with the largest parts."""


class MetricsOfEngines:
    """Has engines counted by their URL while they are in the registry. Without it, their URLs would
    make series without end.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def added(self, engine: Engine) -> None:
        """Count an engine by its URL."""
        self._metrics.add_node(engine.url, engine.in_ledger.role.value)

    def removed(self, engine: Engine) -> None:
        """Drop its counts."""
        self._metrics.drop_node(engine.url)


def show_engines(
    observers: Observers,
    engines: EngineRegistry,
    members: Mapping[str, Member],
    now: Callable[[], float],
    pool: str,
) -> None:
    """Show the gauges of all engines of a pool. `members`: those, by URL; `pool`: its name."""

    def inflight() -> Samples:
        return [
            ((url, one.in_ledger.role.value), one.in_ledger.own_load[0])
            for url, one in engines.items()
        ]

    def up() -> Samples:
        at = now()
        return [
            ((url, one.in_ledger.role.value), float(one.in_ledger.usable(at)))
            for url, one in engines.items()
        ]

    def states() -> Samples:
        at = now()
        found = []
        for url, one in engines.items():
            is_in = one.in_ledger.state(at)
            found += [((url, state), float(state == is_in)) for state in STATES]
        return found

    def infos() -> Samples:
        found = []
        for url, one in engines.items():
            labels = members[url].settings.labels if url in members else {}
            own = (labels.get("pod", ""), labels.get("revision", ""))
            found.append(((url, one.in_ledger.role.value, pool, *own), 1))
        return found

    observers.show(NODE_INFO, infos)
    observers.show(NODE_INFLIGHT, inflight)
    observers.show(NODE_UP, up)
    observers.show(NODE_STATE, states)


def show_revisions(observers: Observers, revisions: Revisions, pool: str) -> None:
    """Show the gauge of the revisions of a pool. `pool`: its name."""

    def shares() -> Samples:
        found = sorted(revisions.shares().items(), key=itemgetter(1), reverse=True)
        return [((pool, truncate(name)), share) for name, share in found[:MAX_REVISIONS]]

    observers.show(REVISION_SHARE, shares)


def show_splits(observers: Observers, ledger: Ledger, now: Callable[[], float], pool: str) -> None:
    """Show the gauge of a pool whose prompts can be split, or not. `pool`: its name."""

    def splits() -> Samples:
        if not any(PREFILL in engine.uses for engine in ledger.engines):
            return []
        can = ledger.not_ready() is None and ledger.why_degraded(now()) is None
        return [((pool,), float(can))]

    observers.show(SPLITS, splits)
