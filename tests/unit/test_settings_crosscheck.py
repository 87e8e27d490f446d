"""Engines and pools: what a single field can't tell, and the one spelling of an engine's URL."""

import json
from pathlib import Path

import pytest

from pdproxy.settings.dump import dump
from pdproxy.settings.engines import ConfiguredEngine, Facts, Role, engine_url
from pdproxy.settings.errors import MASK, SettingsError
from pdproxy.settings.keys import Auth, TenantSettings, read_secret
from pdproxy.settings.limits import Limits
from pdproxy.settings.listen import Listen, parsed_networks
from pdproxy.settings.load import EngineFlag, load
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from tests.unit.test_settings_transfer import checked


def pool_error(*engines: tuple[Role, str]) -> str:
    with pytest.raises(SettingsError) as caught:
        load(None, {}, (), [EngineFlag(role, url) for role, url in engines])
    return str(caught.value)


@pytest.mark.parametrize(
    ("url", "spelling"),
    [
        ("http://127.0.0.1:8200", "http://127.0.0.1:8200"),
        ("http://127.0.0.1:8200/", "http://127.0.0.1:8200"),
        ("http://GPU-7.example.com.:80", "http://gpu-7.example.com.:80"),
        ("HTTP://host:1", "http://host:1"),
        ("http://host", "http://host:80"),
        ("http://prefill_0:8200", "http://prefill_0:8200"),
        (f"http://{'a' * 63}.b.", f"http://{'a' * 63}.b.:80"),
        ("http://[::1]:8200", "http://[::1]:8200"),
        ("http://[0:0::1]", "http://[::1]:80"),
        ("http://[::ffff:10.0.0.1]:8200", "http://10.0.0.1:8200"),
    ],
)
def test_one_spelling(url: str, spelling: str) -> None:
    """However an engine's URL is written, it becomes http://host:port, and that again becomes
    itself.
    """
    assert engine_url(url, ("url",)) == spelling
    assert engine_url(spelling, ("url",)) == spelling


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://host:1", "expected http://host:port or https://host:port"),
        ("host:8200", "expected http://host:port or https://host:port"),
        ("http:host", "expected http://host:port or https://host:port"),
        ("", "expected http://host:port or https://host:port"),
        ("http://", "has no host name: expected http://host:port"),
        ("http://:8200", "has no host name: expected http://host:port"),
        ("http://host:0", "nothing listens on port 0"),
        ("http://host:65536", "no URL: expected http://host:port"),
        ("http://host:x", "no URL: expected http://host:port"),
        ("http://[::1", "no URL: expected http://host:port"),
        ("http://[::1].evil:8200", "no URL: expected http://host:port"),
        ("http://[zz]:1", "no URL: expected http://host:port"),
        ("http://a,b:1", "its host name can't exist"),
        ("http://-a:1", "its host name can't exist"),
        ("http://a..b:1", "its host name can't exist"),
        ("http://a..:1", "its host name can't exist"),
        (f"http://{'a' * 64}:1", "its host name can't exist"),
        (f"http://{'.'.join(['a' * 63] * 4)}:1", "its host name can't exist"),
        (
            "http://host:1/v1",
            (
                "an engine is a host and a port, and perhaps a path before its routes: nothing may "
                "follow, not even /v1"
            ),
        ),
        (
            "http://host:1?a",
            (
                "an engine is a host and a port, and perhaps a path before its routes: nothing may "
                "follow, not even /v1"
            ),
        ),
        (
            "http://host:1/#",
            (
                "an engine is a host and a port, and perhaps a path before its routes: nothing may "
                "follow, not even /v1"
            ),
        ),
        (
            "http://ho st:1",
            "an engine's URL can't hold blanks, control characters or letters beyond ASCII",
        ),
        (
            "http://host:1\n",
            "an engine's URL can't hold blanks, control characters or letters beyond ASCII",
        ),
        (
            "http://höst:1",
            "an engine's URL can't hold blanks, control characters or letters beyond ASCII",
        ),
    ],
)
def test_wrong_urls(url: str, why: str) -> None:
    """A URL that no engine can have is refused with the key, the URL and the reason, on one
    line.
    """
    with pytest.raises(SettingsError) as caught:
        engine_url(url, ("pools", 0, "nodes", 2, "url"))
    text = str(caught.value)
    assert text.startswith('pools[0].nodes[2].url: "')
    assert text.endswith(f'": {why}')
    assert text.isprintable()


