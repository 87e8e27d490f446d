"""Pods of a Kubernetes cluster as a source of engines: the section `kubernetes`, and its checks.

Owns units, bounds and defaults, the normal spelling of such a URL, and the labels of other
projects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple
from urllib.parse import quote as percent_encoded
from urllib.parse import unquote

from pdproxy.settings.engines import Role
from pdproxy.settings.errors import KeyPath, Mistakes, SettingsError, quote, spell_key
from pdproxy.settings.section import File, Seconds, Text
from pdproxy.settings.sources import SourceSection

PODS, POOLS = ("pods", "podss"), ("inferencepool", "inferencepools")
SCHEMES = {"pods": "http", "podss": "https", "inferencepool": "http", "inferencepools": "https"}
"""See `SourceSection`."""
PORT = 8000
"""vLLM's own default."""
EVERYWHERE = "*"
"""In place of a namespace: all of them."""
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_PORT_NAME = re.compile(r"(?=.*[a-z])(?!.*--)[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?")
_POOL_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_WORD = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(rf"([a-z0-9]([-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_WORD}")
_VALUE = re.compile(rf"({_WORD})?")
_REQUIREMENT = re.compile(
    r"(?P<set>[^\s,()=!]+)\s+(?P<how>in|notin)\s*\((?P<values>[^()]*)\)"
    r"|!\s*(?P<without>[^\s,()=!]+)"
    r"|(?P<key>[^\s,()=!]+)\s*(?:(?P<equal>==?|!=)\s*(?P<value>[^\s,()=!]*))?"
)
_BETWEEN = re.compile(r",(?![^()]*\))")
"""The commas between requirements: those within parentheses are between values."""
_PODS_FORM = "expected pods://NAMESPACE:PORT/LABEL_SELECTOR, such as pods://llm:8000/app=vllm"
_POOL_FORM = "expected inferencepool://NAMESPACE/NAME or inferencepool://NAME"

Preset = Literal["llm-d", "aibrix", "lws", "disaggregatedset", "dynamo"]
Family = Literal["ipv4", "ipv6"]


class Labels(NamedTuple):
    """The labels of pods that a project sets. `role`: those that say a pod's role, the first that a
    pod has counts; `roles`: values of these that are no names of roles, each with the role;
    `engine`: names of engines' labels, each with the pod's label; `also`: what all selectors
    require, too.
    """

    role: tuple[str, ...] = ("pdproxy.dev/role",)
    roles: Mapping[str, Role] = MappingProxyType({})
    engine: Mapping[str, str] = MappingProxyType({})
    also: str = ""


_LEADERS = "leaderworkerset.sigs.k8s.io/worker-index=0"
"""Of a group of pods that serve together, only the first answers requests."""
_EVERY: Mapping[str, str] = MappingProxyType(
    {
        "model": "pdproxy.dev/model",
        "revision": "pdproxy.dev/revision",
        "rack": "topology.kubernetes.io/rack",
        "zone": "topology.kubernetes.io/zone",
    }
)
_PRESETS: Mapping[Preset | None, Labels] = MappingProxyType(
    {
        None: Labels(),
        "llm-d": Labels(
            ("llm-d.ai/role",),
            {"prefill-decode": "any", "both": "any"},
            {"model": "llm-d.ai/model"},
        ),
        "aibrix": Labels(
            ("role-name",),
            engine={"model": "model.aibrix.ai/name", "roleset": "roleset-name"},
        ),
        "lws": Labels(also=_LEADERS),
        "disaggregatedset": Labels(
            ("disaggregatedset.x-k8s.io/role",),
            engine={
                "revision": "disaggregatedset.x-k8s.io/revision",
                "slice": "disaggregatedset.x-k8s.io/slice",
            },
            also=_LEADERS,
        ),
        "dynamo": Labels(
            ("nvidia.com/dynamo-sub-component-type", "nvidia.com/dynamo-component-type"),
            {"worker": "aggregated"},
            {"model": "nvidia.com/dynamo-base-model"},
        ),
    }
)


