"""Builds the sdist, and from it the wheel, as a release has them: `python -m tests.release.build
FOLDER`. The builder is hatchling, as installed here. It takes names and order from the tree, and
all times from `SOURCE_DATE_EPOCH`, which is the last commit's: so the same commit has the same
bytes wherever it is built.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.reference.markdown import ROOT


def sdist(tree: Path, to: Path, epoch: str) -> Path:
    """Build a tree's sdist. Return its path. `epoch`: the time of all that is in it, in seconds
    since 1970.
    """
    return _built("sdist", tree, to, epoch)


def wheel(tree: Path, to: Path, epoch: str) -> Path:
    """Build a tree's wheel. Return its path."""
    return _built("wheel", tree, to, epoch)


def unpacked(archive: Path, to: Path) -> Path:
    """Unpack an sdist. Return the tree in it."""
    to.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "-xzf", str(archive), "-C", str(to)], check=True)
    (tree,) = to.iterdir()
    return tree


def committed() -> str:
    """Return when the last commit was made, in seconds since 1970."""
    line = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()


def _built(kind: str, tree: Path, to: Path, epoch: str) -> Path:
    to.mkdir(parents=True, exist_ok=True)
    before = {*to.iterdir()}
    line = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(to.resolve())]
    environment = os.environ | {"SOURCE_DATE_EPOCH": epoch}
    done = subprocess.run(
        line, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"hatchling could not build the {kind}:\n{done.stdout}{done.stderr}")
    (made,) = {*to.iterdir()} - before
    return made


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m tests.release.build FOLDER")
    made = sdist(ROOT, Path(sys.argv[1]), epoch := committed())
    with tempfile.TemporaryDirectory() as folder:
        print(made, wheel(unpacked(made, Path(folder)), made.parent, epoch), sep="\n")
