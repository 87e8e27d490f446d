"""Reads the YAML file of the settings, and the files that settings name: keys and passwords.

Each error is one line with the setting, the file and the line, and no key. Owns the bounds of what
is read.

PyYAML lets a later key overwrite an earlier one, and its messages quote the file. Both are wrong
for settings: the first hides half of an edit, the second may print a key of `auth`. Nor does it
bound what a few lines of aliases stand for.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import yaml

from pdproxy.kit.regular_file import UnusableFileError, read_regular
from pdproxy.settings.errors import KeyPath, Mistakes, SettingsError, quote, spell_key
from pdproxy.settings.section import Key

_MAX_KEY_BYTES = 1_048_576
"""A larger file is no file of keys or certificates: its name is wrong."""

MAX_BYTES = 4 << 20
"""A larger file is no file of settings: its name is wrong."""
MAX_VALUES = 1_000_000
"""Keys and values of a file, those that an alias stands for counted at each alias: ten lines can
stand for billions.
"""


def read_yaml(path: Path, found: Mistakes) -> object:
    """Return what the file holds, None if nothing. The lines of its keys are noted in `found`, and
    keys that are given twice are added.

    Raises:
        SettingsError: it can't be read, is no regular file, is no YAML, or holds too much.
    """
    name = spell_file(path)
    try:
        loader = yaml.SafeLoader(read_regular(path, MAX_BYTES))
        root = loader.get_single_node()
        if root is None:
            return None
        if _count(root, {}, name) > MAX_VALUES:
            raise SettingsError(f"{name}: its aliases stand for more than {MAX_VALUES} values")
        _note_keys(root, (), set(), name, found)
        return _construct(loader, root, name)
    except SettingsError:
        raise
    except UnusableFileError as error:
        raise SettingsError(f"{name}: {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise SettingsError(
            f"{name}: not YAML: {_one_line(error.problem or error.context or 'broken')}{line}"
        ) from None
    except RecursionError:
        raise SettingsError(f"{name}: nested too deeply") from None
    except (yaml.YAMLError, ValueError):
        # a ValueError is a null byte in the path, or bytes that are no text
        raise SettingsError(f"{name}: not YAML: holds characters that text can't have") from None


def _construct(loader: yaml.SafeLoader, root: yaml.Node, name: str) -> object:
    try:
        return loader.construct_document(root)
    except (yaml.YAMLError, RecursionError):
        raise
    except Exception:
        # A month 13, a number of 5000 digits, `!!int ''`: PyYAML does not catch what its
        # constructors raise.
        raise SettingsError(
            f"{name}: holds a date, a number or a tagged value that can't be read"
        ) from None


def spell_file(path: Path) -> str:
    """Spell a file's name on one line."""
    text = str(path)
    return text if text.isprintable() else quote(text)


def _count(node: yaml.Node, counts: dict[int, int | None], name: str) -> int:
    """Return how many keys and values a node stands for. `counts`: of the nodes that were seen,
    None: of those around it.

    Raises:
        SettingsError: it holds itself.
    """
    if id(node) not in counts:
        counts[id(node)] = None
        items = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = (one for item in items for one in (item if isinstance(item, tuple) else (item,)))
        counts[id(node)] = 1 + sum(_count(part, counts, name) for part in parts)
    if (count := counts[id(node)]) is None:
        raise SettingsError(f"{name}: an alias stands for what it is a part of")
    return count


def _note_keys(node: yaml.Node, path: KeyPath, seen: set[int], name: str, found: Mistakes) -> None:
    """Note the lines of all keys, and add those that are given twice to `found`."""
    if id(node) in seen:  # an alias: checked where it was defined
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _note_keys(item, (*path, index), seen, name, found)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # a list as key: the constructor or `conform` refuses it
            here, line = (*path, key.value), key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                first = lines[key.tag, key.value]
                found.add(
                    here,
                    f"{spell_key(here)}: given twice, in line {first} and {line} (file {name})",
                )
            lines[key.tag, key.value] = line
            found.read_at(here, line)
            _note_keys(value, here, seen, name, found)


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))[:200]


def read_keys(setting: str, path: str) -> tuple[str, ...]:
    """Return the keys of a file, as `read_numbered_keys` reads them.

    Raises:
        SettingsError: as there, or there is no key.
    """
    keys = tuple(key for _, key in read_numbered_keys(setting, path))
    if not keys:
        raise SettingsError(f"{setting}: {spell_file(Path(path))}: holds no key")
    return keys


def read_numbered_keys(setting: str, path: str) -> list[tuple[int, str]]:
    """Return the numbers of lines and the keys of a file, one per line; blank lines and those that
    begin with `#` are skipped.

    Raises:
        SettingsError: it can't be read, or a line is not a key.
    """
    keys: list[tuple[int, str]] = []
    for number, line in enumerate(read_lines(setting, path), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            keys.append((number, msgspec.convert(text, Key)))
        except msgspec.ValidationError:
            raise SettingsError(
                f"{setting}: {spell_file(Path(path))}: line {number} is no key of visible ASCII "
                f"characters without blanks"
            ) from None
    return keys


def read_key(setting: str, path: str) -> str:
    """Return the one key of a file that is written like those of `read_keys`.

    Raises:
        SettingsError: as `read_keys`, or it holds several.
    """
    keys = read_keys(setting, path)
    if len(keys) > 1:
        raise SettingsError(
            f"{setting}: {spell_file(Path(path))}: holds {len(keys)} keys, expected one"
        )
    return keys[0]


def read_password(setting: str, path: str) -> str:
    """Return the first line of a file.

    Raises:
        SettingsError: it can't be read, or the line is empty.
    """
    lines = read_lines(setting, path)
    if not lines or not lines[0]:
        raise SettingsError(
            f"{setting}: {spell_file(Path(path))}: holds no password in its first line"
        )
    return lines[0]


def read_file(setting: str, path: str) -> bytes:
    """Return a file's bytes.

    Raises:
        SettingsError: it can't be read, is no regular file, or is too large.
    """
    name = spell_file(Path(path))
    try:
        return read_regular(path, _MAX_KEY_BYTES)
    except UnusableFileError as error:
        raise SettingsError(f"{setting}: {name}: {error}") from None


def read_lines(setting: str, path: str) -> list[str]:
    """Return the lines of a file of text.

    Raises:
        SettingsError: it can't be read.
    """
    try:
        return read_file(setting, path).decode().splitlines()
    except UnicodeDecodeError:
        raise SettingsError(f"{setting}: {spell_file(Path(path))}: is no text") from None
