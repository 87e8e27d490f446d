"""Settings of keys and TLS: where they can be given, what excludes what, and how engines with https
are spelt.
"""

from pathlib import Path

import pytest

from pdproxy.settings.engines import ConfiguredEngine, engine_url
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.files import read_key, read_keys, read_password
from pdproxy.settings.load import EngineFlag, Flag, load
from pdproxy.settings.tls import EngineTls, ListenTls

DECODE = (EngineFlag("decode", "a:1"),)


def refused(tmp_path: Path, text: str) -> str:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load(path, {}, (), DECODE)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_all_sources_and_their_order(tmp_path: Path) -> None:
    """Files of keys and certificates come from YAML, variables and flags, the later being
    stronger.
    """
    path = tmp_path / "x.yaml"
    path.write_text(
        "auth: {api_keys_file: /yaml, engine_api_key_file: /yaml}\nlisten: {tls: {certificate: "
        "/yaml, key: /yaml}}"
    )
    env = {"PDPROXY_AUTH__API_KEYS_FILE": "/env", "PDPROXY_LISTEN__TLS__CERTIFICATE": "/env"}
    flags = [
        Flag("--ssl-certfile", "listen.tls.certificate", "/flag"),
        Flag("--api-keys-file", "auth.api_keys_file", "/flag"),
    ]
    found = load(path, env, flags, DECODE)
    assert (found.auth.api_keys_file, found.auth.engine_api_key_file) == ("/flag", "/yaml")
    assert found.listen.tls == ListenTls(certificate="/flag", key="/yaml")
    assert load(path, env, (), DECODE).auth.api_keys_file == "/env"


def test_nodes_and_pools(tmp_path: Path) -> None:
    """A pool's and a node's TLS, and a node's key, are read from YAML."""
    path = tmp_path / "x.yaml"
    path.write_text(
        "pools: [{tls: {ca: /ca}, nodes: [{url: 'https://A', role: decode, api_key: k, tls: "
        "{verify: false}}]}]"
    )
    pool = load(path, {}).pool
    assert pool.tls == EngineTls(ca="/ca")
    assert pool.nodes == (
        ConfiguredEngine(
            url="https://a:443", role="decode", api_key="k", tls=EngineTls(verify=False)
        ),
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "auth: {engine_api_key: k, engine_api_key_file: f}",
            "auth: engine_api_key and engine_api_key_file exclude each",
        ),
        ("listen: {tls: {key: f}}", "listen.tls.key: has no effect without listen.tls.certificate"),
        (
            "listen: {tls: {client_ca: f}}",
            "listen.tls.client_ca: has no effect without listen.tls.certificate",
        ),
        (
            "listen: {tls: {key_password_file: f}}",
            "listen.tls.key_password_file: has no effect without",
        ),
        (
            "listen: {tls: {certificate: ''}}",
            "listen.tls.certificate: expected a file's name or null",
        ),
        (
            "pools: [{tls: {key: f}}]",
            "pools[0].tls.key: has no effect without pools[0].tls.certificate",
        ),
        (
            "pools: [{tls: {verify: maybe}}]",
            'pools[0].tls.verify: expected true or false or null, got "maybe"',
        ),
        (
            "pools: [{nodes: [{url: 'http://b:1', role: decode, tls: {ca: f}}]}]",
            'pools[0].nodes[0].tls: "http://b:1" is without TLS: expected an https:// URL',
        ),
        (
            "pools: [{nodes: [{url: 'http://b:1', role: decode, api_key: k, api_key_file: f}]}]",
            "pools[0].nodes[0]: api_key and api_key_file exclude each other",
        ),
        ("pools: [{nodes: [{url: 'https://a:1', role: decode}]}]", "http://a:1 is given twice"),
    ],
)
def test_what_excludes_what(tmp_path: Path, text: str, why: str) -> None:
    """What could only be a mistake is refused with its key."""
    assert why in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("url", "spelt"),
    [
        ("https://Host", "https://host:443"),
        ("https://host:80/", "https://host:80"),
        ("https://[::1]", "https://[::1]:443"),
    ],
)
def test_https_urls(url: str, spelt: str) -> None:
    """https has its own port, and is spelt in one way as http is."""
    assert engine_url(url, ()) == spelt


def test_files_of_keys(tmp_path: Path) -> None:
    """One key a line; one key where one is expected; a device or a huge file is refused, not read
    for ever.
    """
    path = tmp_path / "keys"
    path.write_text("# a\n\n one \r\ntwo\n")
    assert read_keys("s", str(path)) == ("one", "two")
    with pytest.raises(SettingsError, match=r"^s: .*keys: holds 2 keys, expected one$"):
        read_key("s", str(path))
    path.write_text("pass word \nsecond\n")
    assert read_password("s", str(path)) == "pass word "
    with pytest.raises(SettingsError, match="is a device"):
        read_keys("s", "/dev/zero")
