"""A key has one purpose: a client's opens no admin API and an operator's may only read, whatever is
combined and reloaded.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from pdproxy.app.credentials import Credentials
from pdproxy.app.exposed_files import exposure
from pdproxy.cli.main import main
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.keys import Auth
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from tests.fakes.admin import BASE, admin
from tests.fakes.client import bearer, request
from tests.fakes.files import renewed
from tests.fakes.world import COMPLETIONS, completion, world
from tests.proxy.test_unwanted_bodies import answered, kept

assert kept  # a fixture

LONG = "k" * 20
ENGINES = f"{BASE}/engines"


def settings(**auth: object) -> Settings:
    engine = ConfiguredEngine(url="http://e:1", role="aggregated", api_key="key-of-one-engine")
    return Settings(pools=(Pool(nodes=(engine,)),), auth=Auth(**auth))  # type: ignore[arg-type]


# -- two purposes


@pytest.mark.parametrize("clients", ["api_keys", "api_keys_file"])
@pytest.mark.parametrize("operators", ["admin_keys", "admin_keys_file"])
def test_one_key_of_both_does_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clients: str, operators: str
) -> None:
    """Wherever the two are: a settings error that names both, and no key."""
    auth = {}
    for name, text in ((clients, f"team:{LONG} rpm=5"), (operators, f"ops:{LONG}")):
        path = tmp_path / name
        path.write_text(f"{text}\nx:{name}-{LONG}\n")
        auth[name] = str(path) if name.endswith("file") else LONG
    line = ["config", "validate", "--decode", "a:1"]
    variables = {f"PDPROXY_AUTH__{name.upper()}": value for name, value in auth.items()}
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        assert main(line) == 2
    finally:
        os.environ.clear()
        os.environ.update(before)
    (shown,) = capsys.readouterr().err.splitlines()
    assert "of operators is also the key" in shown
    assert LONG not in shown


@pytest.mark.parametrize("engines", ["engine_api_key", "node"])
def test_a_key_of_engines_is_none_of_operators(engines: str) -> None:
    """Each engine gets the key, and could use the admin API with it."""
    key = "key-of-one-engine" if engines == "node" else LONG
    more = {"engine_api_key": key} if engines != "node" else {}
    with pytest.raises(
        SettingsError, match="the key settings:1 of operators is also a key of engines"
    ):
        Credentials(settings(admin_keys=(key,), **more))


async def test_files_that_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The admin API refuses a key that becomes a client's; the log says so once, /ready for as
    long; operators keep theirs.
    """
    clients, operators = tmp_path / "clients", tmp_path / "operators"
    clients.write_text(f"team:client-{LONG}\n")
    operators.write_text(f"ops:operator-{LONG}\nother:other-{LONG}\n")
    async with (
        world(auth={"api_keys_file": str(clients), "admin_keys_file": str(operators)}) as w,
        admin(w) as api,
    ):

        async def status(key: str) -> int:
            return (await api.ask("GET", ENGINES, b"", bearer(key))).status

        async def details() -> list[str]:
            found: list[str] = (await w.get("/ready")).json["details"]
            return [one for one in found if "of operators" in one]

        assert [await status(f"{one}-{LONG}") for one in ("client", "operator", "other")] == [
            401,
            200,
            200,
        ]
        for path, text in (
            (clients, f"team:client-{LONG}\nteam:operator-{LONG}\n"),
            (operators, f"ops:operator-{LONG}\nother:other-{LONG}\nnew:client-{LONG}\n"),
        ):
            before = path.read_text()
            renewed(path, text)
            for _ in range(3):
                w.look_at_files()
            refused = "operator" if path is clients else "client"
            assert await status(f"{refused}-{LONG}") == 401
            assert await status(f"other-{LONG}") == 200
            assert (
                await w.ask(COMPLETIONS, completion(), bearer(f"{refused}-{LONG}"))
            ).status == 200
            (shown,) = await details()
            assert "is also the key team of clients" in shown
            said = [
                one.getMessage() for one in caplog.records if "of operators" in one.getMessage()
            ]
            assert said == [f"{shown}: it does not open the admin API"]
            assert LONG not in shown + said[0]
            caplog.clear()
            renewed(path, before)
            w.look_at_files()
            assert not await details()
            assert await status(f"operator-{LONG}") == 200
            caplog.clear()


async def test_an_engine_with_an_operators_key_is_not_added(tmp_path: Path) -> None:
    """Through the admin API: that engine would get the key of another operator, or this one's."""
    async with (
        world(auth={"api_keys": ("client",), "admin_keys": ("operator",)}) as w,
        admin(w) as api,
    ):
        order = {"url": "http://127.0.0.1:9", "role": "decode", "api_key": "operator"}
        answer = await api.ask("POST", ENGINES, order, bearer("operator"))
        assert answer.status in (400, 409)
        assert "also a key of operators" in answer.json["error"]["message"]
        assert (await api.ask("GET", ENGINES, b"", bearer("operator"))).status == 200


