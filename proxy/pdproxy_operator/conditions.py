"""The conditions of a PDRuntime and of a PDProxy: how they are, in sentences with names and
numbers. Pure.

A message changes only when something has changed, and at most once a minute: each change is written
to the API server. `now`: Unix time; `before`: the conditions of the resource's status.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from pdproxy.kit.text import truncate
from pdproxy_operator.figures import EngineFigures, Figures
from pdproxy_operator.own import OwnPod
from pdproxy_operator.parts import engines_of
from pdproxy_operator.pools import Pool
from pdproxy_operator.resources import ConditionOf, ConditionStatus, Proxy, Role, Runtime
from pdproxy_operator.rollout import Part, Step
from pdproxy_operator.scaling import Decision
from pdproxy_operator.sentences import are, first_of, listed, number_of, sentence, some_are
from pdproxy_operator.troubles import is_there, last_words, ready_for, trouble_of

SETTLED = 30.0
"""Seconds for which an engine must be ready until proxies that do not know it are wrong."""
RECOMPUTED = 0.05
"""The part of its KV of which a decode engine may compute more again."""
_MOST = 1000
"""Characters of a message."""
_SEVERE = ("ImagePull", "CannotStart", "CrashLoop", "Unschedulable", "Restarted", "NotReady")
_PARTNERS: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}
_NOTHING = EngineFigures("", "")
_WRONG_SETTINGS = 2
"""The exit code of a proxy that can't use its settings."""
_READY = "GET /ready of a proxy says why."
_SHARES = ((0.9, "More than 90 %"), (0.5, "More than half"), (0.0, "More than 5 %"))
_Found = tuple[ConditionStatus, str, str]
"""Status, reason and message."""


def runtime_conditions(
    runtime: Runtime,
    pool: Pool,
    *,
    pools: Sequence[Pool],
    selected_by: Sequence[str],
    parts: Sequence[Part],
    pods: Sequence[OwnPod],
    figures: Figures | None,
    step: Step,
    decision: Decision | None,
    refused: str | None,
    now: float,
    before: Sequence[ConditionOf],
) -> list[ConditionOf]:
    """Return the conditions of a runtime.

    `pool`: its pool; `pools`: all pools of its PDProxy. `selected_by`: the names of the PDProxies
    that select it, the first one decides. `parts`, `pods`: its own. `figures`: what the proxies
    say, None: there are none. `refused`: why its objects can't be, a sentence.
    """
    engines = _Engines(runtime, pool, parts, engines_of(pods), now)
    found: dict[str, _Found] = {
        "Available": _available(engines),
        "Progressing": _progressing(engines, step),
        "Degraded": _degraded(engines, pools, selected_by, refused),
        "Discovered": _discovered(engines, selected_by, figures),
        "KVTransferring": _kv_transferring(engines, selected_by, figures),
        "ScalingLimited": _scaling_limited(runtime, decision),
    }
    return _conditions(found, runtime.metadata.generation, now, before)


def proxy_conditions(
    proxy: Proxy,
    *,
    pools: Sequence[Pool],
    pods: Sequence[OwnPod],
    figures: Figures | None,
    steps: Sequence[Step],
    refused: str | None,
    shared: Sequence[str],
    now: float,
    before: Sequence[ConditionOf],
) -> list[ConditionOf]:
    """Return the conditions of a PDProxy.

    `pools`: of all runtimes that it selects; `steps`: of the pools whose rollouts are its own.
    `pods`: of the proxies. `refused`: why its settings or objects can't be, a sentence. `shared`:
    the runtimes whose rollout another PDProxy decides.
    """
    there = [pod for pod in pods if is_there(pod)]
    found: dict[str, _Found] = {
        "Available": _proxies_available(proxy, there, now),
        "PairsComplete": _pairs_complete(proxy, pools, figures),
        "ConfigAccepted": _config_accepted(there, figures, refused),
        "Progressing": _proxies_progressing(proxy, there, pools, steps, shared),
    }
    return _conditions(found, proxy.metadata.generation, now, before)


def _conditions(
    found: dict[str, _Found], generation: int, now: float, before: Sequence[ConditionOf]
) -> list[ConditionOf]:
    """Return conditions, each with the time since which its status is the same."""
    known = {one.type: one for one in before}
    at = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    made = []
    for kind, (status, reason, message) in found.items():
        was = known.get(kind)
        since = was.since if was is not None and was.status == status else at
        text = truncate(message, _MOST)
        made.append(ConditionOf(kind, status, reason, text, since, generation))
    return made


# -- of a runtime


