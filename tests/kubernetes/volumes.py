"""The files of a pod: ConfigMaps, Secrets and empty folders, each a folder of this machine. What
names a path in the container gets the path here.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.kubernetes.kinds import CONFIG_MAP, SECRET, Kind
from tests.kubernetes.objects import Api, Object

KINDS = {"configMap": (CONFIG_MAP, "name"), "secret": (SECRET, "secretName")}


class Volumes:
    """Those of a pod, in a folder of its own."""

    def __init__(self, api: Api, pod: Object, folder: Path) -> None:
        self._api = api
        self._sources = {one["name"]: one for one in pod["spec"].get("volumes", ())}
        (container,) = pod["spec"]["containers"]
        self._places = {
            one["mountPath"]: folder / one["name"] for one in container.get("volumeMounts", ())
        }
        for place in self._places.values():
            place.mkdir(parents=True, exist_ok=True)

    async def missing(self) -> str | None:
        """Write all files anew. Return what is not there, None if all is."""
        for place in self._places.values():
            for field, (kind, name) in KINDS.items():
                if (source := self._sources[place.name].get(field)) is None:
                    continue
                named = {one["metadata"]["name"]: one for one in await self._api.of(kind).list()}
                if (found := named.get(source[name])) is None:
                    return f"{kind.kind} {source[name]}"
                for file, text in _data(kind, found).items():
                    _write(place / file, self.here(text))
        return None

    def here(self, text: str) -> str:
        """Return a text with the paths of this machine."""
        for there, place in self._places.items():
            text = re.sub(rf"(?<![\w/.-]){re.escape(there)}(?![\w.-])", str(place), text)
        return text


def _data(kind: Kind, one: Object) -> dict[str, str]:
    kept: Mapping[str, Any] = one.get("data") or {}
    if kind == SECRET:
        kept = {name: b64decode(value).decode() for name, value in kept.items()}
    return {**kept, **(one.get("stringData") or {})}


def _write(path: Path, text: str) -> None:
    """Write a file as a whole, and only if it has another text."""
    if path.exists() and path.read_text() == text:
        return
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.rename(path)