def test_settings_that_are_read_again() -> None:
    """Nothing of them comes into force."""
    credentials = Credentials(settings(api_keys=("client",), admin_keys=("operator",)))
    with pytest.raises(SettingsError, match="of operators is also the key"):
        credentials.prepare(Auth(api_keys=("client",), admin_keys=("client",)))
    credentials.admin_keys.check(b"Bearer operator")


# -- read-only


async def test_a_read_only_key(tmp_path: Path, kept: list[int]) -> None:
    """It lists, and changes nothing; its bodies are not read."""
    path = tmp_path / "operators"
    path.write_text(f"watch:{LONG} read-only\nops:all-{LONG}\n")
    async with world(auth={"admin_keys_file": str(path)}) as w, admin(w) as api:
        for method, where, body in (
            ("POST", ENGINES, {"url": "http://127.0.0.1:9", "role": "decode"}),
            ("POST", f"{ENGINES}/x/drain", b""),
            ("DELETE", f"{ENGINES}/x", b""),
            ("PUT", f"{BASE}/log_level", {"level": "debug"}),
            ("POST", "/workers", {"url": "http://127.0.0.1:9"}),
            ("POST", "/nowhere", b"{}"),
        ):
            answer = await api.ask(method, where, body, bearer(LONG))
            assert (answer.status, answer.json["error"]["type"]) == (403, "ForbiddenError"), where
            assert answer.json["error"]["message"] == "the key watch is read-only"
        for where in (ENGINES, f"{BASE}/requests", f"{BASE}/log_level", "/workers"):
            assert (await api.ask("GET", where, b"", bearer(LONG))).status == 200, where
        assert not kept
        assert (
            await api.ask("PUT", f"{BASE}/log_level", {"level": "info"}, bearer(f"all-{LONG}"))
        ).status == 200
        assert kept


async def test_the_admin_api_reads_no_body_without_a_key(kept: list[int]) -> None:
    async with world(auth={"admin_keys": ("operator",)}) as w, admin(w) as api:
        client = await w.client(address="127.0.0.1")
        client.close()
        for path in (ENGINES, "/docs", "/nowhere"):
            other = await type(client).connect(api.port)
            sent = request("POST", path, b"", [("authorization", "Bearer wrong")])
            sent = sent.replace(b"content-length: 0", b"content-length: 200000") + b"x" * 100_000
            status, connection = await answered(other, sent)
            assert (status in (401, 404, 405), connection) == (True, "close"), path
            other.close()
        assert not kept


# -- short keys, and files that others can read


def test_what_operators_are_warned_of(tmp_path: Path) -> None:
    """At the start: short keys, keys of clients that engines have, files that others can read. No
    key is shown.
    """
    path = tmp_path / "keys"
    path.write_text(f"team:short\nother:{LONG}\n")
    path.chmod(0o644)
    found = Credentials(
        settings(
            api_keys=("k",), api_keys_file=str(path), admin_keys=("x" * 15,), engine_api_key=LONG
        )
    ).warnings()
    assert found == [
        f"auth.api_keys_file: {path}: others can read or change it (mode 0644): chmod 600 it",
        "auth: keys of clients are shorter than 16 characters and may be guessed: settings:1, team",
        "auth: keys of operators are shorter than 16 characters and may be guessed: settings:1",
        "auth: keys of clients are also keys of engines, which can be used past the proxy: other",
    ]


def test_a_file_that_changes_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.write_text(f"team:{LONG}\n")
    path.chmod(0o600)
    credentials = Credentials(settings(api_keys_file=str(path)))
    assert credentials.warnings() == []
    caplog.set_level(logging.WARNING)
    path.write_text(f"team:{LONG}\nnew:short\n")
    for _ in range(3):
        credentials.look()
    path.chmod(0o640)
    for _ in range(3):
        credentials.look()
    assert [one.getMessage() for one in caplog.records] == [
        "auth: keys of clients are shorter than 16 characters and may be guessed: new",
        f"auth.api_keys_file: {path}: others can read or change it (mode 0640): chmod 600 it",
    ]


def test_secrets_that_a_container_mounts_are_not_reported(tmp_path: Path) -> None:
    """Kubernetes mounts them with 0644, as links to a folder with a time in its name."""
    (tmp_path / "..2026_01_31_12_00_00.123").mkdir()
    (tmp_path / "..2026_01_31_12_00_00.123" / "keys").write_text("k")
    (tmp_path / "..data").symlink_to("..2026_01_31_12_00_00.123")
    (tmp_path / "keys").symlink_to("..data/keys")
    (tmp_path / "plain").write_text("k")
    (tmp_path / "plain").chmod(0o644)
    assert exposure("s", str(tmp_path / "keys")) is None
    assert exposure("s", str(tmp_path / "plain")) is not None
    assert exposure("s", str(tmp_path / "missing")) is None
