"""Keys of clients and operators that are valid, from the settings and from a file of them. Owns
their names.

Owns the rule that a key has one purpose, too: what is a client's key, or goes to engines, opens no
admin API.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pdproxy.serving.access.keys import ValidKey, digest
from pdproxy.serving.access.routes import KEY_ROUTES
from pdproxy.settings.errors import SettingsError, did_you_mean
from pdproxy.settings.files import spell_file
from pdproxy.settings.keys import ALL_RIGHTS, KeyLimits, KeyLine, read_key_lines

logger = logging.getLogger("pdproxy.files")

SHORT = 16
"""Characters of a key that can't be guessed. A shorter one is reported."""
_MOST_NAMED = 5
"""Keys of one kind that a line names."""


class ValidKeys(NamedTuple):
    """The keys by their digests, and the limits of those that a file gives a name. `short`: the
    names of those that are short.
    """

    keys: Mapping[bytes, ValidKey]
    limits: Mapping[str, KeyLimits]
    short: Sequence[str] = ()


class KeysInForce(NamedTuple):
    """What opens what now. `wrong`: keys that do not open the admin API although they are listed
    for it, and why.
    """

    clients: ValidKeys
    operators: Mapping[bytes, ValidKey]
    wrong: Sequence[str] = ()


def no_keys() -> ValidKeys:
    """Return none."""
    return ValidKeys({}, {})


def fixed_keys(keys: Sequence[str]) -> ValidKeys:
    """Return the keys of the settings. One is named by its place, which log lines may show."""
    named = [(f"settings:{number}", key) for number, key in enumerate(keys, 1)]
    made = [ValidKey(name=name, digest=digest(key.encode())) for name, key in named]
    return ValidKeys(
        {one.digest: one for one in made}, {}, [name for name, key in named if len(key) < SHORT]
    )


def check_key_file(setting: str, path: str, *, of_operators: bool = False) -> None:
    """Refuse a file without a key: at the start, that is a mistake.

    Raises:
        SettingsError: it has none, or can't be read.
    """
    if not read_key_lines(setting, path, of_operators=of_operators):
        raise SettingsError(f"{setting}: {spell_file(Path(path))}: holds no key")


def read_valid_keys(
    setting: str,
    keys: Sequence[str],
    path: str,
    pools: Collection[str],
    *,
    of_operators: bool = False,
) -> ValidKeys:
    """Return the keys of the settings and of a file. A file without a key means that no key of it
    is valid any more.

    An operator who removes the last one has withdrawn it. `pools`: the names of all pools.

    Raises:
        SettingsError: the file can't be read, or holds something else.
    """
    fixed, found = fixed_keys(keys), read_key_lines(setting, path, of_operators=of_operators)
    if not found:
        refused = "no key of it is valid now" if fixed.keys else "every request is refused"
        logger.error("%s: %s: holds no key: %s", setting, path, refused)
    for line in found:
        _check_names(line, pools, f"{setting}: {spell_file(Path(path))}: line {line.number}")
    made = {one.digest: one for one in map(_valid, found)}
    # The line of a key says what it is good for, also if the settings list the key.
    limited = {
        one.digest: one for one in map(_valid, [line for line in found if line.name is not None])
    }
    short = [*fixed.short, *(_name(line) for line in found if len(line.key) < SHORT)]
    limits = {line.name: line.limits for line in found if line.name is not None}
    return ValidKeys({**made, **fixed.keys, **limited}, limits, short)


def in_force(clients: ValidKeys, operators: ValidKeys, engines: Collection[str]) -> KeysInForce:
    """Return what opens what. `engines`: the keys that go to engines, each of which could use what
    it gets.
    """
    to_engines = {digest(key.encode()) for key in engines}
    open_it, wrong = dict(operators.keys), []
    for found, one in operators.keys.items():
        if found in clients.keys:
            wrong.append(
                f"the key {one.name} of operators is also the key {clients.keys[found].name} of "
                f"clients"
            )
        elif found in to_engines:
            wrong.append(f"the key {one.name} of operators is also a key of engines")
        else:
            continue
        del open_it[found]
    return KeysInForce(clients, open_it, [f"auth: {one}" for one in wrong])


def notes_on(clients: ValidKeys, operators: ValidKeys, engines: Collection[str]) -> list[str]:
    """Return what an operator should know of the keys, a sentence each."""
    found = []
    for who, short in (("clients", clients.short), ("operators", operators.short)):
        if short:
            named = ", ".join(short[:_MOST_NAMED]) + (", ..." if len(short) > _MOST_NAMED else "")
            found.append(
                f"auth: keys of {who} are shorter than {SHORT} characters and may be guessed: "
                f"{named}"
            )
    to_engines = {digest(key.encode()) for key in engines}
    also = [one.name for one in clients.keys.values() if one.digest in to_engines][:_MOST_NAMED]
    if also:
        found.append(
            f"auth: keys of clients are also keys of engines, which can be used past the proxy: "
            f"{', '.join(also)}"
        )
    return found


def _valid(line: KeyLine) -> ValidKey:
    rights = None if line.rights == ALL_RIGHTS else line.rights
    return ValidKey(
        name=_name(line),
        digest=digest(line.key.encode()),
        rights=rights,
        until=line.rights.until,
        read_only=line.read_only,
    )


def _name(line: KeyLine) -> str:
    return line.name or f"file:{line.number}"


def _check_names(line: KeyLine, pools: Collection[str], where: str) -> None:
    """Refuse names of routes and pools that do not exist. They are no part of a key: an error may
    show them.

    Raises:
        SettingsError: there is one.
    """
    for word, given, known in (
        ("routes", line.rights.routes, KEY_ROUTES),
        ("pools", line.rights.pools, pools),
    ):
        for at, name in enumerate(given or (), 1):
            if name not in known:
                expected = f"expected {', '.join(sorted(known))}"
                raise SettingsError(
                    f"{where}: {word}: name {at} is none of them{did_you_mean(name, known)}: "
                    f"{expected}"
                )
