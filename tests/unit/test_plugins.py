"""Policies and KV contracts of other packages: found by their entry points, and named by the
settings.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import pdproxy
from pdproxy.serving.dispatch.orders import ORDERS
from pdproxy.transfer.contract import ORDER_NAMES
from pdproxy.transfer.nixl_push import CONTRACT as PUSH

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/guide/policies.md").read_text()
POLICY = "[pdproxy.policies]\nlongest_idle = my_policy:LongestIdle\n"
EXAMPLE = "\n".join(re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL))
CONNECTOR = (
    "from pdproxy.transfer import shared\nfrom msgspec.structs import replace\nENTRY = "
    "replace(shared.ENTRY, name='{}')\n"
)
RANKS = """
from types import SimpleNamespace as N
from pdproxy.scheduling.ledger_engine import Role
from pdproxy.scheduling.policies import POLICIES
from pdproxy.scheduling.policy import Ask, PolicyContext
policy = POLICIES["longest_idle"](PolicyContext(Role.PREFILL))
nodes = [N(url="a"), N(url="b")]
policy.opened(N(engine=nodes[0]), Ask("m", 1, 5.0))
print([node.url for node in policy.rank(Ask("m", 1, 6.0), nodes)])
"""
ENTRY = (
    "from pdproxy.transfer import registry; print(registry.entry_of('mine').name, 'mine' in "
    "registry.names())"
)
CHECK = (
    "-m",
    "pdproxy",
    "config",
    "validate",
    "--prefill",
    "127.0.0.1:1",
    "--decode",
    "127.0.0.1:2",
)


def run(
    where: Path, files: dict[str, str], entry_points: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run Python where a package with these files and entry points is installed."""
    for name, text in files.items():
        (where / name).write_text(text)
    about = where / "mine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entry_points)
    paths = os.pathsep.join([str(where), str(Path(pdproxy.__file__).parents[1])])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_guides_policy_ranks(tmp_path: Path) -> None:
    assert 'longest_idle = "my_policy:LongestIdle"' in GUIDE
    done = run(tmp_path, {"my_policy.py": EXAMPLE}, POLICY, "-c", RANKS)
    assert (done.stdout, done.returncode) == ("['b', 'a']\n", 0), done.stderr


@pytest.mark.parametrize(("name", "code"), [("longest_idle", 0), ("longest_idler", 2)])
def test_settings_name_a_policy_of_another_package(tmp_path: Path, name: str, code: int) -> None:
    done = run(tmp_path, {"my_policy.py": EXAMPLE}, POLICY, *CHECK, "--policy", name)
    assert done.returncode == code, done.stderr
    assert ("longest_idle, " in done.stderr) == (code == 2)


def test_each_order_that_a_contract_may_name_has_its_function() -> None:
    """What names none fails as it is made, and not at its first request."""
    assert tuple(ORDERS) == ORDER_NAMES
    with pytest.raises(ValueError, match="names no order of legs: 'sideways'"):
        replace(PUSH, order="sideways")


def test_a_contract_of_another_package(tmp_path: Path) -> None:
    points = "[pdproxy.connectors]\nmine = my_connector:ENTRY\n"
    done = run(tmp_path, {"my_connector.py": CONNECTOR.format("mine")}, points, "-c", ENTRY)
    assert (done.stdout, done.returncode) == ("mine True\n", 0), done.stderr


@pytest.mark.parametrize(
    ("points", "said"),
    [
        (
            "[pdproxy.policies]\nmine = nowhere:Policy\n",
            "can't be imported: ModuleNotFoundError: No module named 'nowhere'",
        ),
        (
            "[pdproxy.policies]\nleast_load = my_policy:LongestIdle\n",
            "there is another one of this name",
        ),
        (
            "[pdproxy.policies]\nmine = my_policy:__doc__\n",
            "'mine' of pdproxy.policies is no function that makes a policy",
        ),
        (
            "[pdproxy.connectors]\nmine = my_policy:LongestIdle\n",
            "'mine' of pdproxy.connectors is no `Entry` of this name",
        ),
        (
            "[pdproxy.connectors]\nmine = my_connector:ENTRY\n",
            "'mine' of pdproxy.connectors is no `Entry` of this name",
        ),
        ("[pdproxy.connectors]\nnixl = my_connector:ENTRY\n", "there is another one of this name"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_one_line(tmp_path: Path, points: str, said: str) -> None:
    files = {"my_policy.py": EXAMPLE, "my_connector.py": CONNECTOR.format("theirs")}
    done = run(tmp_path, files, points, *CHECK)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