class _Engines:
    """A runtime's engines that stay, as Kubernetes has them."""

    def __init__(
        self,
        runtime: Runtime,
        pool: Pool,
        parts: Sequence[Part],
        pods: Sequence[OwnPod],
        now: float,
    ) -> None:
        self.name = runtime.metadata.name
        self.role = runtime.spec.role
        self.model = runtime.spec.model.name
        self.wanted = runtime.spec.replicas
        self.pool = pool
        same = [one.spec.replicas for one in pool.runtimes if one.spec.role == self.role]
        self.is_single = sum(same) == 1
        self.new = sum(one.ready for one in parts if one.revision == pool.revision)
        self.old = sum(one.replicas for one in parts if one.revision != pool.revision)
        self.missing = [one for one in parts if one.ready < one.replicas and one.waiting]
        self.ready = sorted(
            (pod for pod in pods if pod.is_ready), key=lambda pod: pod.metadata.name
        )
        self.settled = [pod.metadata.name for pod in self.ready if ready_for(pod, now) >= SETTLED]
        troubles = [one for pod in pods if (one := trouble_of(pod, now)) is not None]
        self.troubles = sorted(
            troubles, key=lambda one: (_severity(one.reason), -one.seconds, one.clause)
        )


def _severity(reason: str) -> int:
    return _SEVERE.index(reason) if reason in _SEVERE else len(_SEVERE)


def _available(engines: _Engines) -> _Found:
    ready = len(engines.ready)
    if ready:
        return "True", "EnginesReady", f"{some_are(ready, engines.wanted, 'engine')} ready."
    if not engines.wanted:
        return "False", "NoReplicas", "replicas is 0: there are no engines."
    clauses = [one.clause for one in engines.troubles] + [
        str(one.waiting) for one in engines.missing
    ]
    why = f": {clauses[0]}" if clauses else ""
    return "False", "NoEngineReady", f"None of {number_of(engines.wanted, 'engine')} is ready{why}."


def _progressing(engines: _Engines, step: Step) -> _Found:
    wanted, new, ready = engines.wanted, engines.new, len(engines.ready)
    some = f"{some_are(ready, wanted, 'engine')} ready"
    waits = f"; it waits: {step.reason}" if step.reason else ""
    if engines.old:
        done = f"{some_are(new, wanted, 'engine')} of revision {engines.pool.revision}"
        if engines.is_single and any(one.reason == "Unschedulable" for one in engines.troubles):
            waits += ". The new one starts beside the only one, and needs GPUs of its own"
        if step.stuck:
            return "False", "Stuck", f"{done}, and no other one is replaced{waits}."
        return "True", "RollingOut", f"{done}{waits}."
    if ready == wanted:
        return "False", "UpToDate", f"{some}, and of one revision."
    if ready > wanted:
        return (
            "True",
            "ScalingDown",
            f"{ready} engines are ready, and {wanted} {are(wanted)} to stay.",
        )
    if step.stuck:
        return "False", "Stuck", f"{some}: {step.reason}."
    return "True", "Starting", f"{some}{waits}."


def _degraded(
    engines: _Engines,
    pools: Sequence[Pool],
    selected_by: Sequence[str],
    refused: str | None,
) -> _Found:
    faults = [one for one in engines.troubles if one.is_fault]
    found: list[tuple[str, str]] = []
    if refused is not None:
        found.append(("Refused", sentence(refused)))
    if faults:
        also = f" In all, {len(faults)} engines have a fault." if len(faults) > 1 else ""
        found.append((faults[0].reason, f"{faults[0].clause}.{also}"))
    elif not engines.troubles and engines.missing and len(engines.ready) < engines.wanted:
        found.append(("TooFewPods", f"{engines.missing[0].waiting}."))
    if selected_by and (lacks := _lacks_partner(engines, pools)) is not None:
        found.append(lacks)
    if len(selected_by) > 1:
        both = f"The PDProxies {listed(selected_by)} select it"
        message = f"{both}: {selected_by[0]} decides when its engines are replaced."
        found.append(("SeveralProxies", message))
    if not found:
        return "False", "AsExpected", "Nothing is wrong."
    return "True", found[0][0], " ".join(message for _, message in found)


def _lacks_partner(engines: _Engines, pools: Sequence[Pool]) -> tuple[str, str] | None:
    """Return that a runtime needs one of another role, as a reason and a sentence."""
    partner = _PARTNERS.get(engines.role)
    roles = {one.spec.role for one in engines.pool.runtimes}
    if partner is None or not roles.isdisjoint((partner, "any")):
        return None
    others = [
        f"{one.metadata.name} has connector {pool.connector}"
        for pool in pools
        if pool.model == engines.model and pool.name != engines.pool.name
        for one in pool.runtimes
        if one.spec.role in (partner, "any")
    ]
    needs = (
        f"{engines.role.capitalize()} engines need a runtime of role {partner} with model "
        f"{engines.model} and connector {engines.pool.connector}"
    )
    if others:
        return "ConnectorsDiffer", f"{needs}: {listed(others)}."
    return "NoPartner", f"{needs}, and the PDProxy selects none."


