"""The package's description: README.md, whose links are relative, as a package index can show it.
The builder (hatchling) calls this module by its name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE = re.compile(r"(?P<image>!?)\[(?P<text>[^]]*)]\((?!\w+:)(?P<to>[^)]*)\)")


def description(readme: str, sources: str, version: str) -> str:
    """Return a page whose links go to the sources of a version. `sources`: the address of their
    repository. While there is none, links are their texts, and images are left out.
    """

    def absolute(found: re.Match[str]) -> str:
        if not sources:
            return "" if found["image"] else found["text"]
        kind = "raw" if found["image"] else "blob"
        return f"{found['image']}[{found['text']}]({sources}/{kind}/v{version}/{found['to']})"

    return _RELATIVE.sub(absolute, readme)


class DescriptionHook(MetadataHookInterface):
    """Adds the description to pyproject.toml's own metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set what pyproject.toml says to be dynamic."""
        readme = (Path(self.root) / "README.md").read_text()
        sources = metadata.get("urls", {}).get("Source", "")
        text = description(readme, sources, metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