def test_passwords_in_urls_are_refused_unseen() -> None:
    """A URL with a password is no engine's, and the error doesn't print it."""
    text = pool_error(("decode", "http://user:hunter2@host:1"))
    assert text == (
        'pools[0].nodes[0].url: "http://***@host:1": user and password aren\'t supported: set '
        "auth.engine_api_key (--decode)"
    )
    assert "hunter2" not in pool_error(("decode", "user:hunter2@host:1"))


def test_an_engine_given_twice() -> None:
    """The same engine in two spellings or two roles is one too many."""
    assert pool_error(("prefill", "http://A:80/"), ("decode", "b:1"), ("decode", "a")) == (
        "pools[0].nodes[0] and pools[0].nodes[2]: http://a:80 is given twice: "
        "an engine has one role (flags add to the file's nodes) (--decode)"
    )


def test_pools_that_could_serve_nothing() -> None:
    """No engine, or prefill engines without anyone to hand over to, is an error that says so."""
    assert pool_error() == (
        "pools[0].nodes: no engine is configured: give --prefill and --decode, or nodes in the "
        "YAML file"
    )
    alone = (
        "pools[0].nodes: prefill engines, but no decode engine that could take what they compute"
    )
    assert pool_error(("prefill", "a:1")) == alone
    assert pool_error(("prefill", "a:1"), ("aggregated", "b:1")) == alone


@pytest.mark.parametrize(
    "roles", [("decode",), ("aggregated",), ("decode", "aggregated"), ("prefill", "decode")]
)
def test_pools_that_can_serve(roles: tuple[Role, ...]) -> None:
    """One engine that answers by itself is enough; prefill is optional."""
    settings = load(
        None, {}, (), [EngineFlag(role, f"host:{port}") for port, role in enumerate(roles, 1)]
    )
    assert tuple(node.role for node in settings.pool.nodes) == roles


P, D = "{url: 'http://p:1', role: prefill}", "{url: 'http://d:1', role: decode}"
OTHER, ALONE = "{url: 'http://e:1', role: decode}", "{url: 'http://e:1', role: aggregated}"
NAMED, SERVICE = "{url: 'dns://d:1', role: decode}", "{url: 'srv://_vllm._tcp.x', role: decode}"
MORIIO = f"{{name: b, connector: moriio, registration_port: 7500, nodes: [{D}]}}"


@pytest.mark.parametrize(
    ("pools", "why"),
    [
        (
            f"[{{nodes: [{P}, {D}]}}, {{nodes: [{OTHER}]}}]",
            "pools[0].name and pools[1].name: two pools can't share the name default",
        ),
        (
            f"[{{name: a, nodes: [{P}, {D}]}}, {{name: b, nodes: [{D}]}}]",
            "pools[0].nodes[1] and pools[1].nodes[0]: two pools can't share the engine d:1",
        ),
        (f"[{{name: a, nodes: [{D}]}}, {{name: b}}]", "pools[1].nodes: no engine is configured"),
        (
            (
                f"[{{name: a, nodes: [{NAMED}]}}, {{name: b, nodes: [{OTHER}, "
                f"{NAMED.replace('dns:', 'DNSS:')}]}}]"
            ),
            "pools[0].nodes[0] and pools[1].nodes[1]: two pools can't share the engine d:1",
        ),
        (
            f"[{{name: a, nodes: [{SERVICE}]}}, {{name: b, nodes: [{OTHER}, {SERVICE}]}}]",
            (
                "pools[0].nodes[0] and pools[1].nodes[1]: two pools can't share the engine "
                "_vllm._tcp.x"
            ),
        ),
        (
            f"[{{name: a, nodes: [{D}]}}, {{name: b, nodes: [{NAMED}]}}]",
            "pools[0].nodes[0] and pools[1].nodes[0]: two pools can't share the engine d:1",
        ),
        (
            (
                f"[{{name: a, connector: p2p-nccl, nodes: [{D}]}}, {{name: b, connector: p2p-nccl, "
                f"nodes: [{OTHER}]}}]"
            ),
            (
                "pools[0].registration_port and pools[1].registration_port: two pools can't share "
                "the port 30001"
            ),
        ),
        (
            f"[{{name: a, connector: lmcache-pd, nodes: [{ALONE}]}}, {MORIIO}]",
            (
                "pools[0].kv_ready_port and pools[1].registration_port: two pools can't share the "
                "port 7500"
            ),
        ),
        (
            f"[{{name: a, aliases: {{x: y, y: z}}, nodes: [{D}]}}]",
            'pools[0].aliases: "x": "y" is an alias itself',
        ),
        (
            f"[{{name: a, models: ['a*b*'], nodes: [{D}]}}]",
            'pools[0].models[0]: "a*b*": a pattern has one * at most',
        ),
        (f"[{{name: a, weight: -1, nodes: [{D}]}}]", "pools[0].weight: expected a number >= 0"),
    ],
)
def test_pools_that_exclude_each_other(tmp_path: Path, pools: str, why: str) -> None:
    """They share no name, no engine and no socket; and what names models is checked."""
    path = tmp_path / "x.yaml"
    path.write_text(f"pools: {pools}")
    with pytest.raises(SettingsError) as caught:
        load(path, {})
    assert str(caught.value).startswith(why)