def _discovered(engines: _Engines, selected_by: Sequence[str], figures: Figures | None) -> _Found:
    if (unknown := _nobody_says(selected_by, figures)) is not None:
        return unknown
    assert figures is not None
    if not engines.ready:
        return "Unknown", "NoEngineReady", "No engine is ready yet."
    of = figures.answered
    known = {name: figures.engines.get(name, _NOTHING) for name in engines.settled}
    lost = [name for name, one in known.items() if one.known < of]
    if lost:
        some = _of(of - min(known[name].known for name in lost), of)
        message = f"{first_of(lost)} {are(len(lost))} not known to {some}."
        return "False", "NotDiscovered", message
    down = [name for name, one in known.items() if not one.up]
    if down:
        return "False", "NotReached", f"No proxy finds {first_of(down)} up, though Kubernetes does."
    return "True", "AllDiscovered", f"Proxies know all engines that are ready.{_silent(figures)}"


def _kv_transferring(
    engines: _Engines, selected_by: Sequence[str], figures: Figures | None
) -> _Found:
    if engines.role == "aggregated":
        return "Unknown", "NotUsed", "Engines of role aggregated exchange no KV."
    if (unknown := _nobody_says(selected_by, figures)) is not None:
        return unknown
    assert figures is not None
    pool = engines.pool.name
    known = {
        pod.metadata.name: figures.engines[pod.metadata.name]
        for pod in engines.ready
        if pod.metadata.name in figures.engines
    }
    if (again := _recomputing(known)) is not None:
        return again
    failing = [name for name, one in known.items() if one.fails]
    if failing:
        way = {"prefill": "from", "decode": "to"}.get(engines.role, "to or from")
        why = "Have they a --kv-transfer-config for their role, and can their partners reach them?"
        message = f"KV does not move {way} {first_of(failing)}: no prompt is split there. {why}"
        return "False", "NotMoving", message
    its = {name: one for name, one in figures.engines.items() if one.pool == pool}
    up = {one.role for one in its.values() if one.up}
    lacks = [role for role in _PARTNERS if up.isdisjoint((role, "any"))]
    if lacks:
        return "Unknown", "NoPartner", f"No {lacks[0]} engine of pool {pool} is up."
    can, should = figures.splits.get(pool, (0, 0))
    if should and not can:
        no_pair = "No proxy can pair a prefill engine with a decode engine: no prompt is split."
        return "False", "NotSplit", f"{no_pair} {_READY}"
    moved = [one.recomputed for one in its.values() if one.recomputed is not None]
    if not moved:
        return "Unknown", "NoTraffic", "No prompt was split in the last 5 minutes."
    if min(moved) > RECOMPUTED and (again := _recomputing(its)) is not None:
        return again
    return "True", "Moving", "The KV of prompts arrives at decode engines."


def _recomputing(engines: Mapping[str, EngineFigures]) -> _Found | None:
    """Return that some of these engines compute again what they should get as KV."""
    parts = {
        name: one.recomputed
        for name, one in engines.items()
        if one.recomputed is not None and one.recomputed > RECOMPUTED
    }
    if not parts:
        return None
    most = max(parts.values())
    share = next((words for least, words in _SHARES if most > least), "")
    tokens = f"{share} of the prompt tokens whose KV was sent to {first_of(sorted(parts))}"
    return "False", "Recomputing", f"{tokens} were computed again there in about the last minute."


def _scaling_limited(runtime: Runtime, decision: Decision | None) -> _Found:
    if decision is not None and decision.limited is not None:
        return "True", decision.limited.reason, sentence(decision.limited.message)
    if runtime.spec.autoscaling is None:
        return "False", "NotAutoscaled", "autoscaling is not set: replicas says how many engines."
    return "False", "AsNeeded", "It has as many engines as its load needs."


# -- of a PDProxy


def _proxies_available(proxy: Proxy, pods: Sequence[OwnPod], now: float) -> _Found:
    of = proxy.spec.replicas
    ready = sum(pod.is_ready for pod in pods)
    if ready:
        return "True", "ProxiesReady", f"{some_are(ready, of, 'proxy', 'proxies')} ready."
    wanted = number_of(of, "proxy", "proxies")
    troubles = [one for pod in pods if (one := trouble_of(pod, now, "starts")) is not None]
    troubles.sort(key=lambda one: (_severity(one.reason), one.clause))
    if not troubles:
        return "False", "NoProxyReady", f"None of {wanted} is ready."
    reason = troubles[0].reason if troubles[0].is_fault else "NoProxyReady"
    return "False", reason, f"None of {wanted} is ready: {troubles[0].clause}."


