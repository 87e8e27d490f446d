"""The wheel alone, in an environment without this tree: every command is there, the demo serves,
and the files that commands print are in it.
"""

# PDPROXY_TEST_PYTHON names that environment's Python.

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from pdproxy.cli.commands import COMMANDS
from tests.reference.markdown import ROOT
from tests.release.test_package import PACKAGES, PROJECT

PYTHON = Path(os.environ["PDPROXY_TEST_PYTHON"])
BARE = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "COLUMNS": "80"}


def ran(folder: Path, *arguments: str, seconds: float = 60) -> str:
    """Run a command outside of the tree. Return what it has printed."""
    line = [str(PYTHON.with_name("pdproxy")), *arguments]
    done = subprocess.run(
        line, cwd=folder, env=BARE, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr
    return done.stdout


def test_nothing_comes_from_this_tree(tmp_path: Path) -> None:
    line = f"import {', '.join(PACKAGES)}; print(*({'.__file__, '.join(PACKAGES)}.__file__))"
    found = subprocess.run(
        [str(PYTHON), "-c", line],
        cwd=tmp_path,
        env=BARE,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert len(found) == len(PACKAGES)
    assert all(PYTHON.parents[1] in Path(one).parents for one in found), found
    assert ran(tmp_path, "--version") == f"pdproxy {PROJECT['version']}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_there(name: str, tmp_path: Path) -> None:
    assert ran(tmp_path, name, "--help").startswith(f"usage: pdproxy {name}")


def test_files_that_commands_print_are_in_the_wheel(tmp_path: Path) -> None:
    assert ran(tmp_path, "config", "init", "--all") == (ROOT / "configs/reference.yaml").read_text()
    assert "listen" in ran(tmp_path, "config", "init")
    assert "class " in ran(tmp_path, "notifier")
    kinds = {
        one["spec"]["names"]["kind"]
        for one in yaml.safe_load_all(ran(tmp_path, "operator", "crds"))
    }
    assert kinds == {"PDRuntime", "PDProxy"}
    load = ("--gpus", "2", "--rate", "1", "--requests", "20", "--seeds", "1", "--chunks", "2048")
    plan = ran(tmp_path, "plan", "--slo", "ttft=500ms,tpot=15ms", *load, seconds=300)
    assert "engines with --max-num-batched-tokens 2048" in plan


def test_the_demo_serves_for_a_minute(tmp_path: Path) -> None:
    """Without a terminal it prints its figures, and ends by itself."""
    said = ran(tmp_path, "demo", "--port", "0", seconds=300)
    last = [line for line in said.splitlines() if " engines 8/8 up " in line][-1]
    print(last)
    counts = re.findall(r"answered (\d+), failed (\d+)", last)
    assert len(counts) == 2
    assert all(int(answered) > 0 == int(failed) for answered, failed in counts)
