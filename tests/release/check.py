"""Whether this tree may be released under a tag: `python -m tests.release.check v1.0.0` prints the
release's notes, or what is wrong.
"""

from __future__ import annotations

import re
import sys
import tomllib

from tests.reference.markdown import ROOT
from tests.release import description, version

_HEADING = re.compile(r"^## (?P<version>\S+)(?: - \d{4}-\d{2}-\d{2})?$", re.MULTILINE)


def sections(changelog: str) -> dict[str, str]:
    """Return the sections of a changelog by their headings, without `## `."""
    found = [*_HEADING.finditer(changelog)]
    ends = [one.start() for one in found[1:]] + [len(changelog)]
    return {
        one[0].removeprefix("## "): changelog[one.end() : end].strip()
        for one, end in zip(found, ends, strict=True)
    }


def notes(tag: str, changelog: str) -> str:
    """Return what a changelog says of the version of a tag; nothing if it says nothing."""
    found = sections(changelog).items()
    return next((text for head, text in found if head.startswith(f"{tag[1:]} - ")), "")


def sources() -> str:
    """Return the address of the sources; nothing if pyproject.toml has none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project.get("urls", {}).get("Source", ""))


def wrong(tag: str, changelog: str, described: str, sources: str) -> list[str]:
    """Return what keeps a tree from being released under a tag. `described`: the file of the
    description of the last release. `sources`: their address.
    """
    found = []
    if tag != (own := f"v{version.current()}"):
        found.append(f"the tag is {tag}, and pyproject.toml says {own}")
    if not notes(tag, changelog):
        found.append(f"CHANGELOG.md has no section `## {tag[1:]} - YYYY-MM-DD` with changes")
    if sections(changelog).get("Unreleased"):
        found.append("CHANGELOG.md has changes under `## Unreleased`: they belong to the version")
    if described != description.written(description.described()):
        name = description.FILE.relative_to(ROOT)
        found.append(f"{name} is not of this tree: run python -m tests.release.description")
    if not sources:
        found.append(
            "pyproject.toml has no Source under [project.urls]: the package's links go there"
        )
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m tests.release.check vX.Y.Z")
    text = (ROOT / "CHANGELOG.md").read_text()
    if problems := wrong(sys.argv[1], text, description.FILE.read_text(), sources()):
        raise SystemExit("\n".join(problems))
    print(notes(sys.argv[1], text))
