"""Files of keys that the scheduler process follows: workers have the keys that they are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdproxy.app.credentials import Credentials
from pdproxy.serving.access.keys import digest
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.keys import Auth, TenantSettings
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy.workers import links
from pdproxy.workers.kept import Keeper, keep
from pdproxy.workers.keys import KEYS, KeysForWorkers, credentials_of_worker
from pdproxy.workers.links import Message
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.scheduler_links import SchedulerLinks
from pdproxy.workers.subscriber import Subscriber
from tests.unit.test_remote_scheduler import settled

CLIENT, OTHER, OPERATOR, ENGINE = ("c" * 16, "o" * 16, "a" * 16, "e" * 16)
URL = "http://p:1"
FILES = ("clients", "operators", "engine", "secret")


class Both:
    """A scheduler process and a worker, with files."""

    def __init__(self, folder: Path) -> None:
        self.paths = {name: folder / name for name in FILES}
        for name, text in zip(FILES, (CLIENT, OPERATOR, ENGINE, "s" * 32), strict=True):
            self.write(name, text)
        self.auth = Auth(
            api_keys_file=str(self.paths["clients"]), admin_keys_file=str(self.paths["operators"])
        )
        node = ConfiguredEngine(url=URL, role="aggregated", api_key_file=str(self.paths["engine"]))
        self.settings = Settings(
            auth=self.auth,
            pools=(Pool(nodes=(node,)),),
            tenants=TenantSettings(secret_file=str(self.paths["secret"])),
        )
        self.links = SchedulerLinks(chooses=True, workers=1)
        self.kept: dict[str, bytes] = {}
        self.sent = 0
        """How often something was to be kept."""
        self.own = Credentials(self.settings)
        KeysForWorkers(self.own, self.links.publisher, Keeper(self._send, {}))
        self.links.start()
        self.link = SchedulerLink()
        self.worker = credentials_of_worker(self.settings, b"", self.link.subscriber)
        mine, its = links.pair()
        self.links.connect(its)
        self.link.connect(mine)

    def _send(self, message: Message) -> None:
        keep(self.kept, message)
        self.sent += 1

    def write(self, name: str, text: str) -> None:
        new = self.paths[name].with_suffix(".new")
        new.write_text(text + "\n")
        new.chmod(0o600)
        new.rename(self.paths[name])

    async def looked(self) -> None:
        """Have the scheduler process look, and the worker hear."""
        for _ in range(2):
            self.own.look()
            self.worker.look()
            await settled()

    def accepts(self, key: str) -> bool:
        return digest(key.encode()) in self.worker._in_force.clients.keys

    def close(self) -> None:
        self.link.close()
        self.links.stop()


async def test_all_kinds_of_files_are_followed(tmp_path: Path) -> None:
    both = Both(tmp_path)
    await settled()
    assert both.accepts(CLIENT)
    assert both.worker.engine_key(URL) == ENGINE
    both.write("clients", OTHER)
    both.write("operators", "b" * 16)
    both.write("engine", "f" * 16)
    both.write("secret", "t" * 32)
    await both.looked()
    assert (both.accepts(CLIENT), both.accepts(OTHER)) == (False, True)
    assert [*both.worker._in_force.operators] == [digest(b"b" * 16)]
    assert both.worker.engine_key(URL) == "f" * 16
    assert both.worker.cache_secret() == "t" * 32
    sent = both.sent
    await both.looked()
    assert both.sent == sent == 2, "nothing has changed"
    both.close()


async def test_a_file_that_goes_bad_is_told_once_and_keeps_no_worker_from_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    both = Both(tmp_path)
    both.write("clients", "two words here")
    await both.looked()
    assert both.accepts(CLIENT)
    assert [one for one in caplog.messages if "can't be read again" in one] == [
        one for one in caplog.messages if "auth.api_keys_file" in one
    ]
    assert len([one for one in caplog.messages if "can't be read again" in one]) == 1
    assert both.worker.shortcomings() == []
    late = credentials_of_worker(both.settings, both.kept[KEYS], Subscriber())
    assert digest(CLIENT.encode()) in late._in_force.clients.keys
    with pytest.raises(SettingsError):
        credentials_of_worker(both.settings, b"", Subscriber())
    both.close()


async def test_other_settings_with_another_file(tmp_path: Path) -> None:
    """The worker is told what it holds before it is told the settings."""
    both = Both(tmp_path)
    await settled()
    path = tmp_path / "more"
    path.write_text(f"{OTHER}\n")
    auth = Auth(api_keys_file=str(path), admin_keys_file=both.auth.admin_keys_file)
    both.own.prepare(auth)()
    await settled()
    path.unlink()
    both.worker.prepare(auth)()
    assert (both.accepts(CLIENT), both.accepts(OTHER)) == (False, True)
    both.close()


async def test_a_key_that_operators_share_opens_nothing_in_a_worker_either(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    both = Both(tmp_path)
    both.write("operators", CLIENT)
    await both.looked()
    assert [*both.worker._in_force.operators] == []
    assert len([one for one in caplog.messages if "does not open the admin API" in one]) == 1
    both.close()
