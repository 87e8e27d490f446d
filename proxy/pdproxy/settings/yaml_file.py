"""Reads a YAML file into plain values. Each error is one line.

PyYAML lets a later key overwrite an earlier one, and its messages quote the file. Both are wrong for settings: the first
hides half of an edit, the second may print a key of `auth`.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from pdproxy.settings.errors import KeyPath, Mistakes, SettingsError, quote, spell_key


def read_yaml(path: Path, found: Mistakes) -> object:
    """Return what the file holds, None if nothing. Keys that are given twice are added to `found`.

    Raises:
        SettingsError: it can't be read, or is no YAML.
    """
    name = spell_file(path)
    try:
        loader = yaml.SafeLoader(path.read_bytes())
        root = loader.get_single_node()
        if root is None:
            return None
        _find_duplicates(root, (), set(), name, found)
        return _construct(loader, root, name)
    except SettingsError:
        raise
    except OSError as error:
        raise SettingsError(f"{name}: can't be read: {error.strerror or type(error).__name__}") from None
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
