"""Who asks the API server of a cluster, and how: service accounts, kubeconfig files with tokens,
certificates and plugins, and what is said of those that are wrong.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from pdproxy.kit.errors import Wait
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.kubernetes import Kubernetes
from pdproxy.upstream import kubernetes
from pdproxy.upstream.kubernetes import ApiError, KubernetesApi
from tests.fakes.kubernetes_api import KubernetesApi as Server
from tests.fakes.kubernetes_api import kubernetes_api
from tests.fakes.tls import Side
from tests.unit.test_informer import kubeconfig

PODS = "/api/v1/pods"


async def answered(api: KubernetesApi) -> bytes:
    """What it answers to a list."""
    connection = api.connection()
    try:
        return await connection.get(PODS, {})
    finally:
        await connection.drop()


def changed(path: str, change: Callable[[dict[str, Any]], object]) -> Kubernetes:
    """Settings with a kubeconfig file that is changed first."""
    content = yaml.safe_load(Path(path).read_text())
    change(content)
    Path(path).write_text(yaml.safe_dump(content))
    return Kubernetes(kubeconfig=path, timeout=5)


async def test_a_pod_asks_with_its_service_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its token is read again once the server refuses it; its namespace is the proxy's own."""
    side = Side(trustme.CA(), tmp_path / "tls")
    account = tmp_path / "account"
    account.mkdir()
    (account / "ca.crt").write_bytes(Path(side.authority).read_bytes())
    (account / "namespace").write_text("llm")
    (account / "token").write_text("first")
    monkeypatch.setattr(kubernetes, "ACCOUNT", account)
    async with kubernetes_api(tls=side.server()) as server:
        server.tokens = {"first"}
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", server.url.rpartition(":")[2])
        api = KubernetesApi(Kubernetes(timeout=5))
        assert api.namespace == "llm"
        connection = api.connection()
        assert b'"items": []' in await connection.get(PODS, {})
        (account / "token").write_text("second")
        server.tokens = {"second"}
        assert b'"items": []' in await connection.get(PODS, {})
        (account / "ca.crt").write_bytes(
            Path(Side(trustme.CA(), tmp_path / "2").authority).read_bytes()
        )
        assert b'"items": []' in await connection.get(PODS, {})
        await connection.drop()
        with pytest.raises(ApiError, match="CERTIFICATE_VERIFY_FAILED"):
            await connection.get(PODS, {})
        await connection.drop()
        (account / "token").unlink()
        with pytest.raises(ApiError, match=r"the service account: .*No such file"):
            await connection.get(PODS, {})


async def test_a_certificate_may_say_who_asks(tmp_path: Path) -> None:
    """And the server's may have another name than its URL."""
    side = Side(trustme.CA(), tmp_path / "tls")
    side.sign("api.example")
    context = side.server()
    context.load_verify_locations(side.authority)
    context.verify_mode = ssl.CERT_REQUIRED
    async with kubernetes_api(tls=context) as server:
        user = {"client-certificate": "tls/cert.pem", "client-key": side.key}
        path = kubeconfig(tmp_path, server, **user)

        def trust(content: dict[str, Any], **more: str) -> None:
            content["clusters"][0]["cluster"] |= {"certificate-authority": "tls/ca.pem", **more}

        with pytest.raises(ApiError, match="IP address mismatch"):
            await answered(KubernetesApi(changed(path, trust)))
        named = {"tls-server-name": "api.example"}
        assert await answered(KubernetesApi(changed(path, lambda one: trust(one, **named))))
        settings = changed(path, lambda one: one["users"][0].update(user={}))
        with pytest.raises(ApiError, match=r"(?i)certificate|disconnected|closed"):
            await answered(KubernetesApi(settings))


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
async def test_a_plugin_may_say_who_asks(version: str, tmp_path: Path) -> None:
    """It is asked again once its token is refused. One that hangs has a deadline."""
    (tmp_path / "token").write_text("first")
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        textwrap.dedent("""
            import json, os, pathlib, sys, time
            told = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
            token = pathlib.Path(sys.argv[1]).read_text()
            if token == "hang":
                pids = f"{os.getpid()} {os.getppid()}"
                pathlib.Path(sys.argv[1]).with_name("pid").write_text(pids)
                time.sleep(60)
            print(json.dumps({**told, "status": {"token": token} if token else {}}))
        """)
    )
    async with kubernetes_api() as server:
        server.tokens = {"first"}
        run = {
            "apiVersion": f"client.authentication.k8s.io/{version}",
            "command": sys.executable,
            "args": [str(plugin), str(tmp_path / "token")],
        }
        settings = Kubernetes(kubeconfig=kubeconfig(tmp_path, server, exec=run), timeout=2)
        connection = KubernetesApi(settings).connection()
        assert b'"items": []' in await connection.get(PODS, {})
        (tmp_path / "token").write_text("second")
        server.tokens = {"second"}
        assert b'"items": []' in await connection.get(PODS, {})
        server.tokens = set()
        (tmp_path / "token").write_text("")
        with pytest.raises(ApiError, match="no credentials: has no 'token'"):
            await connection.get(PODS, {})
        (tmp_path / "token").write_text("hang")
        with pytest.raises(ApiError, match="no answer in 2 s") as failed:
            await connection.get(PODS, {})
        assert failed.value.passed is Wait.KUBERNETES
        await connection.drop()
        async with asyncio.timeout(20):
            for pid in (tmp_path / "pid").read_text().split():
                while Path(f"/proc/{pid}").exists():
                    await asyncio.sleep(0.05)
        await asyncio.sleep(0.1)  # the loop hears of it


async def test_a_proxy_may_be_between(tmp_path: Path) -> None:
    async with kubernetes_api() as server:
        path = kubeconfig(tmp_path, server)
        server_url = server.url

        def by_proxy(content: dict[str, Any]) -> None:
            content["clusters"][0]["cluster"] = {
                "server": "http://api.example:6443",
                "proxy-url": server_url,
            }

        assert b'"items": []' in await answered(KubernetesApi(changed(path, by_proxy)))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "is no kubeconfig file"),
        ("token: 'secret", "line 1 is no YAML"),
        ("{contexts: []}", "has no 'clusters'"),
        ("{clusters: [], contexts: []}", "No current context"),
        ("{clusters: [], contexts: [], current-context: c}", "Context 'c' not found"),
        ("{clusters: 3, contexts: [], current-context: c}", "not iterable"),
    ],
)
def test_a_kubeconfig_file_that_is_wrong_is_named(content: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(content)
    with pytest.raises(SettingsError) as failed:
        KubernetesApi(Kubernetes(kubeconfig=str(path)))
    assert text in str(failed.value)
    assert str(path) in str(failed.value)
    assert "secret" not in str(failed.value)


def test_outside_of_a_cluster_the_usual_file_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SettingsError, match=r"kubeconfig .*\.kube/config.* can't be read: No such"):
        KubernetesApi(Kubernetes())
    server = Server()
    server.url = "http://127.0.0.1:1"
    monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path, server))
    assert KubernetesApi(Kubernetes()).url == server.url


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "find_spec", lambda _: None)
    with pytest.raises(SettingsError, match=r"pip install 'pdproxy\[kubernetes\]'"):
        KubernetesApi(Kubernetes())
