"""The objects of the chart that Kubernetes itself does not know have only fields that exist: the
types of the Gateway API and of Prometheus' operator say so, as TypeScript has them.
"""

# Needs node's packages in the folder that PDPROXY_TEST_TYPES names: `.ci/full chart` installs them.
# They have no types of LeaderWorkerSets.

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.chart.render import CUSTOM, Objects, rendered
from tests.chart.sets import SETS

TYPES = Path(os.environ["PDPROXY_TEST_TYPES"])
PACKAGES = {
    "gateway.networking.k8s.io/v1": "gateway-api",
    "monitoring.coreos.com/v1": "prometheus-operator",
}
TYPED = {one for one in CUSTOM if one[0] in PACKAGES}
OPTIONS = ["--noEmit", "--skipLibCheck", "--strict", "--module", "nodenext"]


def said(objects: Objects) -> str:
    """Return what TypeScript says of objects: nothing, if all of their fields exist."""
    lines = []
    for number, one in enumerate(objects):
        api, kind = one["apiVersion"], one["kind"]
        path = f"@kubernetes-models/{PACKAGES[api]}/{api}/{kind}"
        lines.append(f'import {{I{kind} as I{number}}} from "{path}";')
        lines.append(f"export const it{number}: I{number} = {json.dumps(one)};")
    file = TYPES / "objects.ts"
    file.write_text("\n".join(lines))
    words = [str(TYPES / "node_modules" / ".bin" / "tsc"), *OPTIONS, file.name]
    return subprocess.run(words, cwd=TYPES, capture_output=True, text=True, timeout=60).stdout


def custom() -> Objects:
    found = [one for name in SETS for one in rendered(SETS[name])]
    return [one for one in found if (one["apiVersion"], one["kind"]) in TYPED]


def test_all_fields_are_fields_of_the_types() -> None:
    objects = custom()
    assert {(one["apiVersion"], one["kind"]) for one in objects} == TYPED
    assert said(objects) == ""


def test_another_field_is_found() -> None:
    for one in custom():
        spec: dict[str, Any] = one["spec"]
        place = next((value[0] for value in spec.values() if isinstance(value, list)), spec)
        (spec if isinstance(place, str) else place)["intervall"] = "15s"
        assert "intervall" in said([one]), one["kind"]
