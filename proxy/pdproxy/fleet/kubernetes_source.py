"""A source of engines at the pods of a Kubernetes cluster, or at those of an InferencePool.

Owns what was found last, by namespace: what can't be asked any more stays as it was.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple, TypeVar

from pdproxy.fleet.found_file import FoundFile, Kept
from pdproxy.fleet.informer import ApiCollection, ApiObject, Counts, Found, Informer
from pdproxy.fleet.pods import PodEngines, PodRules, engines_of, joined
from pdproxy.fleet.sources import FoundEngine, SourceAnswer
from pdproxy.kit.errors import Wait
from pdproxy.settings.kubernetes import (
    EVERYWHERE,
    SCHEMES,
    Kubernetes,
    PodsUrl,
    PoolUrl,
    kubernetes_url,
)
from pdproxy.settings.schema import Settings
from pdproxy.upstream.kubernetes import KubernetesApi
from pdproxy.wire.kubernetes import InferencePool, Pod

T = TypeVar("T", bound=ApiObject)
logger = logging.getLogger("pdproxy.kubernetes")

GAP = 0.05
"""Seconds between two answers at least: the changes of many pods at once are one answer."""
CONFIRM = 10.0
"""Seconds after which an answer that is the same as before is given again: it is still true."""
WRITE = 5.0
"""Seconds between two times that the file of what was found is written."""
POOLS = "/apis/inference.networking.k8s.io/v1"


def source(url: str, settings: Settings) -> KubernetesSource:
    """Return the source that a URL names. See `fleet.sources`."""
    section = settings.kubernetes
    return KubernetesSource(kubernetes_url(url, ("url",)), KubernetesApi(section), section)


class _Wanted(NamedTuple):
    """Which pods are engines, and at which ports."""

    namespaces: tuple[str, ...]
    selector: str
    ports: tuple[int | str, ...]


class _Part:
    """The pods of one namespace."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.found: Found[Pod] | None = None
        """None: nothing was heard yet, not even a failure."""

    @property
    def problem(self) -> str | None:
        """What is wrong, with the namespace."""
        if self.found is None or self.found.problem is None:
            return None
        where = "" if self.namespace == EVERYWHERE else f"namespace {self.namespace}: "
        return f"{where}{self.found.problem}"

    @property
    def pods(self) -> Sequence[Pod] | None:
        """All pods, None while they are not known."""
        if self.found is None or self.found.objects is None:
            return None
        return list(self.found.objects)


