"""Keys and certificates in force: read from the settings, and from files that are checked while the process runs.

Owns the one task that checks those files, once per second. Requests don't check them: a key file on a slow disk must not delay
an answer, certificates are used without any request, and a file that can't be read must be reported without traffic.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from pdproxy.fleet.engine import EngineCredentials
from pdproxy.kit.reloading_file import ReloadingFile
from pdproxy.kit.tasks import TaskOwner
from pdproxy.serving.access.keys import Keys, digest
from pdproxy.settings.errors import Mistakes, SettingsError
from pdproxy.settings.files import read_key
from pdproxy.settings.key_lines import KeyLimits, read_key_lines
from pdproxy.settings.schema import Auth, EngineTls, ListenTls, Node, Settings
from pdproxy.settings.tls import end_of_certificate, engine_context, following, listen_context, merged
from pdproxy.settings.yaml_file import spell_file

logger = logging.getLogger("pdproxy.files")

LOOK_EVERY = 1.0
"""Seconds."""
EXPIRES_SOON = timedelta(days=2)
"""How long before its end a certificate is reported. Authorities issue certificates for six days, renewed after three."""


class _ValidKeys(NamedTuple):
    """The clients' keys in force: their names by their digests, and the limits of those that a file gives a name."""

    names: Mapping[bytes, str]
    limits: Mapping[str, KeyLimits]