class Kubernetes(SourceSection, frozen=True):
    """Pods as a source of engines: pods://NAMESPACE:PORT/LABEL_SELECTOR is one at each pod that
    fits, inferencepool://NAMESPACE/NAME at each pod of an InferencePool; podss:// and
    inferencepools://: with TLS. Needs the extra `kubernetes`: pip install 'pdproxy[kubernetes]'.

    A pod joins when it is ready. It is drained when it is being deleted, and stays as long as it
    is not: a readiness probe that fails removes nothing (docs/guide/kubernetes.md).
    """

    schemes = SCHEMES
    who = "Kubernetes"
    forms = "pods://NAMESPACE:PORT/LABEL_SELECTOR: all pods that fit"
    most = 1024
    labels_roles = True

    kubeconfig: File | None = None
    """A kubeconfig file that says how to reach the API. null: the pod's own service account;
    outside of a cluster the file that KUBECONFIG names, or ~/.kube/config.
    """

    context: Text | None = None
    """The context of that file. null: the file's current one."""

    preset: Preset | None = None
    """Whose labels the pods have, in place of pdproxy.dev/role and pdproxy.dev/revision: llm-d,
    aibrix, lws (LeaderWorkerSet: only leaders are engines), disaggregatedset, dynamo.
    """

    role_label: Text | None = None
    """The pod's label that says its role, for nodes with role by_label. null: as the preset says,
    or else pdproxy.dev/role.
    """

    roles: dict[Text, Role] = {}  # noqa: RUF012 - a struct copies its defaults
    """Values of that label besides the names of roles, each with its role, such as {kv_both: any}.
    """

    labels: dict[Text, str] = {}  # noqa: RUF012 - a struct copies its defaults
    """Labels of engines, each with the pod's label that has its value; "": none. They are added to
    those of the preset, and to revision (pdproxy.dev/revision), model (pdproxy.dev/model), rack and
    zone (topology.kubernetes.io/...). An engine's labels pod, namespace and host are the names of
    its pod, the pod's namespace and its machine.
    """

    family: Family | None = None
    """The family of the pods' addresses: ipv4 or ipv6. null: the pod's first address."""

    cache_file: File | None = None
    """A file that has what was found last. It is read if the API can't be reached at the start.
    null: none; the proxy is not ready until the API has answered.
    """

    timeout: Seconds = 30.0
    """Seconds for an answer to a list of pods, or for the beginning of a watch."""

    watch_timeout: Seconds = 240.0
    """Seconds after which the API server ends a watch, which begins anew then; up to a fifth more
    by chance.
    """

    silence: Seconds = 90.0
    """Seconds without a word of the API server after which a watch begins anew: the connection may
    be dead.
    """

    relist: Seconds = 600.0
    """Seconds after which all pods are listed anew, whatever the watch says; a fifth more or less
    by chance.
    """

    @classmethod
    def spelled(cls, url: str, path: KeyPath, where: str = "") -> str:
        """See `SourceSection`."""
        return kubernetes_url(url, path, where).url

    @classmethod
    def stand_in(cls, url: str) -> str:
        """See `SourceSection`."""
        return f"{SCHEMES[url.partition('://')[0]]}://pods:1"

    def check(self, found: Mistakes) -> None:
        """Check the names of labels. Mistakes are added to `found`."""
        names: dict[KeyPath, str | None] = {("kubernetes", "role_label"): self.role_label}
        names |= {("kubernetes", "labels", key): label for key, label in self.labels.items()}
        for key, label in names.items():
            if label and not _KEY.fullmatch(label):
                text = f"{spell_key(key)}: {quote(label)}: no label of a pod can be so"
                found.add(key, f"{text}{found.source(key)}")

    @property
    def pod_labels(self) -> Labels:
        """The labels of pods that matter, those of the preset included."""
        preset = _PRESETS[self.preset]
        engine = {**_EVERY, **preset.engine, **self.labels}
        return Labels(
            preset.role if self.role_label is None else (self.role_label,),
            {**preset.roles, **self.roles},
            {name: label for name, label in engine.items() if label},
            preset.also,
        )


