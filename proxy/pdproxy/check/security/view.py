"""What the rules look at: the settings, and what this machine shows of the files that they name.

Owns the reading of files. The rules are pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from pdproxy.app.exposed_files import exposure
from pdproxy.kit.addresses import is_any, is_loopback
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.keys import read_key_lines
from pdproxy.settings.listen import AdminPlace, place_of
from pdproxy.settings.schema import Settings


@dataclass(frozen=True, slots=True)
class SecurityView:
    """What is known.

    - `keys`: keys of clients and operators, each with its setting and its name there.
    - `exposed`: the files that hold secrets and that others may read or change, each with its
      setting.
    """

    settings: Settings
    keys: Sequence[tuple[str, str, int]] = ()
    exposed: Sequence[tuple[str, str]] = ()

    @property
    def place(self) -> str:
        """Where clients reach the proxy."""
        listen = self.settings.listen
        return f"unix:{listen.uds}" if listen.uds is not None else f"{listen.host}:{listen.port}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the clients' listener."""
        listen = self.settings.listen
        return listen.uds is not None or is_loopback(listen.host)

    @property
    def admin(self) -> AdminPlace | None:
        """Where the admin API is, None if there is none."""
        address = self.settings.listen.admin
        return None if address is None else place_of(address)

    @property
    def nodes(self) -> Iterator[tuple[str, ConfiguredEngine]]:
        """All engines of the settings, each with the name of its setting."""
        for at, pool in enumerate(self.settings.pools):
            for index, engine in enumerate(pool.nodes):
                yield f"pools[{at}].nodes[{index}]", engine

    @property
    def sockets(self) -> Iterator[tuple[str, str]]:
        """The addresses at which engines reach the proxy by ZMQ, each with its setting."""
        settings = self.settings
        yield "kv_ready.host", settings.kv_ready.host
        yield "registration.host", settings.registration.host
        for at, pool in enumerate(settings.pools):
            if pool.kv_events.enabled and pool.kv_events.host is not None:
                yield f"pools[{at}].kv_events.host", pool.kv_events.host

    @property
    def wide_sockets(self) -> list[tuple[str, str]]:
        """Those of them that are bound to all addresses."""
        return [(setting, host) for setting, host in self.sockets if is_any(host)]


def view_of(settings: Settings) -> SecurityView:
    """Return what is known of settings on this machine.

    Raises:
        SettingsError: a file of keys can't be read.
    """
    return SecurityView(settings, list(_keys(settings)), list(_exposed(settings)))


def is_far(engine: ConfiguredEngine) -> bool:
    """Return whether an engine is reached over a network, as far as its URL shows."""
    return not is_loopback(urlsplit(engine.url).hostname or "")


def _keys(settings: Settings) -> Iterator[tuple[str, str, int]]:
    auth = settings.auth
    for setting, keys in (("auth.api_keys", auth.api_keys), ("auth.admin_keys", auth.admin_keys)):
        for number, key in enumerate(keys, 1):
            yield setting, f"number {number}", len(key)
    for setting, path in (
        ("auth.api_keys_file", auth.api_keys_file),
        ("auth.admin_keys_file", auth.admin_keys_file),
    ):
        for line in read_key_lines(setting, path) if path is not None else ():
            yield setting, line.name or f"line {line.number}", len(line.key)


def _exposed(settings: Settings) -> Iterator[tuple[str, str]]:
    auth, tls = settings.auth, settings.listen.tls
    files = [
        ("auth.api_keys_file", auth.api_keys_file),
        ("auth.admin_keys_file", auth.admin_keys_file),
        ("auth.engine_api_key_file", auth.engine_api_key_file),
        ("listen.tls.key", tls.key),
        ("listen.tls.key_password_file", tls.key_password_file),
        ("tenants.secret_file", settings.tenants.secret_file),
    ]
    for at, pool in enumerate(settings.pools):
        files.append((f"pools[{at}].tls.key", pool.tls.key))
        for index, engine in enumerate(pool.nodes):
            files += [
                (f"pools[{at}].nodes[{index}].api_key_file", engine.api_key_file),
                (f"pools[{at}].nodes[{index}].tls.key", engine.tls.key),
            ]
    for setting, path in files:
        if path is not None and exposure(setting, path) is not None:
            yield setting, path
