"""The reference file `configs/reference.yaml`: every setting with its default, and above it what it
means.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from pdproxy.settings.schema import Settings
from pdproxy.settings.section import fields_of, is_section
from tests.reference.texts import item_of, spelled, texts

_WIDTH = 100
_EXAMPLES = {
    "url": ("http://127.0.0.1:8200", "http://127.0.0.1:8300"),
    "role": ("prefill", "decode"),
}
"""What the two engines have of the settings without a default."""
_HEAD = """\
Every setting of pdproxy with its default: a setting that you leave out has the value in this file.
Only `nodes` is an example.

  pdproxy config init --all --out pdproxy.yaml   writes this file
  pdproxy serve --config pdproxy.yaml
  pdproxy config print      shows the settings from all sources together
  pdproxy config validate   checks whether `serve` would accept them

Flags override environment variables, and variables override this file. A variable's name is the
key's path in capitals, with two underscores between its parts: PDPROXY_DEADLINES__FIRST_TOKEN=5,
PDPROXY_AUTH__API_KEYS=key1,key2. A list is comma separated, as here, or JSON: ["key1", "key2"]. An
unknown key or variable is an error. PDPROXY_CONFIG names this file if --config is not given;
PDPROXY_TEST_*, PDPROXY_ENGINES_*, PDPROXY_REQUIRE_ENGINES and PDPROXY_TORCH_INDEX belong to tests
and tools and are ignored.
"""


def page() -> str:
    """Return the file."""
    head = [f"# {line}".rstrip() for line in _HEAD.splitlines()]
    return "\n".join([*head, *_section(Settings, "", "")]) + "\n"


def _section(kind: Any, path: str, indent: str) -> Iterator[str]:
    for field in fields_of(kind):
        here, (item, suffix) = f"{path}{field.name}", item_of(field)
        if not indent:
            yield ""
        yield from _comment(texts()[here], indent)
        if is_section(item):
            yield f"{indent}{field.name}:"
            inner = indent + ("    " if suffix else "  ")
            lines = [*_section(item, f"{here}{suffix}.", inner)]
            yield from _as_item(lines) if suffix else lines
            if any(one.required for one in fields_of(item)):
                yield from _as_item(
                    [f"{inner}{name}: {second}" for name, (_, second) in _EXAMPLES.items()]
                )
        else:
            yield (
                f"{indent}{field.name}: "
                f"{_EXAMPLES[field.name][0] if field.required else spelled(field.default)}"
            )


def _as_item(lines: list[str]) -> list[str]:
    """Return lines as those of an item of a list: its first key has a dash."""
    at = next(at for at, line in enumerate(lines) if not line.lstrip().startswith("#"))
    indent = len(lines[at]) - len(lines[at].lstrip())
    lines[at] = f"{' ' * (indent - 2)}- {lines[at].lstrip()}"
    return lines


def _comment(lines: list[str], indent: str) -> Iterator[str]:
    """Yield a text as comments. Lines that begin with two blanks are items of a list, and stay."""
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if line and not line.startswith("  "):
            paragraph.append(line)
            continue
        width = _WIDTH - len(indent) - 2
        wrapped = textwrap.wrap(
            " ".join(paragraph), width, break_long_words=False, break_on_hyphens=False
        )
        yield from (f"{indent}# {one}" for one in (*wrapped, *([line] if line else [])))
        paragraph = []