def _pairs_complete(proxy: Proxy, pools: Sequence[Pool], figures: Figures | None) -> _Found:
    if not pools:
        labels = proxy.spec.runtime_selector.match_labels
        said = ", ".join(f"{key}={value}" for key, value in sorted(labels.items()))
        return "False", "NothingSelected", f"No PDRuntime has the labels {said}."
    for pool in pools:
        roles = {one.spec.role for one in pool.runtimes}
        lacks = [one for one in _PARTNERS if one not in roles]
        if "any" not in roles and len(lacks) == 1:
            has = f"Pool {pool.name} has a runtime of role {_PARTNERS[lacks[0]]}"
            return "False", "NoPartner", f"{has}, and none of role {lacks[0]}."
    if figures is None or not figures.answered:
        return "Unknown", "NoAnswer", _no_answer(figures)
    for pool in pools:
        if not any(one.up and one.pool == pool.name for one in figures.engines.values()):
            return "False", "NoEngine", f"Pool {pool.name} has no engine that is up."
        can, should = figures.splits.get(pool.name, (0, 0))
        if can < should:
            some = f"{_of(should - can, should)} can split no prompt of pool {pool.name}."
            return "False", "NoPair", f"{some} {_READY}"
    every = "Each pool has" if len(pools) > 1 else f"Pool {pools[0].name} has"
    left_out = ""
    if figures.left_out:
        found = number_of(figures.left_out, "pod")
        left_out = f" {found} with the engines' labels {are(figures.left_out)} not used. {_READY}"
    return "True", "PairsComplete", f"{every} the engines that its requests need.{left_out}"


def _config_accepted(
    pods: Sequence[OwnPod], figures: Figures | None, refused: str | None
) -> _Found:
    if refused is not None:
        return "False", "Refused", sentence(refused)
    for pod in pods:
        for one in pod.status.container_statuses or ():
            ended = one.state.terminated or one.last_state.terminated
            if not one.ready and ended is not None and ended.exit_code == _WRONG_SETTINGS:
                why = last_words(ended) or "its log says why"
                return "False", "Refused", sentence(f"{pod.metadata.name} has ended: {why}")
    if figures is None or not figures.answered:
        return "Unknown", "NoAnswer", _no_answer(figures)
    if figures.refused:
        some = f"The settings could not be used by {first_of(figures.refused)}"
        return "False", "NotInForce", f"{some}: the former ones are in force. The log says why."
    return "True", "Accepted", f"The settings are in force.{_silent(figures)}"


def _proxies_progressing(
    proxy: Proxy,
    pods: Sequence[OwnPod],
    pools: Sequence[Pool],
    steps: Sequence[Step],
    shared: Sequence[str],
) -> _Found:
    also = ""
    if shared:
        also = f" Another PDProxy decides when the engines of {listed(shared)} are replaced."
    stuck = [one for one in steps if one.stuck]
    if stuck:
        return "False", "Stuck", f"No engine is replaced: {stuck[0].reason}.{also}"
    revisions = {pool.revision for pool in pools}
    old = sum(n for step in steps for (_, of), n in step.replicas.items() if of not in revisions)
    waits = next((f"; it waits: {one.reason}" for one in steps if one.reason), "")
    if old:
        left = f"{number_of(old, 'engine')} {are(old)} to be replaced"
        return "True", "RollingOut", f"{left}{waits}.{also}"
    ready, wanted = sum(pod.is_ready for pod in pods), proxy.spec.replicas
    some = f"{some_are(ready, wanted, 'proxy', 'proxies')} ready"
    if ready != wanted or len(pods) != wanted:
        return "True", "Starting", f"{some}.{also}"
    if waits:
        return "True", "EnginesStarting", f"Engines start{waits}.{also}"
    return "False", "UpToDate", f"{some}, and no engine is to be replaced.{also}"


# -- what is not known


def _nobody_says(selected_by: Sequence[str], figures: Figures | None) -> _Found | None:
    """Return that nothing is known of engines, and why; None: proxies say something."""
    if not selected_by:
        return "Unknown", "NotSelected", "No PDProxy selects it, so that no proxy says it."
    if figures is None or not figures.answered:
        return "Unknown", "NoAnswer", _no_answer(figures)
    return None


def _no_answer(figures: Figures | None) -> str:
    if figures is None or not figures.total:
        return "No proxy is ready."
    if figures.unreadable:
        return f"{truncate(figures.unreadable[0])}."
    return "No proxy has answered the operator at /metrics."


def _silent(figures: Figures) -> str:
    """Return a sentence on proxies without an answer, behind a blank; "" if there are none."""
    silent = figures.total - figures.answered
    return f" {_of(silent, figures.total)} gave no answer." if silent else ""


def _of(some: int, of: int) -> str:
    return f"{some} of {number_of(of, 'proxy', 'proxies')}"
