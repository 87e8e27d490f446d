"""The files that are made of the chart are current; the values and the notes say what is so."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdproxy.app.demand import DEMAND
from tests.chart.generate import FILES
from tests.chart.render import CHART, ROOT, VERSIONS, helm, mistakes, rendered
from tests.chart.sets import SETS


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_current(name: str) -> None:
    stale = f"{name} is stale: python -m tests.chart.generate"
    assert (ROOT / name).read_text() == FILES[name](), stale


def test_each_value_is_explained_once_and_used() -> None:
    """A value that no template reads does nothing; one without a default is not in the schema."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    templates = "\n".join(path.read_text() for path in (CHART / "templates").iterdir())
    names = [*_names(values)]
    assert len(names) > 80
    for name in names:
        assert re.search(rf"\.{name}\b", templates), f"{name} is used nowhere"


def _names(values: dict[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        yield name
        # What is below these is Kubernetes' own, and copied.
        is_ours = name not in ("resources", "podSecurityContext", "securityContext", "labels")
        if isinstance(value, dict) and is_ours and "maxUnavailable" not in value:
            yield from _names(value)


@pytest.mark.parametrize("name", ["2p2d", "keys of all kinds", "TLS"])
def test_the_notes_have_a_request_that_the_service_answers(name: str, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(SETS[name]))
    words = ["--dry-run=client", "--namespace", "llm", "-f", str(file)]
    notes = helm("install", "pdproxy", str(CHART), *words).partition("\nNOTES:\n")[2]
    curl = shlex.split(notes[notes.index("curl ") :].partition("\n\n")[0])
    body = json.loads(curl[curl.index("-d") + 1])
    assert body["model"] == "Qwen/Qwen3-0.6B"
    assert curl[1] == f"{'https' if name == 'TLS' else 'http'}://127.0.0.1:8000/v1/chat/completions"
    assert ("Authorization: Bearer $KEY" in curl) == (name == "keys of all kinds")
    assert "-n llm port-forward svc/pdproxy 8000:80" in notes


def test_the_chart_is_of_this_version_of_the_program_and_for_the_versions_that_are_tested() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{chart["appVersion"]}"\n' in project
    assert chart["kubeVersion"] == f">={VERSIONS[0]}.0-0"


def test_engines_are_of_the_version_that_compose_starts() -> None:
    image = yaml.safe_load((CHART / "values.yaml").read_text())["engineDefaults"]["image"]
    name = f"{image['repository']}:${{VLLM_VERSION:-{image['tag']}}}"
    assert f"image: {name}\n" in (ROOT / "compose.yaml").read_text()


def test_the_recipes_of_autoscalers_scale_what_the_chart_has() -> None:
    """By the metric that there is; Kubernetes takes the autoscaler, and what KEDA makes one of."""
    page = (ROOT / "docs/guide/kubernetes.md").read_text()
    part = page[page.index("## Autoscaling") : page.index("## Discovery")]
    blocks = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", part, re.DOTALL)]
    adapter, own, keda = blocks
    (rule,) = adapter["rules"]["external"]
    metric = own["spec"]["metrics"][0]["external"]["metric"]
    (trigger,) = keda["spec"]["triggers"]
    made = {
        **own,
        "spec": {**own["spec"], **keda["spec"]["advanced"]["horizontalPodAutoscalerConfig"]},
    }
    for version in VERSIONS:
        assert mistakes(own, version) == []
        assert mistakes(made, version) == []
    assert rule["seriesQuery"] == metric["name"] == DEMAND.name
    assert trigger["metadata"]["query"] == f'sum({DEMAND.name}{{role="decode"}})'
    deployments = {
        one["metadata"]["name"] for one in rendered(SETS["2p2d"]) if one["kind"] == "Deployment"
    }
    assert {one["spec"]["scaleTargetRef"]["name"] for one in (own, keda)} <= deployments
