"""Writes what a release has of the image by its digest: the packages of both charts, and
compose.yaml. `python -m tests.release.by_digest REPOSITORY@sha256:... FOLDER`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.chart.programs import program
from tests.reference.markdown import ROOT

CHARTS = ("chart", "chart-operator")
_IMAGE = re.compile(r"(?P<repository>\S+)@(?P<digest>sha256:[0-9a-f]{64})")
_VALUES = re.compile(r'^(image:\n  repository: )\S+(\n(?:  .*\n)*?  digest: )""$', re.MULTILINE)
_COMPOSE = re.compile(r"^  image: \S+\n  build: \.\n  pull_policy: build$", re.MULTILINE)


def values(text: str, image: str) -> str:
    """Return the values of a chart with an image by its digest.

    Raises:
        ValueError: the image has no digest, or the values have no place for one.
    """
    found = _IMAGE.fullmatch(image)
    if found is None:
        raise ValueError(f"{image}: expected REPOSITORY@sha256: and 64 hexadecimal digits")
    return _once(_VALUES, rf"\g<1>{found['repository']}\g<2>{found['digest']}", text)


def compose(text: str, image: str) -> str:
    """Return a compose.yaml that takes an image in place of building one.

    Raises:
        ValueError: it does not build one.
    """
    return _once(_COMPOSE, f"  image: {image}", text)


def package(image: str, to: Path) -> None:
    """Write the charts' packages and compose.yaml to a folder."""
    to.mkdir(parents=True, exist_ok=True)
    for name in CHARTS:
        with tempfile.TemporaryDirectory() as folder:
            # what is a link in the tree is a file here
            chart = Path(shutil.copytree(ROOT / "configs" / name, Path(folder) / name))
            file = chart / "values.yaml"
            file.write_text(values(file.read_text(), image))
            line = [str(program("helm")), "package", str(chart), "-d", str(to)]
            subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    (to / "compose.yaml").write_text(compose((ROOT / "compose.yaml").read_text(), image))


def _once(pattern: re.Pattern[str], new: str, text: str) -> str:
    made, count = pattern.subn(new, text)
    if count != 1:
        raise ValueError(f"{count} places in place of one: {pattern.pattern}")
    return made


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m tests.release.by_digest REPOSITORY@sha256:... FOLDER")
    try:
        package(sys.argv[1], Path(sys.argv[2]))
    except ValueError as error:
        raise SystemExit(str(error)) from None
