"""The options that are settings, in groups by purpose: those that the fields of the settings
declare (`Option`).

Owns the groups of the help and their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pdproxy.settings.engines import NodeRole
from pdproxy.settings.kv import ReceiverSettings
from pdproxy.settings.load import POOL
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import SOURCES, Settings
from pdproxy.settings.section import Field, fields_of, is_section

RECEIVER = "receiver."
"""The beginning of an option's key, if it sets a field of the decode engines' `receiver`."""


class SettingFlag(NamedTuple):
    """An option that sets one key. The first name is that of errors."""

    names: tuple[str, ...]
    metavar: str
    key: str
    help: str


class FlagGroup(NamedTuple):
    """A group of the help: its title, a sentence below it (or nothing), and its options.

    `keys`: of its settings, or of sections, in their order. `receivers`: the options set a field of
    the decode engines' `receiver`, and may be given once for each engine.
    """

    title: str
    about: str | None
    keys: tuple[str, ...]
    flags: tuple[SettingFlag, ...] = ()
    receivers: bool = False


ENGINES: dict[NodeRole, str] = {
    "encode": "engines that encode pictures, sounds and videos for others: as for --prefill",
    "prefill": "engines that compute prompts: http://HOST:PORT, https://HOST:PORT or HOST:PORT "
    "(http); " + "; ".join(section.forms for section in SOURCES.values()),
    "decode": "engines that generate answers from the KV of prefill engines: as for --prefill",
    "aggregated": "engines that compute prompts and generate answers: as for --prefill",
    "any": (
        "engines that do all of this, each for some requests (kv_role kv_both): as for --prefill"
    ),
    "by_label": "pods whose label says their role: pods://NAMESPACE:PORT/LABEL_SELECTOR",
}


_GROUPS = (
    FlagGroup("listening and TLS", None, ("listen",)),
    FlagGroup(
        "keys",
        "Files are read again when they change. A key itself is given by a variable, "
        "PDPROXY_AUTH__API_KEYS=KEY1,KEY2.",
        ("auth.api_keys_file", "auth.admin_keys_file", "auth"),
    ),
    FlagGroup(
        "browsers (CORS)", 'A LIST is A,B or, as for vLLM, JSON: \'["A", "B"]\'.', ("listen.cors",)
    ),
    FlagGroup(
        "KV transfer", None, (f"{POOL}connector", "kv_ready.notifier", "kv_ready", "registration")
    ),
    FlagGroup(
        "receivers of KV",
        "Each option once for all decode engines, or once for each, in their order.",
        (RECEIVER.removesuffix("."),),
        receivers=True,
    ),
    FlagGroup("tokenizing", None, (f"{POOL}tokenize", f"{POOL}tokenizer")),
    FlagGroup("choosing engines", None, (POOL.removesuffix("."),)),
    FlagGroup("limits", None, ("limits",)),
    FlagGroup("logs", None, ("observe",)),
)


def groups() -> tuple[FlagGroup, ...]:
    """Return the groups with their options. A section that none of them names has a group of its
    own, behind them.
    """
    found: dict[str, list[tuple[int, SettingFlag]]] = {group.title: [] for group in _GROUPS}
    places = {key: (group.title, at) for group in _GROUPS for at, key in enumerate(group.keys)}
    for flag in (*_flags(Settings, ""), *_flags(Pool, POOL), *_flags(ReceiverSettings, RECEIVER)):
        parts = flag.key.split(".")
        around = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        title, at = next((places[key] for key in around if key in places), (parts[0], 0))
        found.setdefault(title, []).append((at, flag))
    known = {group.title: group for group in _GROUPS}
    return tuple(
        known.get(title, FlagGroup(title, None, ()))._replace(
            flags=tuple(flag for _, flag in sorted(flags, key=lambda one: one[0]))
        )
        for title, flags in found.items()
    )


def _flags(kind: Any, before: str) -> Iterator[SettingFlag]:
    for field in fields_of(kind):
        key = f"{before}{field.name}"
        if is_section(field.type):
            yield from _flags(field.type, f"{key}.")
        if field.option is not None:
            yield SettingFlag(field.option.names, field.option.metavar, key, _help(field))


def _help(field: Field) -> str:
    assert field.option is not None
    words = field.option.words if isinstance(field.option.words, str) else field.option.words()
    if "(default: " in words:
        return words
    shown = str(field.default).lower() if isinstance(field.default, bool) else field.default
    return f"{words} (default: {shown})"
