"""`pdproxy check --security`: each rule finds what is open, and nothing where it is closed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pdproxy.app.valid_keys import SHORT
from pdproxy.check.report import TextStyle
from pdproxy.check.security.report import as_text, judge
from pdproxy.check.security.rules import RULES
from pdproxy.check.security.view import SecurityView
from pdproxy.cli.main import main
from pdproxy.settings.engines import ConfiguredEngine, EngineSettings
from pdproxy.settings.keys import Auth, TenantSettings
from pdproxy.settings.kv import KvEvents, KvReady, RegistrationSettings
from pdproxy.settings.limits import MediaSettings, Overload
from pdproxy.settings.listen import Cors, Listen, Observe
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy.settings.tls import EngineTls, ListenTls

FAR = Listen(host="0.0.0.0")
KEYS = Auth(api_keys=("k" * 40,))
BOTH = Auth(api_keys=("k" * 40,), admin_keys=("a" * 40,))
CERTIFICATE = ListenTls(certificate="c.pem")


def node(url: str, **fields: object) -> Pool:
    return Pool(nodes=(ConfiguredEngine(url=url, role="aggregated", **fields),))  # type: ignore[arg-type]


def of(*pools: Pool) -> SecurityView:
    return SecurityView(Settings(pools=pools))


TABLE: dict[str, tuple[list[SecurityView], list[SecurityView]]] = {
    # a rule: where it finds something, where it finds nothing
    "no_keys": (
        [SecurityView(Settings(listen=FAR)), SecurityView(Settings(listen=Listen(host="::")))],
        [
            SecurityView(Settings()),
            SecurityView(Settings(listen=Listen(host="0.0.0.0", uds="/run/s"))),
            SecurityView(Settings(listen=FAR, auth=KEYS)),
            SecurityView(
                Settings(
                    listen=Listen(host="0.0.0.0", tls=ListenTls(certificate="c", client_ca="a"))
                )
            ),
        ],
    ),
    "no_tls": (
        [SecurityView(Settings(listen=FAR, auth=KEYS))],
        [
            SecurityView(Settings()),
            SecurityView(Settings(listen=Listen(host="0.0.0.0", tls=CERTIFICATE))),
        ],
    ),
    "admin_without_keys": (
        [SecurityView(Settings(listen=Listen(admin="127.0.0.1:9000")))],
        [
            SecurityView(Settings()),
            SecurityView(Settings(listen=Listen(admin="unix:/run/a"))),
            SecurityView(Settings(listen=Listen(admin="127.0.0.1:9000"), auth=BOTH)),
        ],
    ),
    "admin_without_tls": (
        [SecurityView(Settings(listen=Listen(admin="10.0.0.1:9000"), auth=BOTH))],
        [
            SecurityView(Settings(listen=Listen(admin="[::1]:9000"))),
            SecurityView(
                Settings(listen=Listen(admin="10.0.0.1:9000", tls=CERTIFICATE), auth=BOTH)
            ),
        ],
    ),
    "operator_routes": (
        [
            SecurityView(Settings(listen=FAR)),
            SecurityView(
                Settings(listen=Listen(host="10.0.0.1", operator_routes="everywhere"), auth=KEYS)
            ),
        ],
        [
            SecurityView(Settings()),
            SecurityView(Settings(listen=FAR, auth=KEYS)),
            SecurityView(Settings(listen=Listen(host="0.0.0.0", operator_routes="admin"))),
        ],
    ),
    "trusted_proxies_wide": (
        [
            SecurityView(Settings(listen=Listen(trusted_proxies=(text,))))
            for text in ("0.0.0.0/0", "::/0", "10.0.0.0/7")
        ],
        [
            SecurityView(
                Settings(
                    listen=Listen(
                        trusted_proxies=("10.0.0.0/8", "fd00::/32", "::ffff:10.0.0.0/104", "unix:")
                    )
                )
            )
        ],
    ),
    "media_any": (
        [SecurityView(Settings(media=MediaSettings(urls="any")))],
        [
            SecurityView(Settings()),
            SecurityView(Settings(media=MediaSettings(urls="hosts", hosts=("a",)))),
        ],
    ),
    "engine_networks_wide": (
        [
            SecurityView(Settings(listen=FAR)),
            SecurityView(Settings(engines=EngineSettings(networks=("0.0.0.0/0",)))),
            SecurityView(Settings(engines=EngineSettings(networks=("10.0.0.0/8", "fe80::/10")))),
        ],
        [
            SecurityView(Settings()),
            SecurityView(
                Settings(listen=FAR, engines=EngineSettings(networks=("10.0.0.0/8", "fd00::/64")))
            ),
        ],
    ),
    "short_keys": (
        [SecurityView(Settings(), keys=[("auth.api_keys_file", "team", SHORT - 1)])],
        [SecurityView(Settings(), keys=[("auth.api_keys_file", "team", SHORT)])],
    ),
    "readable_files": (
        [SecurityView(Settings(), exposed=[("listen.tls.key", "/k.pem")])],
        [SecurityView(Settings())],
    ),
    "plain_engines": (
        [
            of(node("http://10.0.0.1:1")),
            of(Pool(nodes=(ConfiguredEngine(url="dns://e:1", role="aggregated"),))),
        ],
        [
            of(node("https://10.0.0.1:1")),
            of(node("http://127.0.0.1:1")),
            of(node("http://localhost:1")),
        ],
    ),
    "unverified_engines": (
        [
            of(Pool(tls=EngineTls(verify=False))),
            of(node("https://e:1", tls=EngineTls(verify=False))),
        ],
        [of(Pool(tls=EngineTls(verify=True))), of(node("https://e:1"))],
    ),
    "sockets_everywhere": (
        [
            SecurityView(Settings(kv_ready=KvReady(host="0.0.0.0"))),
            SecurityView(Settings(registration=RegistrationSettings(host="::"))),
            of(Pool(kv_events=KvEvents(enabled=True, host="0.0.0.0"))),
        ],
        [
            SecurityView(
                Settings(
                    kv_ready=KvReady(host="10.0.0.1"),
                    registration=RegistrationSettings(host="fd00::1"),
                )
            ),
            of(Pool(kv_events=KvEvents(enabled=False, host="0.0.0.0"))),
        ],
    ),
    "cors_any": (
        [SecurityView(Settings(listen=Listen(cors=Cors(allowed_origins=("*",)))))],
        [SecurityView(Settings(listen=Listen(cors=Cors(allowed_origins=("https://a",)))))],
    ),
    "core_dumps": (
        [SecurityView(Settings(observe=Observe(core_dumps=True)))],
        [SecurityView(Settings())],
    ),
    "shared_caches": (
        [
            SecurityView(Settings(auth=KEYS, tenants=TenantSettings(caches="shared"))),
            SecurityView(
                Settings(
                    overload=Overload(tenant_header="X-T"), tenants=TenantSettings(caches="shared")
                )
            ),
        ],
        [
            SecurityView(Settings(tenants=TenantSettings(caches="shared"))),
            SecurityView(Settings(auth=KEYS)),
        ],
    ),
    "unsalted_stores": (
        [
            SecurityView(Settings(auth=KEYS, pools=(Pool(connector="shared"),))),
            SecurityView(
                Settings(
                    tenants=TenantSettings(caches="separate"), pools=(Pool(connector="lmcache-pd"),)
                )
            ),
        ],
        [
            SecurityView(Settings(pools=(Pool(connector="shared"),))),
            SecurityView(
                Settings(auth=KEYS, pools=(Pool(connector="nixl"), Pool(connector="auto")))
            ),
            SecurityView(
                Settings(
                    auth=KEYS,
                    tenants=TenantSettings(caches="shared"),
                    pools=(Pool(connector="shared"),),
                )
            ),
        ],
    ),
}


def names(view: SecurityView) -> set[str]:
    return {finding.rule.name for finding in judge(view)}


def test_each_rule_has_its_row() -> None:
    assert [rule.name for rule in RULES] == list(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_a_rule(name: str) -> None:
    """It names the setting, and how to close it; it is silent where that is done."""
    opened, closed = TABLE[name]
    for view in opened:
        found = [finding for finding in judge(view) if finding.rule.name == name]
        assert found, view
        assert all(
            len(one.open.says) > 10 and one.open.setting and one.rule.remedy for one in found
        )
    for view in closed:
        assert name not in names(view), view


def test_default_settings_are_closed() -> None:
    assert judge(SecurityView(Settings())) == []


def test_a_text_without_unicode() -> None:
    text = as_text(judge(SecurityView(Settings(listen=FAR))), TextStyle(unicode=False))
    assert text.isascii()
    assert text.endswith("OPEN: 4 settings\n")


# -- the command


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PDPROXY_")]:
        monkeypatch.delenv(name)


def test_nothing_open_is_0(capsys: pytest.CaptureFixture[str]) -> None:
    """No engine is needed, and none is asked."""
    assert main(["check", "--security"]) == 0
    assert capsys.readouterr().out == f"nothing is open, by {len(RULES)} rules\n"


def test_something_open_is_1_and_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("team:short\nother:" + "k" * 40 + "\n")
    keys.chmod(0o644)
    arguments = ["check", "--security", "--host", "0.0.0.0", "--api-keys-file", str(keys), "--json"]
    assert main([*arguments, "--decode", "http://127.0.0.1:1"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == 1
    seen = {one["name"]: one for one in found["open"]}
    assert set(seen) == {"no_tls", "engine_networks_wide", "short_keys", "readable_files"}
    assert (seen["short_keys"]["setting"], "team" in seen["short_keys"]["says"]) == (
        "auth.api_keys_file",
        True,
    )
    assert "other" not in json.dumps(seen["short_keys"])
    assert str(keys) in seen["readable_files"]["says"]
    assert "kkkk" not in json.dumps(found), "no key is shown"
    keys.chmod(0o600)
    assert main([*arguments, "--decode", "http://127.0.0.1:1"]) == 1
    assert "readable_files" not in {
        one["name"] for one in json.loads(capsys.readouterr().out)["open"]
    }


def test_wrong_settings_are_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--security", "--api-keys-file", "/nowhere"]) == 2
    assert "auth.api_keys_file" in capsys.readouterr().err