class KubernetesSource:
    """Follows the pods that a URL names. `now`: seconds since 1970."""

    def __init__(
        self,
        url: PodsUrl | PoolUrl,
        api: KubernetesApi,
        section: Kubernetes,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._url = url
        self._api = api
        self._section = section
        self._now = now
        self.counts = Counts()
        """What its informers have done."""
        path = section.cache_file
        self._file = None if path is None else FoundFile(path, url.url)
        self._kept: Kept | None = None
        """What the file had, once it was needed."""
        self._parts: list[_Part] = []
        self._wanted: _Wanted | None = None
        self._wrong_pool: str | None = None
        """Why the InferencePool does not say which pods are engines."""
        self._mapped: dict[str, tuple[str, PodEngines]] = {}
        """By the uid of a pod: its version with its engines."""
        self._heard = asyncio.Event()
        self._passed: list[Wait] = []
        self._last = SourceAnswer(None)
        self._last_at = 0.0
        self._told: Sequence[FoundEngine] | None = None
        """The engines of the last answer that had some."""
        self._written: Sequence[FoundEngine] | None = None
        self._written_at = -WRITE
        self._is_writable = True
        """Whether the file could be written the last time."""

    def __repr__(self) -> str:
        return f"<KubernetesSource {self._url.url}>"

    async def run(self, answered: Callable[[SourceAnswer], None]) -> None:
        """See `EngineSource`."""
        async with asyncio.TaskGroup() as tasks:
            if isinstance(self._url, PoolUrl):
                tasks.create_task(self._pool(self._url).run())
            else:
                namespaces = self._url.namespaces or (self._api.namespace,)
                self._wanted = _Wanted(namespaces, self._url.selector, (self._url.port,))
            wanted, following = None, list[asyncio.Task[None]]()
            while True:
                if self._wanted is not None and self._wanted != wanted:
                    wanted = self._wanted
                    for task in following:
                        task.cancel()
                    following = [tasks.create_task(one.run()) for one in self._informers(wanted)]
                heard = await self._hear()
                answer = self._answer(wanted)
                if answer is not None:
                    self._tell(answer, answered, heard=heard)
                self._write()
                await asyncio.sleep(GAP)

    async def _hear(self) -> bool:
        """Wait until an informer says something, but not for long. Return whether one did."""
        try:
            async with asyncio.timeout(WRITE):
                await self._heard.wait()
        except TimeoutError:
            return False
        self._heard.clear()
        return True

    def _informers(self, wanted: _Wanted) -> list[Informer[Pod]]:
        """Return what follows the pods that are wanted now."""
        selector = ",".join(filter(None, (wanted.selector, self._section.pod_labels.also)))
        self._parts, self._mapped = [_Part(one) for one in wanted.namespaces], {}
        made = []
        for part in self._parts:
            within = "" if part.namespace == EVERYWHERE else f"/namespaces/{part.namespace}"
            pods = ApiCollection(Pod, f"/api/v1{within}/pods", selector)
            made.append(self._informer(pods, partial(self._take, part)))
        return made

    def _pool(self, url: PoolUrl) -> Informer[InferencePool]:
        """Return what follows an InferencePool."""
        namespace = url.namespace or self._api.namespace
        path = f"{POOLS}/namespaces/{namespace}/inferencepools"
        taken = partial(self._take_pool, namespace)
        return self._informer(ApiCollection(InferencePool, path, name=url.name), taken)

    def _informer(
        self, collection: ApiCollection[T], taken: Callable[[Found[T]], None]
    ) -> Informer[T]:
        return Informer(collection, self._api.connection(), self._section, taken, self.counts)

    def _take(self, part: _Part, found: Found[Pod]) -> None:
        part.found = found
        self._note(found.passed)

    def _take_pool(self, namespace: str, found: Found[InferencePool]) -> None:
        """Have the pods that an InferencePool says. One that is gone changes nothing."""
        self._wrong_pool = found.problem and f"its InferencePool: {found.problem}"
        if found.objects is not None:
            pool = next(iter(found.objects), None)
            labels = pool.spec.selector.match_labels if pool is not None else None
            ports = pool.spec.target_ports if pool is not None else None
            if labels and ports:
                selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
                numbers = tuple(port.number for port in ports)
                self._wanted = _Wanted((namespace,), selector, numbers)
            elif not self._wrong_pool:
                missing = "there is no such InferencePool in namespace"
                self._wrong_pool = f"{missing} {namespace}, or it has no labels or no ports"
        self._note(found.passed)

    def _note(self, passed: Wait | None) -> None:
        if passed is not None:
            self._passed.append(passed)
        self._heard.set()

    def _answer(self, wanted: _Wanted | None) -> SourceAnswer | None:
        """Return what is known now. None: not all that is asked at the start has said anything
        yet.
        """
        wrong = [self._wrong_pool] if self._wrong_pool else []
        if wanted is None:
            return SourceAnswer(None, wrong[0]) if wrong else None
        if any(part.found is None for part in self._parts):
            return None
        wrong += [part.problem for part in self._parts if part.problem]
        pods, from_file = list[Pod](), list[FoundEngine]()
        for part in self._parts:
            if part.pods is not None:
                pods += part.pods
            else:
                from_file += self._kept_of(part.namespace)
        problem = f"{wrong[0]}, and {len(wrong) - 1} more" if len(wrong) > 1 else (*wrong, None)[0]
        if from_file:
            assert self._kept is not None
            at = datetime.fromtimestamp(self._kept.at, UTC).isoformat(timespec="seconds")
            problem = f"{problem}: engines as they were at {at}"
        elif all(part.pods is None for part in self._parts):
            return SourceAnswer(None, problem)
        engines, left_out = joined(self._engines(pods, wanted))
        return SourceAnswer([*engines, *from_file], problem, left_out=left_out)

    def _engines(self, pods: Sequence[Pod], wanted: _Wanted) -> list[PodEngines]:
        """Return the engines of all pods. Only those are mapped that have changed."""
        section, mapped = self._section, self._mapped
        rules = PodRules(
            SCHEMES[self._url.scheme], wanted.ports, section.pod_labels, section.family
        )
        self._mapped = {}
        for pod in pods:
            uid, version = pod.metadata.uid, pod.metadata.resource_version
            known = mapped.get(uid)
            if known is None or known[0] != version:
                known = version, engines_of(pod, rules)
            self._mapped[uid] = known
        return [engines for _, engines in self._mapped.values()]

    def _tell(
        self, answer: SourceAnswer, answered: Callable[[SourceAnswer], None], *, heard: bool
    ) -> None:
        """Answer, if the answer differs from the last one, or is known to be still true."""
        now = asyncio.get_running_loop().time()
        passed, self._passed = self._passed, []
        if answer.problem is not None and answer.engines == self._told:
            answer = SourceAnswer(None, answer.problem)  # it is no news, and its age counts
        if answer != self._last or passed or (heard and now >= self._last_at + CONFIRM):
            self._last, self._last_at = answer, now
            if answer.engines is not None:
                self._told = answer.engines
            for wait in passed or (None,):
                answered(replace(answer, passed=wait))

    def _kept_of(self, namespace: str) -> list[FoundEngine]:
        """Return the engines of a namespace that the file has."""
        if self._kept is None and self._file is not None:
            self._kept = self._file.read() or Kept(0.0, [])
        return [
            one
            for one in (self._kept.engines if self._kept else ())
            if namespace in (EVERYWHERE, one.labels.get("namespace"))
        ]

    def _write(self) -> None:
        """Have the last answer in the file, if it is new."""
        now, engines = asyncio.get_running_loop().time(), self._last.engines
        if (
            self._file is None
            or engines is None  # with a problem, they may not be all
            or self._last.problem is not None
            or engines == self._written
            or now < self._written_at + WRITE
        ):
            return
        self._written_at = now
        try:
            self._file.write(engines, self._now())
        except OSError as error:  # tried again, and said once
            if self._is_writable:
                logger.warning("kubernetes.cache_file can't be written: %s", error.strerror)
            self._is_writable = False
        else:
            self._written, self._is_writable = engines, True
