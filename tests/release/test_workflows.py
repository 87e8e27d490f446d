"""Workflows run what exists, with the rights that they need, and actions that nobody can change."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.reference.markdown import ROOT

FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
WRITES = {
    "package": {"id-token", "attestations"},
    "image": {"packages"},
    "index": {"packages", "id-token", "attestations"},
    "charts": {"id-token", "attestations"},
    "pypi": {"id-token"},
    "publish": {"contents"},
}
"""What each job may write."""


def jobs() -> Iterator[tuple[Path, str, dict[str, Any]]]:
    for file in FILES:
        for name, job in yaml.safe_load(file.read_text())["jobs"].items():
            yield file, name, job


def of_release() -> dict[str, dict[str, Any]]:
    return {name: job for file, name, job in jobs() if file.name == "release.yml"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_actions_are_pinned_by_commit(file: Path) -> None:
    """With the version behind it, and one commit for one action; or they are of this repository."""
    used = re.findall(r"uses: (\S+)(.*)", file.read_text())
    assert used
    pins: dict[str, str] = {}
    for action, comment in used:
        if action.startswith("./"):
            assert (ROOT / action).is_file()
            continue
        name, _, commit = action.partition("@")
        assert re.fullmatch(r"[0-9a-f]{40}", commit), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action
        assert pins.setdefault(name, commit) == commit


def test_a_job_may_write_only_what_it_has_to() -> None:
    for file in FILES:
        assert yaml.safe_load(file.read_text())["permissions"] == {"contents": "read"}
    found = {}
    for _, name, job in jobs():
        rights = job.get("permissions", {})
        if writes := {right for right, level in rights.items() if level != "read"}:
            found[name] = writes
    assert found == WRITES


def test_every_job_has_an_end() -> None:
    assert all("timeout-minutes" in job or "uses" in job for _, _, job in jobs())


def test_nothing_is_published_before_the_gate_has_passed() -> None:
    release = of_release()

    def above(name: str) -> set[str]:
        needs = release[name].get("needs", [])
        names = {needs} if isinstance(needs, str) else {*needs}
        return names.union(*(above(one) for one in names))

    for name in ("image", "index", "charts", "pypi", "publish"):
        assert {"gate", "package"} <= above(name), name


def test_scripts_are_right_and_name_files_and_modules_that_exist(tmp_path: Path) -> None:
    scripts = []
    for file, name, job in jobs():
        for at, step in enumerate(job.get("steps", ())):
            if "run" in step:
                scripts.append(tmp_path / f"{file.stem}-{name}-{at}.sh")
                scripts[-1].write_text(f"#!/usr/bin/env bash\nset -e\n{step['run']}")
                for word in re.findall(r"-r (\S+)|(?<!\S)(\.ci/\w+)", step["run"]):
                    pattern = re.sub(r"\$\w+", "*", (word[0] or word[1]).strip('"'))
                    assert [*ROOT.glob(pattern)], word
                for module in re.findall(r"python -m (tests\.\S+)", step["run"]):
                    assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
                assert "${{" not in step["run"], "a value goes through env: it may hold anything"
    program = Path(sys.executable).with_name("shellcheck")  # PATH may lack it
    done = subprocess.run([program, *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_outputs_and_artifacts_of_other_jobs_exist() -> None:
    release = of_release()
    for name, output in re.findall(r"needs\.(\w+)\.outputs\.(\w+)", str(release)):
        assert output in release[name]["outputs"]
    steps = [step for job in release.values() for step in job.get("steps", ())]
    up, down = (
        [step["with"]["name"] for step in steps if f"/{verb}-artifact@" in step.get("uses", "")]
        for verb in ("upload", "download")
    )
    assert {*up} == {*down}


def test_the_sbom_of_an_image_is_of_the_image_that_it_is_signed_for() -> None:
    """Which is named by the digest, and whose SBOM the same job has made."""
    made, signed = {}, {}
    for job in of_release().values():
        for step in job.get("steps", ()):
            given = step.get("with", {})
            if "/sbom-action@" in step.get("uses", ""):
                made[given["output-file"]] = given["image"]
            elif "subject-digest" in given and "sbom-path" in given:
                image = f"{given['subject-name']}@{given['subject-digest']}"
                assert made[given["sbom-path"]] == image
                signed[image] = given["sbom-path"]
    assert len(signed) == len(made) == 2