class PodsUrl(NamedTuple):
    """Which pods are engines, and at which port. `namespaces`: () is the proxy's own, `EVERYWHERE`
    all. `port`: a number, or the name of a container's port.
    """

    scheme: str
    namespaces: tuple[str, ...]
    port: int | str
    selector: str

    @property
    def url(self) -> str:
        """Its normal spelling."""
        selector = percent_encoded(self.selector, safe="/,=!()-._~")
        return f"{self.scheme}://{','.join(self.namespaces)}:{self.port}/{selector}"


class PoolUrl(NamedTuple):
    """An InferencePool, which says which pods are engines. `namespace` None: the proxy's own."""

    scheme: str
    namespace: str | None
    name: str

    @property
    def url(self) -> str:
        """Its normal spelling."""
        return (
            f"{self.scheme}://{'' if self.namespace is None else f'{self.namespace}/'}{self.name}"
        )


def kubernetes_url(url: str, path: KeyPath, where: str = "") -> PodsUrl | PoolUrl:
    """Return what a URL asks for. `where`: the source of the URL.

    Raises:
        SettingsError: naming `path` and the URL.
    """

    def wrong(why: str) -> SettingsError:
        return SettingsError(f"{spell_key(path)}: {quote(url)}: {why}{where}")

    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    place, _, after = rest.partition("/")
    if scheme in POOLS:
        namespace, name = (place, after) if after else (None, place)
        if not _POOL_NAME.fullmatch(name):
            raise wrong(_POOL_FORM)
        if namespace is not None and not NAMESPACE.fullmatch(namespace):
            raise wrong(f"{quote(namespace)} is no name of a namespace")
        return PoolUrl(scheme, namespace, name)
    if scheme not in PODS:
        raise wrong(_PODS_FORM)
    names, _, port = place.partition(":")
    namespaces = tuple(dict.fromkeys(names.split(","))) if names else ()
    for name in namespaces:
        if name != EVERYWHERE and not NAMESPACE.fullmatch(name):
            raise wrong(f"{quote(name)} is no name of a namespace")
    if EVERYWHERE in namespaces and len(namespaces) > 1:
        raise wrong(f"{EVERYWHERE} is all namespaces: expected no other beside it")
    try:
        selector = spelled_selector(unquote(after))
    except ValueError as error:
        raise wrong(str(error)) from None
    return PodsUrl(scheme, namespaces, _port(port, wrong), selector)


def _port(text: str, wrong: Callable[[str], SettingsError]) -> int | str:
    if not text:
        return PORT
    if text.isascii() and text.isdigit():
        if not 1 <= int(text) <= 65_535:
            raise wrong("expected a port from 1 to 65535")
        return int(text)
    if not _PORT_NAME.fullmatch(text):
        raise wrong(f"{quote(text)} is neither a port nor the name of one")
    return text


def spelled_selector(text: str) -> str:
    """Return a label selector in its normal spelling: `a=b,c in (d,e),!f`.

    Raises:
        ValueError: it is none, or it is empty: it would select every pod.
    """
    if not text.strip():
        raise ValueError(f"names no label: {_PODS_FORM}")
    return ",".join(_requirement(one.strip()) for one in _BETWEEN.split(text))


def _requirement(text: str) -> str:
    match = _REQUIREMENT.fullmatch(text)
    if match is None:
        raise ValueError(f"{quote(text)} is no part of a label selector")
    key = match["set"] or match["without"] or match["key"]
    if not _KEY.fullmatch(key):
        raise ValueError(f"{quote(key)} is no name of a label")
    values = [value.strip() for value in (match["values"] or match["value"] or "").split(",")]
    for value in values:
        if not _VALUE.fullmatch(value):
            raise ValueError(f"{quote(value)} is no value of a label")
    if match["set"]:
        return f"{key} {match['how']} ({','.join(values)})"
    if match["without"]:
        return f"!{key}"
    return f"{key}{(match['equal'] or '').replace('==', '=')}{values[0]}"
