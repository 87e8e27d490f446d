"""Keys of clients and operators that are valid, from the settings and from a file of them. Owns their names."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pdproxy.serving.access.keys import digest
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.key_lines import KeyLimits, read_key_lines
from pdproxy.settings.yaml_file import spell_file

logger = logging.getLogger("pdproxy.files")


class ValidKeys(NamedTuple):
    """Their names by their digests, and the limits of those that a file gives a name."""

    names: Mapping[bytes, str]
    limits: Mapping[str, KeyLimits]


def no_keys() -> ValidKeys:
    """Return none."""
    return ValidKeys({}, {})


def fixed_keys(keys: Sequence[str]) -> ValidKeys:
    """Return the keys of the settings. One is named by its place, which log lines may show."""
    return ValidKeys({digest(key.encode()): f"settings:{number}" for number, key in enumerate(keys, 1)}, {})


def check_key_file(setting: str, path: str) -> None:
    """Refuse a file without a key: at the start, that is a mistake.

    Raises:
        SettingsError: it has none, or can't be read.
    """
    if not read_key_lines(setting, path):
        raise SettingsError(f"{setting}: {spell_file(Path(path))}: holds no key")


def read_valid_keys(setting: str, keys: Sequence[str], path: str) -> ValidKeys:
    """Return the keys of the settings and of a file. A file without a key means that no key of it is valid any more.

    An operator who removes the last one has withdrawn it.

    Raises:
        SettingsError: the file can't be read, or holds something else.
    """
    fixed, found = fixed_keys(keys).names, read_key_lines(setting, path)
    if not found:
        refused = "no key of it is valid now" if fixed else "every request is refused"
        logger.error("%s: %s: holds no key: %s", setting, path, refused)
    names = {digest(one.key.encode()): one.name or f"file:{one.number}" for one in found}
    limited = {digest(one.key.encode()): one.name for one in found if one.name is not None}
    return ValidKeys({**names, **fixed, **limited}, {one.name: one.limits for one in found if one.name is not None})