def test_several_pools(tmp_path: Path) -> None:
    """Each with a connector of its own, and sockets of its own where both need one."""
    path = tmp_path / "x.yaml"
    path.write_text(
        f"pools: [{{name: a, connector: p2p-nccl, nodes: [{P}, {D}]}}, {{name: b, connector: "
        f"p2p-nccl,"
        f" registration_port: 30002, nodes: [{OTHER}]}}]"
    )
    settings = load(path, {})
    assert [pool.name for pool in settings.pools] == ["a", "b"]
    ports = [settings.of_pool(pool).registration.port for pool in settings.pools]
    assert ports == [None, 30002]
    assert settings.of_pool(settings.pools[1]).deadlines is settings.deadlines


def test_no_engines_needed_for_a_look() -> None:
    """Without engines the rest can still be read, but engines that are there are still checked."""
    assert load(None, {}, need_engines=False).pool.nodes == ()
    with pytest.raises(SettingsError, match="no decode engine"):
        load(None, {}, (), [EngineFlag("prefill", "a:1")], need_engines=False)


FULL = Settings(
    pools=(
        Pool(
            name="gänse",
            nodes=(
                ConfiguredEngine(
                    url="http://a:1",
                    role="prefill",
                    labels={"zone": "1"},
                    facts=Facts(block_size=16),
                ),
                ConfiguredEngine(url="http://b:1", role="decode"),
            ),
        ),
    )
)


def test_dump_can_be_loaded_again(tmp_path: Path) -> None:
    """What `config print` shows is a file with the same meaning."""
    path = tmp_path / "x.yaml"
    path.write_text(dump(FULL), encoding="utf-8")
    assert load(path, {}) == FULL


@pytest.mark.parametrize(
    "auth",
    [
        Auth(api_keys=("s3cret", "t0p")),
        Auth(engine_api_key="s3cret"),
        Auth(api_keys=("t0p",), engine_api_key="s3cret"),
    ],
)
def test_dump_masks_keys(tmp_path: Path, auth: Auth) -> None:
    """Keys are masked, and a dump with masks isn't taken for settings: `********` must never open a
    proxy.
    """
    settings = Settings(pools=FULL.pools, auth=auth)
    text = dump(settings)
    assert "s3cret" not in text
    assert "t0p" not in text
    assert text.count(MASK) == len(auth.api_keys) + (auth.engine_api_key is not None)
    path = tmp_path / "x.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError, match="shows in place of a key"):
        load(path, {})


def test_crosscheck_is_idempotent() -> None:
    """Checked settings pass the check unchanged."""
    assert checked(checked(FULL)) == checked(FULL) == FULL


@pytest.mark.parametrize(
    "text", ["nobody", "10.0.0.0/33", "10.0.0.1:80", "::1/129", "[::1]", "10.0.0.*"]
)
def test_a_trusted_proxy_is_an_address_or_a_network(text: str) -> None:
    """Anything else is refused with its place in the list."""
    listen = Listen(trusted_proxies=("10.0.0.0/8", text))
    with pytest.raises(
        SettingsError, match=r"listen\.trusted_proxies\[1\]: .*expected an address or a network"
    ):
        checked(Settings(listen=listen), need_engines=False)


def test_trusted_proxies_as_networks() -> None:
    """An address is a network of one; bits behind the network's are left out."""
    found = parsed_networks(("10.0.0.1", "10.1.2.3/8", "fd00::/8", "::ffff:10.0.0.0/104"))
    assert [str(one) for one in found] == ["10.0.0.1/32", "10.0.0.0/8", "fd00::/8", "10.0.0.0/8"]


