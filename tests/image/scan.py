"""Prints what an image should not have, one finding per line: `python3 scan.py IMAGE BASE`, both
folders with all files of an image. Runs on the machine's own Python.
"""

import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = re.compile(
    r"(pip|easy_install|wheel|uv|gcc|g\+\+|cc|c\+\+|cpp|clang|ld|as|make|cmake|cargo|rustc|go|git|"
    r"curl|wget|ssh|sudo|gdb|strace)[\d.-]*"
)
PACKAGES = ("pip", "setuptools", "wheel", "ensurepip")
BUILD_FOLDERS = (b"/src/proxy", b"/tmp/wheel", b"/work/context")
SECRET = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\s+[A-Za-z0-9+/]{40}|\bhf_[A-Za-z]{34}\b")
SECRETS = re.compile(
    r"id_(rsa|ed25519|ecdsa)|\.netrc|\.pypirc|\.npmrc|\.git(config)?|.*\.key|\.env"
)
MADE_BY_BUILDAH = {Path("etc/resolv.conf"), Path("etc/hosts"), Path("etc/hostname")}
"""Empty files where a builder mounts its own, as in `dev`; whoever runs the image does the same."""
OWN = Path("opt/pdproxy")
"""Where all is that the image adds to its base, but for bytecode of Python's own library."""


def files(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield each path below `root`, relative to it, and what is known of it."""
    for folder, folders, names in os.walk(root):
        for name in (*folders, *names):
            path = Path(folder, name)
            yield path.relative_to(root), path.lstat()


def findings(image: Path, base: Path) -> Iterator[str]:
    """Yield a sentence for each thing that should not be in the image."""
    for path, known in files(image):
        if path in MADE_BY_BUILDAH or path.parts[0] == "dev":
            continue
        mode, regular = known.st_mode, stat.S_ISREG(known.st_mode)
        own, inherited = OWN in (path, *path.parents), os.path.lexists(base / path)
        if regular and mode & (stat.S_ISUID | stat.S_ISGID):
            yield f"{path} is setuid or setgid"
        if mode & stat.S_IWOTH and not stat.S_ISLNK(mode) and not mode & stat.S_ISVTX:
            yield f"{path} may be written by anybody"
        if own and (
            known.st_uid or known.st_gid or (mode & stat.S_IWGRP and not stat.S_ISLNK(mode))
        ):
            yield f"{path} is not root's alone"
        if path.parent.name in ("bin", "sbin") and PROGRAMS.fullmatch(path.name):
            yield f"{path} is a program that installs, builds or fetches"
        if path.name in PACKAGES or (
            path.name.endswith(".dist-info") and path.name.split("-")[0] in PACKAGES
        ):
            yield f"{path} belongs to a package that installs"
        if SECRETS.fullmatch(path.name):
            yield f"{path} has the name of a secret"
        if not own and not inherited and path != OWN.parent and "__pycache__" not in path.parts:
            yield f"{path} is outside of {OWN}, and not of the base"
        if (
            not own
            and inherited
            and regular
            and (base / path).is_file()
            and not _same(image / path, base / path)
        ):
            yield f"{path} is not as in the base"
        if own and path.name in ("tests", "direct_url.json", ".cache"):
            yield f"{path} is of no use in an image"
        if path.is_relative_to(OWN / "share" / "doc"):
            yield f"{path} is documentation"
        if own and regular:
            content = (image / path).read_bytes()
            if any(part.startswith("pdproxy") for part in path.parts[2:]):
                named = [one for one in BUILD_FOLDERS if one in content]
                yield from (f"{path} names the folder {one!r}" for one in named)
            if SECRET.search(content):
                yield f"{path} has a secret"


def _same(one: Path, other: Path) -> bool:
    return one.lstat().st_size == other.lstat().st_size and one.read_bytes() == other.read_bytes()


if __name__ == "__main__":
    print(*findings(Path(sys.argv[1]), Path(sys.argv[2])), sep="\n")
