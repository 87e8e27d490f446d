"""Files that settings name are regular files of a limited size: no FIFO is waited for, and no
device read for ever.
"""

from __future__ import annotations

import os
import socket
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import trustme

from pdproxy.app.credentials import Credentials
from pdproxy.fleet.found_file import FoundFile
from pdproxy.kit.regular_file import UnusableFileError, read_regular
from pdproxy.kit.reloading_file import ReloadingFile
from pdproxy.settings.errors import Mistakes, SettingsError
from pdproxy.settings.files import read_yaml
from pdproxy.settings.kubernetes import Kubernetes
from pdproxy.settings.load import load
from pdproxy.settings.schema import Settings
from pdproxy.settings.section import File, fields_of
from pdproxy.tokens import tokenizer
from pdproxy.tokens.errors import UnusableError
from pdproxy.upstream.kubernetes import KubernetesApi

NODES = "nodes: [{url: 'https://p:1', role: prefill}, {url: 'http://d:1', role: decode}]"
AT_START: dict[str, str] = {
    "auth.api_keys_file": "auth: {api_keys_file: PATH}",
    "auth.admin_keys_file": "auth: {admin_keys_file: PATH}",
    "auth.engine_api_key_file": "auth: {engine_api_key_file: PATH}",
    "listen.tls.certificate": "listen: {tls: {certificate: PATH}}",
    "listen.tls.key": "listen: {tls: {certificate: GOOD, key: PATH}}",
    "listen.tls.key_password_file": "listen: {tls: {certificate: GOOD, key_password_file: PATH}}",
    "listen.tls.client_ca": "listen: {tls: {certificate: GOOD, client_ca: PATH}}",
    "tenants.secret_file": "tenants: {secret_file: PATH}",
    "pools.tls.ca": "pools: [{tls: {ca: PATH}, NODES}]",
    "pools.tls.certificate": "pools: [{tls: {certificate: PATH}, NODES}]",
    "pools.tls.key": "pools: [{tls: {certificate: GOOD, key: PATH}, NODES}]",
    "pools.nodes.tls.ca": "pools: [{nodes: [{url: 'https://p:1', role: any, tls: {ca: PATH}}]}]",
    (
        "pools.nodes.tls.certificate"
    ): "pools: [{nodes: [{url: 'https://p:1', role: any, tls: {certificate: PATH}}]}]",
    "pools.nodes.tls.key": (
        "pools: [{nodes: [{url: 'https://p:1', role: any, tls: {certificate: GOOD, key: PATH}}]}]"
    ),
    (
        "pools.nodes.api_key_file"
    ): "pools: [{nodes: [{url: 'http://p:1', role: any, api_key_file: PATH}]}]",
    (
        "pools.nodes.facts.profile"
    ): "pools: [{nodes: [{url: 'http://p:1', role: any, facts: {profile: PATH}}]}]",
    "pools.profile": "pools: [{profile: PATH, nodes: [{url: 'http://p:1', role: any}]}]",
}
"""For each setting that names a file: settings with it. GOOD: a certificate with its key."""
OTHERWISE = {
    "kubernetes.kubeconfig": "when a source is made: see `test_a_kubeconfig_file`",
    "kubernetes.cache_file": "what can't be used is not there: see `test_a_file_of_found_engines`",
    "observe.tracing.headers_file": "see tests/unit/test_settings_tracing.py",
    "listen.uds": "a socket that is bound, not a file that is read",
    "pools.tokenizer": "a folder: see `test_a_tokenizers_folder`",
}


def places(kind: object = Settings, at: str = "") -> Iterator[str]:
    """The settings that name files, wherever they are in the tree."""
    for field in fields_of(kind):
        name = f"{at}.{field.name}" if at else field.name
        inner = [field.type, *typing.get_args(field.type)]
        inner += [deeper for one in inner for deeper in typing.get_args(one) if one is not File]
        if File in inner:
            yield name
        for one in inner:
            if isinstance(one, type) and issubclass(one, msgspec.Struct):
                yield from places(one, name)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


KINDS: list[tuple[Callable[[Path], None], str]] = [
    (fifo, "is a FIFO, not a regular file"),
    (device, "is a device, not a regular file"),
    (bound, "is a socket, not a regular file"),
    (Path.mkdir, "is a directory, not a regular file"),
    (huge, "is larger than"),
]
kinds = pytest.mark.parametrize(("make", "why"), KINDS)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "it"


def test_every_setting_that_names_a_file_is_tried_here() -> None:
    """A new one is added to the table with what reads it."""
    assert {*places()} == {*AT_START, *OTHERWISE}


@kinds
@pytest.mark.parametrize("setting", AT_START)
def test_at_the_start(place: Path, setting: str, make: Callable[[Path], None], why: str) -> None:
    """One line that names the setting and what is there; the start does not wait."""
    good = place.with_name("good.pem")
    trustme.CA().issue_cert("host").private_key_and_cert_chain_pem.write_to_path(str(good))
    make(place)
    text = (
        AT_START[setting]
        .replace("NODES", NODES)
        .replace("PATH", str(place))
        .replace("GOOD", str(good))
    )
    file = place.with_name("x.yaml")
    file.write_text(
        text
        if "pools" in text
        else f"{text}\npools: [{{nodes: [{{url: 'http://p:1', role: any}}]}}]"
    )
    with pytest.raises(SettingsError) as caught:
        Credentials(load(file, {}))
    (line,) = str(caught.value).splitlines()
    assert why in line
    assert str(place) in line
    assert setting.rpartition(".")[2] in line


@kinds
def test_files_of_settings(place: Path, make: Callable[[Path], None], why: str) -> None:
    """The YAML file and vllm-omni's stage file are read by one function."""
    make(place)
    with pytest.raises(SettingsError, match=why):
        read_yaml(place, Mistakes())


@pytest.mark.parametrize(("make", "why"), [KINDS[0], KINDS[1], KINDS[2], KINDS[4]])
def test_a_tokenizers_folder(place: Path, make: Callable[[Path], None], why: str) -> None:
    """Another library opens its files: they are looked at before."""
    place.mkdir()
    make(place / "tokenizer.json")
    with pytest.raises(UnusableError, match=f"^tokenizer.json {why}"):
        tokenizer.load(str(place))


@kinds
def test_a_kubeconfig_file(place: Path, make: Callable[[Path], None], why: str) -> None:
    """What can't be used ends the start, with its name."""
    make(place)
    with pytest.raises(SettingsError, match=why) as caught:
        KubernetesApi(Kubernetes(kubeconfig=str(place)))
    assert str(place) in str(caught.value)


@kinds
def test_a_file_of_found_engines(place: Path, make: Callable[[Path], None], why: str) -> None:
    """Nothing is known then."""
    make(place)
    assert FoundFile(str(place), "pods://:8000/a").read() is None, why


@kinds
def test_when_it_is_read_again(place: Path, make: Callable[[Path], None], why: str) -> None:
    """The value from before stays in force, and what is wrong is known."""
    place.write_bytes(b"first")
    followed = ReloadingFile("s", [str(place)], lambda: _read(place))
    place.unlink()
    make(place)
    followed.reload_if_changed()
    followed.reload_if_changed()
    assert followed() == b"first"
    assert followed.failure is not None
    assert why in followed.failure


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, 1000)
    except UnusableFileError as error:
        raise SettingsError(str(error)) from None