@pytest.mark.parametrize(("space", "fits"), [(1143, True), (1142, False), (500, False)])
def test_the_largest_body_has_space(space: int, fits: bool) -> None:
    """An eighth of the space is kept for small bodies: the largest one must fit into the rest, or
    it could never be served.
    """
    settings = Settings(limits=Limits(max_body_bytes=1000, max_buffered_bytes=space))
    if fits:
        assert checked(settings, need_engines=False).limits == settings.limits
        return
    with pytest.raises(
        SettingsError,
        match=r"limits\.max_buffered_bytes = \d+ has no space .*expected at least 1143",
    ):
        checked(settings, need_engines=False)


def test_the_largest_answer_has_space() -> None:
    """A bound for all answers below that of one would refuse what the other allows."""
    settings = Settings(limits=Limits(max_answer_bytes=1000, max_buffered_answer_bytes=999))
    with pytest.raises(
        SettingsError, match=r"limits\.max_buffered_answer_bytes = 999 has no space"
    ):
        checked(settings, need_engines=False)


@pytest.mark.parametrize(
    ("address", "auth", "why"),
    [
        ("unix:/run/pdproxy.sock", Auth(), None),
        ("127.0.0.1:9000", Auth(), None),
        ("[::1]:9000", Auth(), None),
        ("localhost:9000", Auth(), None),
        (
            "0.0.0.0:9000",
            Auth(),
            "listen.admin: 0.0.0.0:9000: others than this machine can reach it: give it keys",
        ),
        ("[::]:9000", Auth(), r"listen.admin: \[::\]:9000: others"),
        ("proxy.example:9000", Auth(), "others than this machine"),
        ("0.0.0.0:9000", Auth(admin_keys=("k",)), None),
        ("0.0.0.0:9000", Auth(admin_keys_file="keys"), None),
        ("127.0.0.1:65536", Auth(), "no port is 65536"),
        ("127.0.0.1:0", Auth(), "no port is 0"),
        (None, Auth(admin_keys=(MASK,)), "is what `pdproxy config print` shows"),
    ],
)
def test_the_admin_api_is_open_to_this_machine_alone(
    address: str | None, auth: Auth, why: str | None
) -> None:
    """Unless it has keys."""
    settings = Settings(listen=Listen(admin=address), auth=auth)
    if why is None:
        assert checked(settings, need_engines=False).listen.admin == address
        return
    with pytest.raises(SettingsError, match=why):
        checked(settings, need_engines=False)


@pytest.mark.parametrize(
    "text", ["9000", "unix:", "host", "[::1]", "a b:1", "http://h:1", "::1:9000"]
)
def test_wrong_forms_of_its_address(text: str) -> None:
    with pytest.raises(SettingsError, match=r"listen\.admin: expected unix:PATH or HOST:PORT"):
        load(None, {"PDPROXY_LISTEN__ADMIN": text}, need_engines=False)


def test_its_keys_are_not_printed() -> None:
    text = dump(Settings(auth=Auth(admin_keys=("hidden-1", "hidden-2"))))
    assert "hidden" not in text
    assert "hidden" not in repr(Auth(admin_keys=("hidden-1",)))


@pytest.mark.parametrize(
    ("tenants", "why"),
    [
        (
            {"secret": "x" * 31},
            "tenants.secret: expected 32 or more visible ASCII characters without blanks",
        ),
        (
            {"secret": "x y" * 20},
            "tenants.secret: expected 32 or more visible ASCII characters without blanks",
        ),
        (
            {"secret": "x" * 32, "secret_file": "f"},
            "tenants: secret and secret_file exclude each other: give one",
        ),
        ({"caches": "mine"}, "tenants.caches: expected auto or separate or shared"),
    ],
)
def test_the_secret_of_tenants_is_one_long_text(
    tenants: dict[str, str], why: str, tmp_path: Path
) -> None:
    """No error quotes it."""
    (path := tmp_path / "settings.yaml").write_text(json.dumps({"tenants": tenants}))
    with pytest.raises(SettingsError) as wrong:
        load(path, {}, need_engines=False)
    assert why in str(wrong.value)
    assert "xxx" not in str(wrong.value)
    assert "x y" not in str(wrong.value)


def test_the_secret_of_tenants_is_not_printed() -> None:
    hidden = Settings(tenants=TenantSettings(secret="hidden" * 6))
    assert "hidden" not in dump(hidden) + repr(hidden)


def test_a_short_secret_in_a_file(tmp_path: Path) -> None:
    (path := tmp_path / "secret").write_text("x" * 31)
    with pytest.raises(SettingsError, match="holds less than 32 characters"):
        read_secret("tenants.secret_file", str(path))
