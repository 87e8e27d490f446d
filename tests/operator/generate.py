"""Makes the files of the objects of each set, for readers of changes: `python -m
tests.operator.generate`.
"""

from __future__ import annotations

import copy

import yaml

from tests.chart.generate import HOOK
from tests.chart.render import ROOT
from tests.operator.sets import SETS, objects_of

FOLDER = ROOT / "tests" / "operator" / "golden"


def text_of(name: str) -> str:
    """Return the objects of a set. A file that stands in the package is not repeated."""
    objects = copy.deepcopy(objects_of(name))
    for one in objects:
        if "prestop.sh" in one.get("data", {}):
            assert one["data"]["prestop.sh"] == HOOK.read_text()
            one["data"]["prestop.sh"] = f"the content of {HOOK.relative_to(ROOT)}"
    return yaml.safe_dump_all(objects, sort_keys=False, width=100)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    for name in SETS:
        (FOLDER / f"{name}.yaml").write_text(text_of(name))
        print(f"wrote tests/operator/golden/{name}.yaml")
