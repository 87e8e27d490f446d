"""Keys and certificates in force: made of the settings, and of files that are followed while the process runs.

Owns the one task that looks at those files, once a second. Not the requests themselves: a key file on a disk that hangs must
cost nobody an answer, certificates have no moment of their own, and a file gone bad is told without any traffic.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Any

from pdproxy.kit.reloading_file import ReloadingFile
from pdproxy.serving.access.keys import Keys, digest
from pdproxy.settings.files import read_key, read_keys
from pdproxy.settings.schema import EngineTls, ListenTls, Node, Pool, Settings
from pdproxy.settings.tls import engine_context, following, listen_context, merged

LOOK_EVERY = 1.0
"""Seconds."""


class Credentials:
    """What the settings say of keys and TLS, ready for use. Reads all files at once."""

    def __init__(self, settings: Settings) -> None:
        """Read everything.

        Raises:
            SettingsError: a file can't be read, or does not hold what it should.
        """
        self._followed: list[ReloadingFile[Any]] = []
        auth, pool, listen = settings.auth, settings.pool, settings.listen.tls
        self.keys = Keys(self._client_keys(auth.api_keys, auth.api_keys_file))
        common = self._key("auth.engine_api_key_file", auth.engine_api_key, auth.engine_api_key_file)
        self._keys: dict[str, Callable[[], str | None]] = {}
        self._tls: dict[str, Callable[[], ssl.SSLContext | None]] = {}
        self._contexts: dict[EngineTls, Callable[[], ssl.SSLContext]] = {}
        self._unverified: list[str] = []
        for index, node in enumerate(pool.nodes):
            where = f"pools[0].nodes[{index}]"
            own = node.api_key is not None or node.api_key_file is not None
            self._keys[node.url] = (
                self._key(f"{where}.api_key_file", node.api_key, node.api_key_file) if own else common
            )
            self._tls[node.url] = self._engine_tls(where, pool, node)
        self.listen = self._listen_tls(listen) if listen.certificate is not None else None
        """The context for clients; None: plain HTTP."""

    def engine_key(self, url: str) -> str | None:
        """Return the key of an engine."""
        return self._keys[url]()

    def engine_tls(self, url: str) -> ssl.SSLContext | None:
        """Return the context to ask an engine with, None for one without TLS."""
        return self._tls[url]()

    def warnings(self) -> list[str]:
        """Return what an operator should be told at the start."""
        return [f"{url}: tls.verify is false: anybody in between can read prompts and keys" for url in self._unverified]

    def shortcomings(self) -> Sequence[str]:
        """Return what is wrong with files now, although what they held before is still in force."""
        return [f"{one.name} can't be read again: {one.failure}" for one in self._followed if one.failure is not None]

    @property
    def follows(self) -> bool:
        """Whether there are files to look at."""
        return bool(self._followed)

    def look(self) -> None:
        """Look at all files, now."""
        for one in self._followed:
            one.reload_if_changed()

    async def follow(self) -> None:
        """Look at all files for ever."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            self.look()

    def _client_keys(self, keys: Sequence[str], path: str | None) -> Callable[[], Sequence[bytes]] | None:
        fixed = [digest(key.encode()) for key in keys]
        if path is None:
            return (lambda: fixed) if fixed else None
        setting = "auth.api_keys_file"
        return self._follow(
            setting, [path], lambda: [*fixed, *(digest(key.encode()) for key in read_keys(setting, path))]
        )

    def _key(self, setting: str, key: str | None, path: str | None) -> Callable[[], str | None]:
        if path is None:
            return lambda: key
        return self._follow(setting, [path], lambda: read_key(setting, path))

    def _engine_tls(self, where: str, pool: Pool, node: Node) -> Callable[[], ssl.SSLContext | None]:
        if not node.url.startswith("https:"):
            return lambda: None
        tls = merged(pool.tls, node.tls)
        if tls.verify is False:
            self._unverified.append(node.url)
        if tls not in self._contexts:  # engines that share the files share the context
            setting = f"{where}.tls" if node.tls != EngineTls() else "pools[0].tls"
            files = [tls.ca, tls.certificate, tls.key]
            self._contexts[tls] = self._follow(setting, files, lambda: engine_context(setting, tls))
        return self._contexts[tls]

    def _listen_tls(self, tls: ListenTls) -> ssl.SSLContext:
        paths = [tls.certificate, tls.key, tls.key_password_file, tls.client_ca]
        return following(self._follow("listen.tls", paths, lambda: listen_context(tls)))

    def _follow(self, setting: str, paths: Sequence[str | None], read: Callable[[], Any]) -> ReloadingFile[Any]:
        followed = ReloadingFile(setting, [path for path in paths if path is not None], read)
        self._followed.append(followed)
        return followed
