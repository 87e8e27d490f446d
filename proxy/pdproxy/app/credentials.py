"""Keys and certificates in force: read from the settings, and from files that are checked while the
process runs.

Owns the one task that checks those files, once per second. Requests don't check them: a key file on
a slow disk must not delay an answer, certificates are used without any request, and a file that
can't be read must be reported without traffic.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeVar, cast

from pdproxy.app.exposed_files import exposure
from pdproxy.app.key_values import KeyValue, ToldKeys
from pdproxy.app.valid_keys import (
    KeysInForce,
    ValidKeys,
    check_key_file,
    fixed_keys,
    in_force,
    no_keys,
    notes_on,
    read_valid_keys,
)
from pdproxy.fleet.engine import EngineCredentials
from pdproxy.kit.reloading_file import ReloadingFile
from pdproxy.kit.tasks import TaskOwner
from pdproxy.observe.description import Label, MergeRule, Samples, gauge
from pdproxy.serving.access.keys import Keys, digest
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.errors import Mistakes, SettingsError
from pdproxy.settings.files import read_key
from pdproxy.settings.keys import Auth, read_secret
from pdproxy.settings.schema import Settings
from pdproxy.settings.tls import (
    EngineTls,
    ListenTls,
    authorities_of,
    end_of_certificate,
    engine_context,
    listen_context,
    merged,
)
from pdproxy.web.client_certificates import ListenerTls
from pdproxy.web.guard import GuardedProtocol
from pdproxy.web.tls_listener import TlsListener

logger = logging.getLogger("pdproxy.files")

LOOK_EVERY = 1.0
"""Seconds."""
LOOK_AGAIN = 0.2
"""Seconds until the next look at files that are changing."""
SECRET_FILE = "tenants.secret_file"  # noqa: S105 - the setting's name
EXPIRES_SOON = timedelta(days=2)
"""How long before its end a certificate is reported. Authorities issue certificates for six days,
renewed after three.
"""
CERTIFICATE_END = gauge(
    "pdproxy_certificate_expiration_timestamp_seconds",
    "seconds",
    "When a certificate of the proxy's own expires, in seconds since 1970: the one that clients "
    "are shown, and those that engines are shown",
    Label("setting", text="the certificate's setting, such as listen.tls.certificate"),
    workers=MergeRule.LEAST,
)
T = TypeVar("T", bound=KeyValue)


@dataclass(frozen=True, slots=True)
class _OwnCertificate:
    """A certificate that the proxy shows. `refused_by`: who refuses it behind its end; `ends`:
    None where that can't be read.
    """

    setting: str
    path: str
    refused_by: str
    ends: datetime | None

    def expiry(self, now: datetime) -> str | None:
        """Return that it has expired or soon does, if it does."""
        if self.ends is None or self.ends - EXPIRES_SOON > now:
            return None
        when = f"{self.ends:%Y-%m-%d %H:%M} UTC"
        said = (
            f"has expired at {when}: {self.refused_by} refuse it"
            if self.ends <= now
            else f"expires at {when}: renew it"
        )
        return f"{self.setting}: {self.path}: {said}"


class Credentials:
    """Keys and TLS contexts of the settings, ready for use. Reads all files at once. `told`: what
    files of keys hold, None: they are followed here.
    """

    def __init__(self, settings: Settings, told: ToldKeys | None = None) -> None:
        """Read everything.

        Raises:
            SettingsError: files can't be read, or don't hold what they should; a line for each.
        """
        found = Mistakes()
        self._followed: list[ReloadingFile[Any]] = []
        self._told = told
        self._key_files: list[tuple[str, ReloadingFile[Any]]] = []
        """Those of them that hold keys, with their names."""
        self._tasks: TaskOwner | None = None
        self._following = False
        auth, listen, tenants = settings.auth, settings.listen.tls, settings.tenants
        self._auth = auth
        self._pools = [pool.name for pool in settings.pools]
        self._secrets: dict[str, str] = {}
        """Files that hold secrets, each with its setting."""
        self.then: list[Callable[[], None]] = []
        """Called whenever the files were checked, and whenever the keys of other settings are in
        force.
        """
        self._valid_keys = self._valid_admin_keys = no_keys
        self._common_key: Callable[[], str | None] = lambda: None
        with found.collecting():
            self._valid_keys = self._clients_keys(auth)
        with found.collecting():
            self._valid_admin_keys = self._operators_keys(auth)
        with found.collecting():
            self._common_key = self._engines_key(auth)
        self.cache_secret: Callable[[], str | None] = lambda: tenants.secret
        """Returns the secret of tenants' salts, None where the settings have none."""
        if (secret_file := tenants.secret_file) is not None:
            with found.collecting():
                self.cache_secret = self._follow_keys(
                    "secret",
                    SECRET_FILE,
                    secret_file,
                    lambda: read_secret(SECRET_FILE, secret_file),
                )
        self.keys = Keys()
        if auth.wants_keys:
            self.keys = Keys(
                lambda: self._in_force.clients.keys, lambda: self._in_force.clients.limits
            )
        self.admin_keys = (
            Keys(lambda: self._in_force.operators) if auth.wants_admin_keys else Keys()
        )
        self._contexts: dict[EngineTls, Callable[[], ssl.SSLContext]] = {}
        self._certificates: dict[ListenTls | EngineTls, _OwnCertificate] = {}
        self._expiry_logged: list[str] = []
        self._unverified: list[str] = []
        self._engines: dict[str, EngineCredentials] = {}
        for at, pool in enumerate(settings.pools):
            for index, engine in enumerate(pool.nodes):
                if engine.is_source:
                    continue  # those that it finds are read when they are added
                with found.collecting():
                    self._read_engine(
                        engine, pool.tls, f"pools[{at}].nodes[{index}]", f"pools[{at}].tls"
                    )
        self.listen: Callable[[], ListenerTls] | None = None
        """Returns what connections of clients begin with, another one whenever files have changed;
        None: plain HTTP.
        """
        if listen.certificate is not None:
            with found.collecting():
                self.listen = self._listen_tls(listen)
        self._in_force = self._combined(self._valid_keys, self._valid_admin_keys, self._common_key)
        if self._in_force.wrong:
            found.add(("auth",), *self._in_force.wrong)
        self._notes_logged: list[str] = []
        found.raise_any()
        self.keys.note_names()

    def __repr__(self) -> str:
        return f"<Credentials of {len(self._engines)} engines, {len(self._followed)} files>"

    def of_engine(self, engine: ConfiguredEngine, tls: EngineTls) -> EngineCredentials:
        """Return an engine's key and TLS context. One that the settings did not hold at the start
        is read now. `tls`: its pool's.

        Raises:
            SettingsError: a file can't be read, or does not hold what it should.
        """
        if engine.url not in self._engines:
            self._read_engine(engine, tls, engine.url, "the pool's tls")
            self._follow_files()
        return self._engines[engine.url]

    def knows(self, url: str) -> bool:
        """Return whether any pool has an engine with this URL."""
        return url in self._engines

    def check(self, engine: ConfiguredEngine, tls: EngineTls) -> None:
        """Read an engine's files, and keep nothing of them. `tls`: its pool's.

        Raises:
            SettingsError: a file can't be read, or does not hold what it should; or its key is one
                of operators.
        """
        key = engine.api_key
        if engine.api_key_file is not None:
            key = read_key(f"{engine.url}.api_key_file", engine.api_key_file)
        if key is not None and digest(key.encode()) in self._valid_admin_keys().keys:
            raise SettingsError(
                f"{engine.url}: its key is also a key of operators: the engine could use the "
                f"admin API"
            )
        if engine.url.startswith("https:"):
            engine_context(f"{engine.url}.tls", merged(tls, engine.tls))

    def prepare(self, auth: Auth) -> Callable[[], None]:
        """Read the keys of other settings, and return what puts them in force. Until then nothing
        has changed.

        Whether clients and operators need a key stays as it was at the start.

        Raises:
            SettingsError: files can't be read, or don't hold what they should; a line for each.
        """
        if auth == self._auth:
            return lambda: None
        found, known = Mistakes(), self._followed
        new: list[ReloadingFile[Any]] = []
        self._followed = new
        try:
            with found.collecting():
                valid = self._clients_keys(auth)
            with found.collecting():
                admin = self._operators_keys(auth)
            with found.collecting():
                common = self._engines_key(auth)
            found.raise_any()
            if wrong := self._combined(valid, admin, common).wrong:
                raise SettingsError(*wrong)
        finally:
            self._followed = known

        def use() -> None:
            former = (self._valid_keys, self._valid_admin_keys, self._common_key)
            self._followed = [*(one for one in self._followed if one not in former), *new]
            self._auth, self._valid_keys, self._valid_admin_keys, self._common_key = (
                auth,
                valid,
                admin,
                common,
            )
            self._combine()
            self._follow_files()
            self._call_then()

        return use

    def key_values(self) -> dict[str, KeyValue]:
        """Return what the files of keys hold, by names that are the same in each process."""
        followed = {id(one) for one in self._followed}
        self._key_files = [item for item in self._key_files if id(item[1]) in followed]
        return {name: one() for name, one in self._key_files}

    def take(self, values: Mapping[str, KeyValue]) -> None:
        """Use other values of files of keys, if they are told."""
        if self._told is not None:
            self._told.take(values)
            self._combine()
            self._call_then()

    def forget(self, url: str) -> None:
        """Stop checking the files of a removed engine, unless others use them."""
        removed = self._engines.pop(url)
        self._unverified = [other for other in self._unverified if other != url]
        used = {id(one) for left in self._engines.values() for one in (left.key, left.tls)}
        for unused in [one for one in (removed.key, removed.tls) if id(one) not in used]:
            self._followed = [one for one in self._followed if one is not unused]
            for tls in [tls for tls, one in self._contexts.items() if one is unused]:
                del self._contexts[tls]
                self._certificates.pop(tls, None)

    def engine_key(self, url: str) -> str | None:
        """Return the key of an engine."""
        return self._engines[url].key()

    def engine_tls(self, url: str) -> ssl.SSLContext | None:
        """Return the context of connections to an engine, None for one without TLS."""
        return self._engines[url].tls()

    def warnings(self) -> list[str]:
        """Return what an operator should know at the start."""
        unverified = [
            f"{url}: tls.verify is false: anybody in between can read prompts and keys"
            for url in self._unverified
        ]
        return [*unverified, *self._expiry(), *self._notes()]

    def shortcomings(self) -> Sequence[str]:
        """Return what is wrong with files now, although their last good content is still in
        force.
        """
        unread = [
            f"{one.name} can't be read again: {one.failure}"
            for one in self._followed
            if one.failure is not None
        ]
        why_no_key = self.why_no_key()
        return [
            *([] if why_no_key is None else [why_no_key]),
            *self._in_force.wrong,
            *unread,
            *self._expiry(),
        ]

    def why_no_key(self) -> str | None:
        """Return why no client is accepted, None if keys are valid or not required."""
        if not self._auth.wants_keys or self._valid_keys().keys:
            return None
        return (
            f"auth.api_keys_file: {self._auth.api_keys_file}: holds no key: every request is "
            f"refused"
        )

    def listener(self, http: type[GuardedProtocol]) -> type[asyncio.Protocol]:
        """Return what makes the connections of a listener, for uvicorn. `http`: those without
        TLS.
        """
        if self.listen is None:
            return http
        listener = TlsListener(http, self.listen)
        self.then.append(listener.certificates.look)
        return cast("type[asyncio.Protocol]", listener)  # uvicorn only calls it

    def start(self, tasks: TaskOwner) -> None:
        """Check the files from now on, in a task of this owner. Without files there is no task."""
        self._tasks = tasks
        self._expiry_logged = self._expiry()  # parts of `warnings`
        self._notes_logged = self._notes()
        self._follow_files()

    def look(self) -> None:
        """Check all files, now."""
        if [one for one in self._followed if one.reload_if_changed()]:
            self._combine()
        expiry = self._expiry()
        for one in expiry:
            if self._told is None and one not in self._expiry_logged:
                logger.warning("%s", one)
        self._expiry_logged = expiry
        self._call_then()

    def _call_then(self) -> None:
        for call in self.then:
            call()

    async def follow(self) -> None:
        """Check all files once per second until cancelled, and more often while some are
        changing.
        """
        while True:
            changing = any(one.is_changing for one in self._followed)
            await asyncio.sleep(LOOK_AGAIN if changing else LOOK_EVERY)
            self.look()

    def _follow_files(self) -> None:
        # keys that are told may end, too: see `then`
        follows = bool(self._followed) or self._told is not None
        if self._tasks is not None and follows and not self._following:
            self._following = True
            self._tasks.keep(self.follow, "follow files")

    def _clients_keys(self, auth: Auth) -> Callable[[], ValidKeys]:
        return self._keys_of(
            "auth.api_keys_file", auth.api_keys, auth.api_keys_file, of_operators=False
        )

    def _operators_keys(self, auth: Auth) -> Callable[[], ValidKeys]:
        return self._keys_of(
            "auth.admin_keys_file", auth.admin_keys, auth.admin_keys_file, of_operators=True
        )

    def _keys_of(
        self, setting: str, keys: Sequence[str], path: str | None, *, of_operators: bool
    ) -> Callable[[], ValidKeys]:
        if path is None:
            only = fixed_keys(keys)
            return lambda: only
        read = partial(read_valid_keys, setting, keys, path, self._pools, of_operators=of_operators)
        check = partial(check_key_file, setting, path, of_operators=of_operators)
        return self._follow_keys(
            "operators" if of_operators else "clients", setting, path, read, check
        )

    def _combined(
        self,
        clients: Callable[[], ValidKeys],
        operators: Callable[[], ValidKeys],
        common_key: Callable[[], str | None],
    ) -> KeysInForce:
        return in_force(clients(), operators(), self._keys_of_engines(common_key))

    def _keys_of_engines(self, common_key: Callable[[], str | None]) -> set[str]:
        own = {one.key() for one in self._engines.values() if one.key != self.common_key}
        return {key for key in (common_key(), *own) if key is not None}

    def _combine(self) -> None:
        """Have the keys as they are now count, and log what is new of what an operator should
        know.
        """
        before = self._in_force.wrong
        self._in_force = self._combined(self._valid_keys, self._valid_admin_keys, self._common_key)
        self.keys.note_names()
        if self._told is not None:
            return  # whoever tells it says what is wrong
        for one in self._in_force.wrong:
            if one not in before:
                logger.error("%s: it does not open the admin API", one)
        notes = self._notes()
        for one in notes:
            if one not in self._notes_logged:
                logger.warning("%s", one)
        self._notes_logged = notes

    def _notes(self) -> list[str]:
        """Return what an operator should know of keys and of their files, a sentence each."""
        shown = filter(None, [exposure(setting, path) for path, setting in self._secrets.items()])
        engines = self._keys_of_engines(self._common_key)
        return [*shown, *notes_on(self._valid_keys(), self._valid_admin_keys(), engines)]

    def _engines_key(self, auth: Auth) -> Callable[[], str | None]:
        return self._key("auth.engine_api_key_file", auth.engine_api_key, auth.engine_api_key_file)

    def common_key(self) -> str | None:
        """Return the key of engines that have none of their own."""
        return self._common_key()

    def _key(self, setting: str, key: str | None, path: str | None) -> Callable[[], str | None]:
        if path is None:
            return lambda: key
        return self._follow_keys("key", setting, path, lambda: read_key(setting, path))

    def _read_engine(
        self, engine: ConfiguredEngine, pool_tls: EngineTls, where: str, pool_key: str
    ) -> None:
        own = engine.api_key is not None or engine.api_key_file is not None
        key = (
            self._key(f"{where}.api_key_file", engine.api_key, engine.api_key_file)
            if own
            else self.common_key
        )
        try:
            tls = self._engine_tls(
                engine, pool_tls, f"{where}.tls" if engine.tls != EngineTls() else pool_key
            )
        except SettingsError:
            self._followed = [one for one in self._followed if one is not key]
            raise
        self._engines[engine.url] = EngineCredentials(key, tls)

    def _engine_tls(
        self, engine: ConfiguredEngine, pool_tls: EngineTls, setting: str
    ) -> Callable[[], ssl.SSLContext | None]:
        if not engine.url.startswith("https:"):
            return lambda: None
        tls = merged(pool_tls, engine.tls)
        if tls not in self._contexts:  # engines that share the files share the context
            files = [tls.ca, tls.certificate, tls.key]
            secrets = [tls.key or tls.certificate]

            def read() -> ssl.SSLContext:
                context = engine_context(setting, tls)
                if tls.certificate is not None:
                    self._note_end(tls, f"{setting}.certificate", tls.certificate, "engines")
                return context

            self._contexts[tls] = self._follow(setting, files, read, secrets=secrets)
        if tls.verify is False:
            self._unverified.append(engine.url)
        return self._contexts[tls]

    def _listen_tls(self, tls: ListenTls) -> Callable[[], ListenerTls]:
        paths = [tls.certificate, tls.key, tls.key_password_file, tls.client_ca]

        def read() -> ListenerTls:
            context = listen_context(tls)
            assert tls.certificate is not None
            self._note_end(tls, "listen.tls.certificate", tls.certificate, "clients")
            return ListenerTls(context, authorities_of(context, tls.client_ca))

        secrets = [tls.key or tls.certificate, tls.key_password_file]
        return self._follow("listen.tls", paths, read, secrets=secrets)

    def _note_end(
        self, tls: ListenTls | EngineTls, setting: str, path: str, refused_by: str
    ) -> None:
        ends = end_of_certificate(setting, path)
        self._certificates[tls] = _OwnCertificate(setting, path, refused_by, ends)

    def _expiry(self) -> list[str]:
        """Return which certificates have expired or soon do, a line each."""
        now = datetime.now(UTC)
        found = [one.expiry(now) for one in self._certificates.values()]
        return [one for one in found if one is not None]

    def ends(self) -> Samples:
        """Return when the proxy's own certificates expire; of several of one setting the first."""
        found: dict[tuple[str, ...], float] = {}
        for one in self._certificates.values():
            if one.ends is not None:
                key, ends = (one.setting,), one.ends.timestamp()
                found[key] = min(ends, found.get(key, ends))
        return found.items()

    def _follow_keys(
        self,
        kind: str,
        setting: str,
        path: str,
        read: Callable[[], T],
        check: Callable[[], None] | None = None,
    ) -> Callable[[], T]:
        """Return what returns the newest value of a file of keys. `check`: refuses what must not be
        there at the start. Files of a kind that it has hold lines.
        """
        name = f"{kind} {path}"

        def first() -> T:
            if check is not None:
                check()
            return read()

        if self._told is not None:
            return self._told.of(name, first)
        if check is not None:
            check()
        followed = self._follow(setting, [path], read, secrets=[path], of_lines=check is not None)
        self._key_files.append((name, followed))
        return followed

    def _follow(
        self,
        setting: str,
        paths: Sequence[str | None],
        read: Callable[[], Any],
        *,
        secrets: Sequence[str | None],
        of_lines: bool = False,
    ) -> ReloadingFile[Any]:
        followed = ReloadingFile(
            setting, [path for path in paths if path is not None], read, of_lines=of_lines
        )
        self._followed.append(followed)
        self._secrets |= {path: setting for path in secrets if path is not None}
        return followed
