"""Reads a YAML file into plain values. Each error is one line.

PyYAML lets a later key overwrite an earlier one, and its messages quote the file. Both are wrong for settings: the first
hides half of an edit, the second may print a key of `auth`. Nor does it bound what a few lines of aliases stand for.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from pdproxy.kit.regular_file import UnreadableError, read_regular
from pdproxy.settings.errors import KeyPath, Mistakes, SettingsError, quote, spell_key

MAX_BYTES = 4 << 20
"""A larger file is no file of settings: its name is wrong."""
MAX_VALUES = 1_000_000
"""Keys and values of a file, those that an alias stands for counted at each alias: ten lines can stand for billions."""


def read_yaml(path: Path, found: Mistakes) -> object:
    """Return what the file holds, None if nothing. Keys that are given twice are added to `found`.

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
        _find_duplicates(root, (), set(), name, found)
        return _construct(loader, root, name)
    except SettingsError:
        raise
    except UnreadableError as error:
        raise SettingsError(f"{name}: {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise SettingsError(
            f"{name}: not YAML: {_one_line(error.problem or error.context or 'broken')}{line}"
        ) from None
    except RecursionError:
        raise SettingsError(f"{name}: nested too deeply") from None
    except (yaml.YAMLError, ValueError):  # a ValueError is a null byte in the path, or bytes that are no text
        raise SettingsError(f"{name}: not YAML: holds characters that text can't have") from None


def _construct(loader: yaml.SafeLoader, root: yaml.Node, name: str) -> object:
    try:
        return loader.construct_document(root)
    except (yaml.YAMLError, RecursionError):
        raise
    except Exception:
        # A month 13, a number of 5000 digits, `!!int ''`: PyYAML does not catch what its constructors raise.
        raise SettingsError(f"{name}: holds a date, a number or a tagged value that can't be read") from None


def spell_file(path: Path) -> str:
    """Spell a file's name on one line."""
    text = str(path)
    return text if text.isprintable() else quote(text)


def _count(node: yaml.Node, counts: dict[int, int | None], name: str) -> int:
    """Return how many keys and values a node stands for. `counts`: of the nodes that were seen, None: of those around it.

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


def _find_duplicates(node: yaml.Node, path: KeyPath, seen: set[int], name: str, found: Mistakes) -> None:
    if id(node) in seen:  # an alias: checked where it was defined
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _find_duplicates(item, (*path, index), seen, name, found)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # a list as key: the constructor or `conform` refuses it
            here, line = (*path, key.value), key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                first = lines[key.tag, key.value]
                found.add(here, f"{spell_key(here)}: given twice, in line {first} and {line} (file {name})")
            lines[key.tag, key.value] = line
            _find_duplicates(value, here, seen, name, found)


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))[:200]
