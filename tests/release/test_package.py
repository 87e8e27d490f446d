"""sdist and wheel are the same bytes wherever and whenever they are built, and hold what they
should.
"""

from __future__ import annotations

import os
import re
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from hatch_build import description
from tests.reference.markdown import ROOT
from tests.release import build

EPOCH = "1700000000"
PACKAGES = ("pdproxy", "pdproxy_lab", "pdproxy_operator")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An sdist and a wheel of this tree."""
    folder = tmp_path_factory.mktemp("dist")
    return build.sdist(ROOT, folder, EPOCH), build.wheel(ROOT, folder, EPOCH)


def about_of(wheel: Path) -> Message:
    """A wheel's metadata."""
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (one for one in opened.namelist() if one.endswith(".dist-info/METADATA"))
        return Parser().parsestr(opened.read(name).decode())


def test_another_folder_umask_and_time_make_the_same_bytes(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    """And the sdist has all that the wheel is made of."""
    tree = build.unpacked(made[0], tmp_path / "elsewhere")
    for path in (tree, *tree.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o700 if path.is_dir() else path.stat().st_mode & 0o700)
            os.utime(path, (1, 1))
    before = os.umask(0o077)
    try:
        again = (
            build.sdist(tree, tmp_path / "dist", EPOCH),
            build.wheel(tree, tmp_path / "dist", EPOCH),
        )
    finally:
        os.umask(before)
    for first, second in zip(made, again, strict=True):
        assert second.name == first.name
        assert second.read_bytes() == first.read_bytes(), f"{first.name} is not reproducible"


def test_the_wheel_holds_the_packages_and_nothing_else(made: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(made[1]) as opened:
        names = {*opened.namelist()}
        own = f"pdproxy-{PROJECT['version']}.dist-info"
        files = {
            path.relative_to(ROOT / "proxy").as_posix()
            for package in PACKAGES
            for path in (ROOT / "proxy" / package).rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        }
        about = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
        assert names == files | {f"{own}/{name}" for name in about}
        assert {f"{package}/py.typed" for package in PACKAGES} <= names
        # What `pdproxy config init --all` prints: in the source tree it is a link.
        reference = opened.read("pdproxy/settings/reference.yaml")
        assert reference == (ROOT / "configs" / "reference.yaml").read_bytes()
        metadata = about_of(made[1])
        times = {one.date_time for one in opened.infolist()}
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["License-Expression"] == PROJECT["license"]
    needed = [one for one in metadata.get_all("Requires-Dist", []) if "extra ==" not in one]
    assert len(needed) == len(PROJECT["dependencies"])
    assert times == {(2023, 11, 14, 22, 13, 20)}


LINK = re.compile(r"\[([^]]*)]\(([^)\s]+)\)")


def test_the_description_has_no_relative_link(made: tuple[Path, Path]) -> None:
    """A package index shows it beside no other file."""
    shown = about_of(made[1]).get_payload()
    assert isinstance(shown, str)
    assert shown.startswith("# pdproxy\n")
    assert "## Install" in shown
    assert not [link for link in LINK.findall(shown) if not link[1].startswith("https://")]


@pytest.mark.parametrize(
    ("sources", "shown"),
    [
        (
            "https://e.f",
            "[two\nlines](https://e.f/blob/v1.2/b.md#c), ![g](https://e.f/raw/v1.2/h.svg), ",
        ),
        ("", "two\nlines, , "),
    ],
)
def test_links_of_the_description_go_to_the_sources_of_the_version(
    sources: str, shown: str
) -> None:
    readme, there = "[two\nlines](b.md#c), ![g](h.svg), ", "[d](https://a.b)"
    assert description(readme + there, sources, "1.2") == shown + there


def test_the_sdist_holds_what_proves_it(made: tuple[Path, Path]) -> None:
    """Tests, the documents that they read, and the locks; nothing that git ignores."""
    with tarfile.open(made[0]) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    tracked = (".ci/run", ".github/workflows/release.yml", "CHANGELOG.md", "docs/README.md")
    locks = {one.name for one in ROOT.glob("*.lock")}
    assert {*tracked, *locks, "tests/conftest.py"} <= names
    assert not [name for name in names if name.endswith(".pyc") or ".engines/" in name]
