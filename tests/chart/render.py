"""The chart as Helm renders it, and what Kubernetes says of the objects."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from kubernetes_validate import utils
from referencing import Registry, Resource

from pdproxy.settings.load import load
from pdproxy.settings.schema import Settings
from tests.chart.programs import program

ROOT = Path(__file__).parents[2]
CHART = ROOT / "configs" / "chart"
OPERATOR = ROOT / "configs" / "chart-operator"
VERSIONS = tuple(f"1.{minor}" for minor in range(28, 38))
"""The versions of Kubernetes whose schemas are here, and which Chart.yaml allows."""
CUSTOM = {
    ("gateway.networking.k8s.io/v1", "HTTPRoute"),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"),
    ("monitoring.coreos.com/v1", "PodMonitor"),
    ("monitoring.coreos.com/v1", "PrometheusRule"),
}
"""Objects that Kubernetes itself does not know."""
Values = dict[str, Any]
Objects = list[dict[str, Any]]


class RefusedError(Exception):
    """Helm does not render the chart with these values; the message is Helm's."""


def helm(*words: str) -> str:
    """Run Helm, and return what it prints.

    Raises:
        RefusedError: it failed.
    """
    with tempfile.TemporaryDirectory() as home:  # it writes into folders of the user, else
        folders = {f"HELM_{name}_HOME": home for name in ("CACHE", "CONFIG", "DATA")}
        done = subprocess.run(
            [program("helm"), *words],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | folders,
        )
    if done.returncode != 0:
        raise RefusedError(done.stderr)
    return done.stdout


def text_of(
    values: Values,
    *words: str,
    release: str = "pdproxy",
    namespace: str = "llm",
    chart: Path = CHART,
) -> str:
    """Return the objects of a release as Helm prints them."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(values, file)
        file.flush()
        return helm(
            *("template", release, str(chart), "--namespace", namespace, "-f", file.name, *words)
        )


def rendered(values: Values, *, release: str = "pdproxy", chart: Path = CHART) -> Objects:
    """Return the objects of a release."""
    return copy.deepcopy(_rendered(json.dumps(values), release, chart))


@cache
def _rendered(values: str, release: str, chart: Path) -> Objects:
    text = text_of(json.loads(values), release=release, chart=chart)
    return [one for one in yaml.load_all(text, yaml.CSafeLoader) if one is not None]


def of_kind(objects: Objects, kind: str, name: str | None = None) -> Objects:
    """Return the objects of a kind, and of a name."""
    named = [one for one in objects if name in (None, one["metadata"]["name"])]
    return [one for one in named if one["kind"] == kind]


def pod_of(objects: Objects, name: str = "pdproxy") -> dict[str, Any]:
    """Return the template of the pods of a Deployment."""
    (deployment,) = of_kind(objects, "Deployment", name)
    template: dict[str, Any] = deployment["spec"]["template"]
    return template


def settings_of(objects: Objects) -> Settings:
    """Return the settings that the proxies read, checked as `pdproxy serve` checks them."""
    (config,) = of_kind(
        objects, "ConfigMap", pod_of(objects)["spec"]["volumes"][0]["configMap"]["name"]
    )
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(config["data"]["pdproxy.yaml"])
        file.flush()
        return load(Path(file.name), {})


def mistakes(thing: dict[str, Any], version: str) -> list[str]:
    """Return what is wrong with an object for a version of Kubernetes, unknown fields included."""
    place = (thing["apiVersion"], thing["kind"])
    if place in CUSTOM:
        return []
    found = _validator(version, *place).iter_errors(thing)
    return [f"{error.json_path}: {error.message}" for error in found]


@cache
def _validator(version: str, api: str, kind: str) -> jsonschema.Draft202012Validator:
    group, _, number = api.rpartition("/")
    name = "-".join(filter(None, [group.partition(".")[0], number]))
    file = f"{_folder(version)}/{kind.lower()}-{name}.json"
    schema = utils.schema_contents(file, version)
    registry = Resource.from_contents(schema) @ _definitions(version)
    return jsonschema.Draft202012Validator(schema, registry=registry)


@cache
def _definitions(version: str) -> Registry[Any]:
    definitions = utils.schema_contents(f"{_folder(version)}/_definitions.json", version)
    return Resource.from_contents(definitions) @ Registry()


def _folder(version: str) -> str:
    return f"kubernetes-json-schema/v{version}.0-local-strict"