class Credentials:
    """Keys and TLS contexts of the settings, ready for use. Reads all files at once."""

    def __init__(self, settings: Settings) -> None:
        """Read everything.

        Raises:
            SettingsError: files can't be read, or don't hold what they should; a line for each.
        """
        found = Mistakes()
        self._followed: list[ReloadingFile[Any]] = []
        self._tasks: TaskOwner | None = None
        self._following = False
        auth, pool, listen = settings.auth, settings.pool, settings.listen.tls
        self._key_file = auth.api_keys_file
        self._valid_keys: Callable[[], _ValidKeys] | None = None
        with found.collecting():
            self._valid_keys = self._client_keys("auth.api_keys_file", auth.api_keys, auth.api_keys_file)
        self.keys = Keys()
        if (valid := self._valid_keys) is not None:
            self.keys = Keys(lambda: valid().names, lambda: valid().limits)
        self.admin_keys = Keys()
        with found.collecting():
            self.admin_keys = self._read_admin_keys(auth)
        self._common_key: Callable[[], str | None] = lambda: None
        with found.collecting():
            self._common_key = self._key("auth.engine_api_key_file", auth.engine_api_key, auth.engine_api_key_file)
        self._pool_tls = pool.tls
        self._contexts: dict[EngineTls, Callable[[], ssl.SSLContext]] = {}
        self._unverified: list[str] = []
        self._engines: dict[str, EngineCredentials] = {}
        for index, node in enumerate(pool.nodes):
            with found.collecting():
                self._read_engine(node, f"pools[0].nodes[{index}]")
        self.listen: ssl.SSLContext | None = None
        """The context for clients; None: plain HTTP."""
        self._certificate = listen.certificate
        self._certificate_ends: datetime | None = None
        self._expiry_logged: str | None = None
        if listen.certificate is not None:
            with found.collecting():
                self.listen = self._listen_tls(listen)
        found.raise_any()

    def __repr__(self) -> str:
        return f"<Credentials of {len(self._engines)} engines, {len(self._followed)} files>"

    def of_engine(self, node: Node) -> EngineCredentials:
        """Return an engine's key and TLS context. One that the settings did not hold at the start is read now.

        Raises:
            SettingsError: a file can't be read, or does not hold what it should.
        """
        if node.url not in self._engines:
            self._read_engine(node, node.url)
            self._follow_files()
        return self._engines[node.url]

    def check(self, node: Node) -> None:
        """Read an engine's files, and keep nothing of them.

        Raises:
            SettingsError: a file can't be read, or does not hold what it should.
        """
        if node.api_key_file is not None:
            read_key(f"{node.url}.api_key_file", node.api_key_file)
        if node.url.startswith("https:"):
            engine_context(f"{node.url}.tls", merged(self._pool_tls, node.tls))

    def forget(self, url: str) -> None:
        """Stop checking the files of a removed engine, unless others use them."""
        removed = self._engines.pop(url)
        self._unverified = [other for other in self._unverified if other != url]
        used = {id(one) for left in self._engines.values() for one in (left.key, left.tls)} | {id(self._common_key)}
        for unused in [one for one in (removed.key, removed.tls) if id(one) not in used]:
            self._followed = [one for one in self._followed if one is not unused]
            self._contexts = {tls: one for tls, one in self._contexts.items() if one is not unused}

    def engine_key(self, url: str) -> str | None:
        """Return the key of an engine."""
        return self._engines[url].key()

    def engine_tls(self, url: str) -> ssl.SSLContext | None:
        """Return the context of connections to an engine, None for one without TLS."""
        return self._engines[url].tls()

    def warnings(self) -> list[str]:
        """Return what an operator should know at the start."""
        unverified = [
            f"{url}: tls.verify is false: anybody in between can read prompts and keys" for url in self._unverified
        ]
        return [*unverified, *self._expiry()]

    def shortcomings(self) -> Sequence[str]:
        """Return what is wrong with files now, although their last good content is still in force."""
        unread = [f"{one.name} can't be read again: {one.failure}" for one in self._followed if one.failure is not None]
        why_no_key = self.why_no_key()
        return [*([] if why_no_key is None else [why_no_key]), *unread, *self._expiry()]

    def why_no_key(self) -> str | None:
        """Return why no client is accepted, None if keys are valid or not required."""
        if self._valid_keys is None or self._valid_keys().names:
            return None
        return f"auth.api_keys_file: {self._key_file}: holds no key: every request is refused"

    def start(self, tasks: TaskOwner) -> None:
        """Check the files from now on, in a task of this owner. Without files there is no task."""
        self._tasks = tasks
        self._expiry_logged = next(iter(self._expiry()), None)  # one of `warnings`
        self._follow_files()

    def look(self) -> None:
        """Check all files, now."""
        for one in self._followed:
            one.reload_if_changed()
        expiry = next(iter(self._expiry()), None)
        if expiry is not None and expiry != self._expiry_logged:
            logger.warning("%s", expiry)
        self._expiry_logged = expiry

    async def follow(self) -> None:
        """Check all files once per second until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            self.look()

    def _follow_files(self) -> None:
        if self._tasks is not None and self._followed and not self._following:
            self._following = True
            self._tasks.keep(self.follow, "follow files")

    def _read_admin_keys(self, auth: Auth) -> Keys:
        path = auth.admin_keys_file
        valid = self._client_keys("auth.admin_keys_file", auth.admin_keys, path)
        if path is not None and valid is not None and any(one != KeyLimits() for one in valid().limits.values()):
            raise SettingsError(
                f"auth.admin_keys_file: {spell_file(Path(path))}: a key for the admin API has no limits"
            )
        return Keys() if valid is None else Keys(lambda: valid().names)

    def _client_keys(self, setting: str, keys: Sequence[str], path: str | None) -> Callable[[], _ValidKeys] | None:
        """Return what returns the valid keys. One without a name is named by its place, which log lines may show."""
        fixed = {digest(key.encode()): f"settings:{number}" for number, key in enumerate(keys, 1)}
        if path is None:
            only = _ValidKeys(fixed, {})
            return (lambda: only) if fixed else None
        if not read_key_lines(setting, path):  # at the start, a file without a key is a mistake
            raise SettingsError(f"{setting}: {spell_file(Path(path))}: holds no key")

        def read() -> _ValidKeys:
            # Later, it means that no key of it is valid any more: an operator who removes the last one has withdrawn it.
            found = read_key_lines(setting, path)
            if not found:
                refused = "no key of it is valid now" if fixed else "every request is refused"
                logger.error("%s: %s: holds no key: %s", setting, path, refused)
            names = {digest(one.key.encode()): one.name or f"file:{one.number}" for one in found}
            limited = {digest(one.key.encode()): one.name for one in found if one.name is not None}
            return _ValidKeys(
                {**names, **fixed, **limited}, {one.name: one.limits for one in found if one.name is not None}
            )

        return self._follow(setting, [path], read)

    def _key(self, setting: str, key: str | None, path: str | None) -> Callable[[], str | None]:
        if path is None:
            return lambda: key
        return self._follow(setting, [path], lambda: read_key(setting, path))

    def _read_engine(self, node: Node, where: str) -> None:
        own = node.api_key is not None or node.api_key_file is not None
        key = self._key(f"{where}.api_key_file", node.api_key, node.api_key_file) if own else self._common_key
        try:
            tls = self._engine_tls(where, node)
        except SettingsError:
            self._followed = [one for one in self._followed if one is not key or key is self._common_key]
            raise
        self._engines[node.url] = EngineCredentials(key, tls)

    def _engine_tls(self, where: str, node: Node) -> Callable[[], ssl.SSLContext | None]:
        if not node.url.startswith("https:"):
            return lambda: None
        tls = merged(self._pool_tls, node.tls)
        if tls not in self._contexts:  # engines that share the files share the context
            setting = f"{where}.tls" if node.tls != EngineTls() else "pools[0].tls"
            files = [tls.ca, tls.certificate, tls.key]
            self._contexts[tls] = self._follow(setting, files, lambda: engine_context(setting, tls))
        if tls.verify is False:
            self._unverified.append(node.url)
        return self._contexts[tls]

    def _listen_tls(self, tls: ListenTls) -> ssl.SSLContext:
        paths = [tls.certificate, tls.key, tls.key_password_file, tls.client_ca]

        def read() -> ssl.SSLContext:
            context = listen_context(tls)
            assert tls.certificate is not None
            self._certificate_ends = end_of_certificate(tls.certificate)
            return context

        return following(self._follow("listen.tls", paths, read))

    def _expiry(self) -> Sequence[str]:
        """Return whether the certificate for clients has expired or soon does, a line or none."""
        ends = self._certificate_ends
        if ends is None or ends - EXPIRES_SOON > (now := datetime.now(UTC)):
            return ()
        when = f"{ends:%Y-%m-%d %H:%M} UTC"
        said = f"has expired at {when}: clients refuse it" if ends <= now else f"expires at {when}: renew it"
        return (f"listen.tls.certificate: {self._certificate}: {said}",)

    def _follow(self, setting: str, paths: Sequence[str | None], read: Callable[[], Any]) -> ReloadingFile[Any]:
        followed = ReloadingFile(setting, [path for path in paths if path is not None], read)
        self._followed.append(followed)
        return followed
