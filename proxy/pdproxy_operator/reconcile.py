"""One reconciliation of a group: what there is, from the store; what should be, from pure
functions; and the differences, which the writer writes.

Level-triggered and without memory: whatever an earlier reconciliation has or has not done, what is
left to do follows from the objects.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from pdproxy.upstream.kubernetes import ApiError
from pdproxy_operator.api import Api
from pdproxy_operator.conditions import proxy_conditions, runtime_conditions
from pdproxy_operator.engine_objects import engine_objects
from pdproxy_operator.errors import ConfigError
from pdproxy_operator.figures import deletion_costs
from pdproxy_operator.keys import digest_of, key_of
from pdproxy_operator.kinds import PROXIES, RUNTIMES, WORKLOADS, WRITTEN, Kind, kind_of
from pdproxy_operator.names import DELETION_COST, PROXY, REVISION, RUNTIME, engines_selector
from pdproxy_operator.own import OwnObject, OwnPod
from pdproxy_operator.pages import Pages
from pdproxy_operator.parts import parts_of
from pdproxy_operator.pools import Pool, pools_of, selected_pools
from pdproxy_operator.proxy_objects import proxy_objects
from pdproxy_operator.proxy_settings import scheme_of
from pdproxy_operator.resources import (
    ConditionOf,
    Name,
    Object,
    Proxy,
    Runtime,
    name_of,
    selects,
)
from pdproxy_operator.rollout import Part, Step, Wanted, next_step
from pdproxy_operator.scaled import scaled_of
from pdproxy_operator.scaling import Decision, decide
from pdproxy_operator.store import Group, Store
from pdproxy_operator.transitions import Rate, event_of, transitions
from pdproxy_operator.work import GoneError
from pdproxy_operator.writer import Writer

logger = logging.getLogger("pdproxy.operator")
LOOK_AGAIN = 15.0
"""Seconds until a group is reconciled again for which time matters: engines that start, or a number
of engines that follows the load.
"""

UNSURE = "the proxies were not asked lately which engines they use"


class _Rollout(NamedTuple):
    """A pool whose engines this group replaces, and what becomes of them."""

    pool: Pool
    parts: Sequence[Part]
    step: Step
    decisions: Mapping[str, Decision]


class _Change(NamedTuple):
    """A write of what makes pods. `adds`: how many pods, or groups, more; `revision`: whose."""

    adds: int
    revision: tuple[Runtime, str]
    write: Callable[[], Awaitable[None]]


class Reconciler:
    """Reconciles groups. `secret`: from which keys to the proxies' metrics are derived, None: there
    are none; `reporter`: the name of this operator; `wall`: Unix seconds.
    """

    def __init__(
        self,
        store: Store,
        api: Api,
        pages: Pages,
        events: Rate,
        secret: str | None,
        reporter: str,
        wall: Callable[[], float],
    ) -> None:
        self.store = store
        self.api = api
        self.pages = pages
        self.events = events
        self.secret = secret
        self.reporter = reporter
        self.wall = wall

    def __repr__(self) -> str:
        return f"<Reconciler of {self.store}>"

    async def reconcile(self, group: Group) -> float | None:
        """Have a group be as it should. Return the seconds after which it is to be reconciled
        again, None: when something changes.

        Raises:
            GoneError: there is no such group any more.
            ApiError: something could not be written.
        """
        one = _Reconciliation(self, group)
        await one.run()
        return one.again


class _Reconciliation:
    """One reconciliation of a group."""

    def __init__(self, of: Reconciler, group: Group) -> None:
        store = of.store
        self._of, self._store, self._api = of, store, of.api
        self._namespace = group.namespace
        self._now = of.wall()
        runtimes, proxies = store.runtimes(group.namespace), store.proxies(group.namespace)
        self._runtimes, self._proxies = runtimes, proxies
        self._proxy = next(
            (
                one
                for one in proxies
                if (group.kind, one.metadata.name) == (PROXIES.kind, group.name)
            ),
            None,
        )
        pools = pools_of(proxies, runtimes)
        if group.kind == PROXIES.kind:
            self._pools = [pool for proxy, pool in pools if proxy is self._proxy is not None]
        else:
            self._pools = [
                pool
                for proxy, pool in pools
                if proxy is None and pool.runtimes[0].metadata.name == group.name
            ]
        if self._proxy is None and not self._pools:
            raise GoneError
        self._figures = None if self._proxy is None else of.pages.figures(self._proxy)
        self._writer = Writer(store, of.api, group.namespace)
        self._pods_of: dict[tuple[str, str], list[OwnPod]] = {}
        """By the label of their owner and its name."""
        for pod in store.pods(group.namespace):
            labels = pod.metadata.labels or {}
            for label in (RUNTIME, PROXY):
                if label in labels:
                    self._pods_of.setdefault((label, labels[label]), []).append(pod)
        self.again: float | None = None

    async def run(self) -> None:
        """Write all differences."""
        if (unreadable := self._unreadable()) is not None:
            await self._leave(unreadable)
        rollouts = self._rollouts()
        for one in rollouts:
            refused = await self._engines(one)
            for runtime in one.pool.runtimes:
                await self._scale(runtime, one.decisions)
                await self._say_runtime(runtime, one, refused.get(runtime.metadata.name))
        if self._proxy is not None:
            await self._proxy_and_its_status(self._proxy, [one.step for one in rollouts])
        # the next reconciliation must see what this one has written
        await self._store.caught_up(self._writer.written)
        if self._writer.found_other:
            self.again = LOOK_AGAIN
        if self._writer.failures:
            raise self._writer.failures[0]

    def _unreadable(self) -> Group | None:
        runtimes = [one for pool in self._pools for one in pool.runtimes]
        return self._store.unreadable_near(self._namespace, self._proxy, runtimes)

    async def _leave(self, unreadable: Group) -> None:
        """Leave all as it is: without an object that can't be read, pools and their revision would
        be others. Raises ApiError.
        """
        why = f"The {unreadable.kind} {unreadable.name} can't be read, so nothing is changed."
        if self._proxy is not None:
            await self._say_proxy(self._proxy, [], why)
        raise ApiError(why)

    # engines

    def _rollouts(self) -> list[_Rollout]:
        """Return what becomes of the engines of all pools."""
        scaled = [
            scaled_of(runtime, pool, self._pods(RUNTIME, runtime), self._figures, self._now)
            for pool in self._pools
            for runtime in pool.runtimes
        ]
        spec = None if self._proxy is None else self._proxy.spec
        gpus = None if spec is None or spec.budget is None else spec.budget.gpus
        decisions = decide(scaled, gpus, self._now)
        if any(one.autoscaling is not None for one in scaled):
            self.again = LOOK_AGAIN
        found = []
        for pool in self._pools:
            pods = [one for runtime in pool.runtimes for one in self._pods(RUNTIME, runtime)]
            workloads = [one for runtime in pool.runtimes for _, one in self._workloads(runtime)]
            parts = parts_of(pool, workloads, pods, self._figures, self._now)
            wanted = [
                Wanted(name, one.spec.role, decisions[name].replicas)
                for one in pool.runtimes
                for name in (one.metadata.name,)
            ]
            start = max(one.spec.start_seconds for one in pool.runtimes)
            order = "pairs" if spec is None else spec.rollout.order
            step = next_step(parts, wanted, pool.revision, order, start)
            if self._is_unsure() and any(one.revision != pool.revision for one in parts):
                as_it_is = {(one.runtime, one.revision): one.replicas for one in parts}
                step = Step(as_it_is, UNSURE, stuck=False)
            if step.reason is not None:
                self.again = LOOK_AGAIN
            found.append(_Rollout(pool, parts, step, decisions))
        return found

    def _is_unsure(self) -> bool:
        """Return whether there are proxies that serve, and it is not known which engines they can
        use: after a start, an engine that is ready may be one for which a rollout waits.
        """
        return (
            self._figures is None
            and self._proxy is not None
            and any(one.is_ready for one in self._pods(PROXY, self._proxy))
        )

    def _selecting(self, runtime: Runtime) -> list[Proxy]:
        return [
            proxy
            for proxy in self._proxies
            if selects(proxy.spec.runtime_selector, runtime.metadata.labels)
        ]

    def _pods(self, label: str, of: Runtime | Proxy) -> Sequence[OwnPod]:
        return self._pods_of.get((label, of.metadata.name), ())

    def _workloads(self, runtime: Runtime) -> list[tuple[Kind, OwnObject]]:
        """Return what makes a runtime's pods, of all revisions."""
        return [(kind, one) for kind in WORKLOADS for one in self._writer.own(kind, runtime)]

    async def _engines(self, one: _Rollout) -> dict[str, str]:
        """Have the objects of a pool's runtimes be as they should. Return why those of some are not
        written, by runtime.
        """
        refused = {}
        workloads: list[_Change] = []
        for runtime in one.pool.runtimes:
            name = runtime.metadata.name
            replicas = {
                revision: count for (of, revision), count in one.step.replicas.items() if of == name
            }
            try:
                wanted = engine_objects(runtime, one.pool, self._selecting(runtime), replicas)
            except ConfigError as error:
                refused[name] = str(error)
                continue
            if (missing := self._writer.missing(wanted)) is not None:
                refused[name] = missing
                continue
            current = [each for each in wanted if kind_of(each) in WORKLOADS]
            for each in wanted:
                if kind_of(each) not in WORKLOADS:
                    await self._writer.apply(runtime, each)
            await self._writer.delete_unwanted(runtime, wanted, keeps=WORKLOADS)
            if self._writer.is_complete(runtime):
                workloads += self._changes(runtime, one.pool, current, replicas)
            elif (why := self._writer.refused(runtime)) is not None:
                refused[name] = why
        if refused and any(part.revision != one.pool.revision for part in one.parts):
            # engines of the new revision would find no partners
            workloads.clear()
            first = min(refused)
            held = f"No engine is replaced while PDRuntime {first} is wrong: {refused[first]}"
            refused = {each.metadata.name: held for each in one.pool.runtimes} | refused
        # GPUs are freed before others need them
        for change in sorted(workloads, key=lambda change: change.adds):
            if change.adds < 0:
                await self._deletion_costs(change.revision)
            await change.write()
        for runtime in one.pool.runtimes:
            if (why := self._writer.refused(runtime)) is not None:
                refused.setdefault(runtime.metadata.name, why)
        return refused

    def _changes(
        self,
        runtime: Runtime,
        pool: Pool,
        current: Sequence[Object],
        replicas: Mapping[str, int],
    ) -> Iterator[_Change]:
        """Yield the writes of a runtime's workloads."""
        names = set()
        for wanted in current:
            name = Name(self._namespace, wanted["metadata"]["name"])
            kind = kind_of(wanted)
            names.add((kind, name.name))
            live = self._store.own_of(kind, name)
            count = wanted["spec"]["replicas"] - (0 if live is None else _replicas(live))
            yield _Change(
                count, (runtime, pool.revision), partial(self._writer.apply, runtime, wanted)
            )
        for kind, live in self._workloads(runtime):
            if (kind, live.metadata.name) in names:
                continue
            revision = (live.metadata.labels or {}).get(REVISION, "")
            target = 0 if revision == pool.revision else replicas.get(revision, 0)
            count = target - _replicas(live)
            if count:
                write = partial(self._writer.scale, kind, live, target)
            elif target == 0 and not _status_replicas(live):
                write = partial(self._writer.delete, kind, live)
            else:
                continue
            yield _Change(count, (runtime, revision), write)

    async def _deletion_costs(self, of: tuple[Runtime, str]) -> None:
        """Have Kubernetes take the idlest engines of a runtime's revision first. Right before it
        does: the numbers change all the time.
        """
        if self._figures is None:
            return
        runtime, revision = of
        costs = deletion_costs(self._figures.engines)
        for pod in self._pods(RUNTIME, runtime):
            meta = pod.metadata
            if (meta.labels or {}).get(REVISION) != revision or meta.deletion_timestamp is not None:
                continue
            cost = str(costs.get(meta.name, 0))
            if (meta.annotations or {}).get(DELETION_COST, "0") != cost:
                try:
                    await self._api.annotate(meta, {DELETION_COST: cost})
                except ApiError as error:
                    self._writer.note(error)

    async def _scale(self, runtime: Runtime, decisions: Mapping[str, Decision]) -> None:
        """Have a runtime have the engines that its load needs."""
        namespace, name = name_of(runtime)
        count = decisions[name].replicas
        if runtime.spec.autoscaling is not None and count != runtime.spec.replicas:
            await self._writer.do(
                self._api.scale(RUNTIMES, namespace, name, count), RUNTIMES, namespace, name
            )

    async def _say_runtime(self, runtime: Runtime, one: _Rollout, refused: str | None) -> None:
        """Have the status of a runtime be as it is."""
        name, revision = runtime.metadata.name, one.pool.revision
        own = [part for part in one.parts if part.runtime == name]
        pods = [pod for pod in self._pods(RUNTIME, runtime) if pod.is_leader]
        stay = [pod for pod in pods if pod.metadata.deletion_timestamp is None]
        decision = one.decisions[name]
        conditions = runtime_conditions(
            runtime,
            one.pool,
            pools=self._pools,
            selected_by=[each.metadata.name for each in self._selecting(runtime)],
            parts=own,
            pods=self._pods(RUNTIME, runtime),
            figures=self._figures,
            step=one.step,
            decision=decision,
            refused=refused,
            now=self._now,
            before=runtime.status.conditions,
        )
        status = {
            "observedGeneration": runtime.metadata.generation,
            "replicas": len(stay),
            "readyReplicas": sum(pod.is_ready for pod in stay),
            "updatedReplicas": sum(
                (pod.metadata.labels or {}).get(REVISION) == revision for pod in stay
            ),
            "drainingReplicas": len(pods) - len(stay),
            "selector": engines_selector(runtime),
            "revision": revision,
        }
        if decision.state is not None:
            status["scaling"] = _without_none(decision.state)
        await self._say(RUNTIMES, runtime, status, conditions)

    # proxies

    async def _proxy_and_its_status(self, proxy: Proxy, steps: Sequence[Step]) -> None:
        pools = selected_pools(proxy, self._runtimes)
        refused = None
        key = None if self._of.secret is None else key_of(self._of.secret, proxy.metadata.uid)
        try:
            wanted = proxy_objects(proxy, pools, None if key is None else digest_of(key))
            refused = self._writer.missing(wanted)
        except ConfigError as error:
            refused = str(error)
        if refused is None:
            for one in sorted(wanted, key=lambda each: WRITTEN.index(kind_of(each))):
                # a RoleBinding may not give a Role of others, nor may pods use files of others
                is_complete = self._writer.is_complete(proxy)
                if is_complete or one["kind"] not in ("RoleBinding", "Deployment"):
                    await self._writer.apply(proxy, one)
            await self._writer.delete_unwanted(proxy, wanted)
            refused = self._writer.refused(proxy)
        await self._say_proxy(proxy, steps, refused)

    async def _say_proxy(self, proxy: Proxy, steps: Sequence[Step], refused: str | None) -> None:
        """Have the status of a PDProxy be as it is. `refused`: why its objects are not written."""
        pools = selected_pools(proxy, self._runtimes)
        pods = self._pods(PROXY, proxy)
        owned = {name_of(one).name for pool in self._pools for one in pool.runtimes}
        shared = [
            one.metadata.name
            for pool in pools
            for one in pool.runtimes
            if one.metadata.name not in owned
        ]
        conditions = proxy_conditions(
            proxy,
            pools=pools,
            pods=pods,
            figures=self._figures,
            steps=steps,
            refused=refused,
            shared=shared,
            now=self._now,
            before=proxy.status.conditions,
        )
        status = {
            "observedGeneration": proxy.metadata.generation,
            "replicas": sum(one.metadata.deletion_timestamp is None for one in pods),
            "readyReplicas": sum(one.is_ready for one in pods),
            "url": _url(proxy),
            "pools": [self._pool_status(pool) for pool in pools],
        }
        await self._say(PROXIES, proxy, status, conditions)

    def _pool_status(self, pool: Pool) -> Object:
        engines: dict[str, int] = {}
        for runtime in pool.runtimes:
            ready = sum(one.is_ready and one.is_leader for one in self._pods(RUNTIME, runtime))
            role = runtime.spec.role
            engines[role] = engines.get(role, 0) + ready
        return {
            "name": pool.name,
            "model": pool.model,
            "connector": pool.connector,
            "revision": pool.revision,
            "engines": engines,
        }

    async def _say(
        self,
        kind: Kind,
        of: Runtime | Proxy,
        status: Object,
        conditions: Sequence[ConditionOf],
    ) -> None:
        """Have a resource say how it is, and write Events of what has become another."""
        is_asked = self._proxy is None or self._of.pages.has_asked(self._proxy)
        if not is_asked and of.status.conditions:
            return  # what an operator before has said still holds
        status["conditions"] = [_without_none(one) for one in conditions]
        if _without_none(of.status) == status:
            return
        namespace, name = name_of(of)
        await self._writer.do(
            self._api.apply_status(kind, of.metadata, status), kind, namespace, name
        )
        for one in transitions(of.status.conditions, conditions):
            if self._of.events.takes():
                event = event_of(of, one, self._of.reporter, self._now)
                try:
                    await self._api.create_event(event)
                except ApiError as error:  # the conditions say the same
                    logger.warning("an Event of %s %s/%s: %s", kind.kind, namespace, name, error)


def _url(proxy: Proxy) -> str:
    """Return where clients in the cluster reach the proxies."""
    namespace, name = name_of(proxy)
    return f"{scheme_of(proxy)}://{name}.{namespace}.svc:{proxy.spec.service.port}"


def _replicas(one: OwnObject) -> int:
    """Return how many pods, or groups, an object is to have."""
    count = one.spec.get("replicas") if isinstance(one.spec, dict) else None
    return count if isinstance(count, int) else 1


def _status_replicas(one: OwnObject) -> int:
    count = one.status.get("replicas") if isinstance(one.status, dict) else None
    return count if isinstance(count, int) else 0


def _without_none(thing: Any) -> Any:
    """Return a part of a status as JSON has it, without fields that have nothing."""
    if isinstance(thing, msgspec.Struct):
        return _without_none(msgspec.to_builtins(thing))
    if isinstance(thing, list):
        return [_without_none(one) for one in thing]
    if isinstance(thing, dict):
        return {key: _without_none(value) for key, value in thing.items() if value is not None}
    return thing
