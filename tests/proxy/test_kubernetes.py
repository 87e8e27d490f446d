"""Engines at the pods of a cluster, in front of an API server of the tests' own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdproxy.cli.main import main
from pdproxy.fleet import informer, kubernetes_source, membership, prober
from pdproxy.fleet.kubernetes_source import KubernetesSource, source
from pdproxy.fleet.sources import SourceAnswer
from pdproxy.settings.engines import BY_LABEL, ConfiguredEngine
from pdproxy.settings.kubernetes import Kubernetes
from pdproxy.settings.schema import Settings
from pdproxy.upstream import kubernetes
from tests.fakes.books import Books
from tests.fakes.engine import FakeEngine
from tests.fakes.kubernetes_api import KubernetesApi, kubernetes_api
from tests.fakes.ports import free_port
from tests.fakes.served_workers import serving
from tests.fakes.world import COMPLETIONS, TEXT, World, completion, until, world
from tests.proxy.test_membership import gone, started, up
from tests.proxy.test_workers_admin import states
from tests.unit.test_informer import kubeconfig

URL = "pods://:http/app=vllm"
ROLE = "pdproxy.dev/role"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LOOK", 0.01)
    monkeypatch.setattr(prober, "MIN_GAP", 0.01)
    for module, name, seconds in (
        (informer, "RETRY", 0.01),
        (informer, "LONGEST_RETRY", 0.05),
        (informer, "SHORT", 0.05),
        (kubernetes_source, "WRITE", 0.1),
    ):
        monkeypatch.setattr(module, name, seconds)


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    async with kubernetes_api() as made:
        yield made


def pod(
    api: KubernetesApi,
    name: str,
    url: str,
    role: str = "decode",
    *,
    namespace: str = "default",
    ready: str = "True",
    **metadata: Any,
) -> None:
    """Have a pod with an engine."""
    ip, _, port = url.removeprefix("http://").partition(":")
    api.put(
        name,
        namespace,
        metadata={"labels": {"app": "vllm", ROLE: role}, **metadata},
        spec={"containers": [{"ports": [{"name": "http", "containerPort": int(port)}]}]},
        status={
            "phase": "Running",
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": ready}],
        },
    )


def by_label(settings: Kubernetes, url: str = URL) -> Callable[[Settings], Settings]:
    """Settings with a node that names pods, whose labels say their roles."""

    def adjust(before: Settings) -> Settings:
        node = ConfiguredEngine(url=url, role=BY_LABEL)
        pool = msgspec.structs.replace(before.pool, nodes=(*before.pool.nodes, node))
        return msgspec.structs.replace(before, pools=(pool,), kubernetes=settings)

    return adjust


async def test_engines_come_and_go_with_their_pods(api: KubernetesApi, tmp_path: Path) -> None:
    """They serve by the roles of their labels. A probe of a pod that fails removes nothing; a pod
    that is being deleted leaves. An API server that fails changes nothing, and `/ready` names it.
    """
    settings = Kubernetes(kubeconfig=kubeconfig(tmp_path, api))
    async with world(adjust=by_label(settings)) as w:
        first, second = [await started(w, "decode") for _ in range(2)]
        other = await started(w, "prefill")
        pod(api, "first", first.url)
        pod(api, "second", second.url, ready="False")
        pod(api, "other", other.url, "prefill")
        pod(api, "odd", "http://127.0.0.1:1", "cook")
        w.proxy.sources.start()
        await joined(w, first)
        await joined(w, other)
        assert second.url not in w.proxy.engines
        for _ in range(8):
            assert (await w.ask(COMPLETIONS, completion())).text == TEXT
        assert first.requests
        assert other.requests
        assert w.metric("pdproxy_kubernetes_engines", source=URL) == 4
        details = (await w.get("/ready")).json["details"]
        assert [
            text for text in details if 'pod default/odd: label pdproxy.dev/role is "cook"' in text
        ]
        pod(api, "second", second.url)
        await joined(w, second)
        pod(api, "second", second.url, ready="False")
        pod(api, "first", first.url, deletionTimestamp="2026-01-01T00:00:00Z")
        await gone(w, first.url)
        assert second.url in w.proxy.engines
        api.fault = "unavailable"
        api.cut()
        await until(
            lambda: w.metric("pdproxy_kubernetes_answers_total", source=URL, result="failed")
        )
        details = (await w.get("/ready")).json["details"]
        assert [text for text in details if text.startswith(f"{URL}: namespace default: the API")]
        assert second.url in w.proxy.engines
        api.delete("second")
        api.fault = ""
        await gone(w, second.url)
        async with asyncio.timeout(30):
            while [text for text in (await w.get("/ready")).json["details"] if "the API" in text]:
                await asyncio.sleep(0.02)
        assert w.metric("pdproxy_source_left_out", source=URL) == 1
        assert w.metric("pdproxy_kubernetes_lists_total", source=URL, reason="start") == 1
        assert w.metric("pdproxy_kubernetes_lists_total", source=URL, reason="failed") == 1
        assert w.metric("pdproxy_kubernetes_events_total", source=URL, type="modified") >= 2


async def joined(w: World, engine: FakeEngine) -> None:
    """Wait until an engine is in the pool, and up."""
    await until(lambda: engine.url in w.proxy.engines)
    await up(w, engine)


class Asked:
    """What a source has answered."""

    def __init__(self) -> None:
        self.answers: list[SourceAnswer] = []

    @property
    def last(self) -> SourceAnswer:
        """The last answer with engines, or with none."""
        return self.answers[-1] if self.answers else SourceAnswer(None)

    @property
    def urls(self) -> set[str]:
        """The engines of the last answer that had some."""
        known = [one.engines for one in self.answers if one.engines is not None]
        return {engine.url for engine in known[-1]} if known else set()


@asynccontextmanager
async def asked(url: str, settings: Kubernetes) -> AsyncIterator[Asked]:
    """Run a source."""
    made = Asked()
    followed = source(url, Settings(kubernetes=settings))
    assert isinstance(followed, KubernetesSource)
    task = asyncio.create_task(followed.run(made.answers.append))
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


async def test_a_namespace_that_may_not_be_read_keeps_its_engines(
    api: KubernetesApi, tmp_path: Path
) -> None:
    """The other one goes on."""
    pod(api, "a", "http://10.0.0.1:1", namespace="a")
    pod(api, "b", "http://10.0.0.2:1", namespace="b")
    pod(api, "c", "http://10.0.0.3:1", namespace="c")
    settings = Kubernetes(kubeconfig=kubeconfig(tmp_path, api))
    async with asked("pods://a,b:http/app=vllm", settings) as one:
        await until(lambda: one.urls == {"http://10.0.0.1:1", "http://10.0.0.2:1"})
        api.forbidden = {"b"}
        api.cut()
        await until(lambda: "namespace b: the API server answers 403" in (one.last.problem or ""))
        api.delete("a", "a")
        api.delete("b", "b")
        await until(lambda: one.urls == {"http://10.0.0.2:1"})
        api.forbidden.clear()
        await until(lambda: one.last.engines == [] and one.last.problem is None)
    async with asked("pods://*:http/app=vllm", settings) as one:
        await until(lambda: one.urls == {"http://10.0.0.3:1"})


async def test_a_namespace_that_could_never_be_read_keeps_no_other_out(
    api: KubernetesApi, tmp_path: Path
) -> None:
    api.forbidden = {"b"}
    pod(api, "a", "http://10.0.0.1:1", namespace="a")
    settings = Kubernetes(kubeconfig=kubeconfig(tmp_path, api))
    async with asked("pods://a,b:http/app=vllm", settings) as one:
        await until(lambda: one.urls == {"http://10.0.0.1:1"})
        assert "namespace b: the API server answers 403" in (one.answers[0].problem or "")


async def test_a_file_has_the_engines_while_no_server_answers(
    api: KubernetesApi, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is read only then, and it says from when it is. Another source's engines stay in it."""
    file = tmp_path / "cache" / "found.json"
    settings = Kubernetes(kubeconfig=kubeconfig(tmp_path, api), cache_file=str(file))
    pod(api, "a", "http://10.0.0.1:1")
    async with asked(URL, settings):  # its folder is missing: nothing but a log line
        await until(lambda: "cache_file can't be written" in caplog.text)
        file.parent.mkdir()
        await until(file.exists)
    assert caplog.text.count("can't be written") == 1
    file.unlink()
    others = "pods://default:http/app=vllm"
    async with asked(URL, settings), asked(others, settings):
        await until(lambda: file.exists() and {URL, others} <= json.loads(file.read_text()).keys())
    api.fault = "unavailable"
    async with asked(URL, settings) as one:
        await until(lambda: one.urls == {"http://10.0.0.1:1"})
        assert "503: engines as they were at 20" in (one.answers[0].problem or "")
        api.delete("a")
        pod(api, "b", "http://10.0.0.2:1")
        api.fault = ""
        await until(lambda: one.urls == {"http://10.0.0.2:1"} and one.last.problem is None)
        await until(lambda: "10.0.0.2" in file.read_text())
    api.fault = "unavailable"
    async with asked(others, settings) as one:
        await until(lambda: one.urls == {"http://10.0.0.1:1"})
    kept = b'{"%s": {"at": %%s, "engines": [{"url": "http://10.0.0.1:1"}]}}' % URL.encode()
    for content in (b"{", b'{"\xff": 1}', b"[" * 99_999 + b"]" * 99_999, kept % b"1e20"):
        file.write_bytes(content)
        async with asked(URL, settings) as one:
            await until(lambda: one.last.problem)
            assert one.last.engines is None


async def test_an_inference_pool_says_which_pods_are_engines(
    api: KubernetesApi, tmp_path: Path
) -> None:
    """Whatever it says then, its last pods stay until others are listed."""
    settings = Kubernetes(kubeconfig=kubeconfig(tmp_path, api))
    pod(api, "a", "http://10.0.0.1:1", namespace="llm")
    pod(api, "b", "http://10.0.0.2:1", namespace="llm")
    api.objects["pods", "llm", "b"]["metadata"]["labels"]["app"] = "new"
    async with asked("inferencepool://llm/main", settings) as one:
        await until(lambda: "there is no such InferencePool" in (one.last.problem or ""))

        def selects(app: str, *ports: int) -> None:
            targets = [{"number": port} for port in ports]
            spec = {"selector": {"matchLabels": {"app": app}}, "targetPorts": targets}
            api.put("main", "llm", "inferencepools", spec=spec)

        selects("vllm", 8000, 8001)
        await until(lambda: one.urls == {"http://10.0.0.1:8000", "http://10.0.0.1:8001"})
        await until(lambda: one.last.problem is None)
        selects("new", 8000)
        await until(lambda: one.urls == {"http://10.0.0.2:8000"})
        api.delete("main", "llm", "inferencepools")
        await until(lambda: one.last.problem)
        assert one.urls == {"http://10.0.0.2:8000"}
        fields = {query.get("fieldSelector") for path, query in api.asked if "pools" in path}
        assert fields == {"metadata.name=main"}


async def test_one_process_follows_pods_for_all(api: KubernetesApi, tmp_path: Path) -> None:
    """With two workers the scheduler process. Its successor begins with a list."""
    books = Books()
    engines = [FakeEngine(role, books) for role in ("prefill", "decode", "decode")]
    for number, engine in enumerate(engines):
        await engine.listen()
        pod(api, f"p{number}", engine.url, engine.role)

    def settings(port: int, admin: int) -> str:
        return (
            f"listen: {{port: {port}, workers: 2, admin: '127.0.0.1:{admin}'}}\n"
            f"kubernetes: {{kubeconfig: '{kubeconfig(tmp_path, api)}'}}\n"
            "deadlines: {drain: 5}\nprobes: {interval: 0.2}\npools:\n- connector: nixl\n"
            f"  nodes:\n  - {{url: '{URL}', role: by_label}}\n"
        )

    async with serving(tmp_path, [], settings, shown=engines[:2]) as run:
        for _ in range(8):
            assert (await run.proxy.ask("POST", COMPLETIONS, completion())).text == TEXT
        assert api.answered["list"] == 1
        await run.kill_scheduler()
        api.delete("p2")
        await run.all_say("/engines", lambda shown: engines[2].url not in states(shown))
        for _ in range(8):
            assert (await run.proxy.ask("POST", COMPLETIONS, completion())).text == TEXT
        assert api.answered["list"] == 2
    for engine in engines:
        engine.stop()


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_missing_ends_the_command_with_a_line(
    workers: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The extra, or a file that says where the API server is."""
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    monkeypatch.setenv("PDPROXY_OBSERVE__CORE_DUMPS", "true")  # or this process has none any more
    port = str(free_port())
    decode = f"{URL},role=d"
    serve = ["serve", "--port", port, "--workers", str(workers), "--prefill", URL]
    serve += ["--decode", decode]
    assert main(serve) == 2
    assert capsys.readouterr().err == (
        "pdproxy serve: kubeconfig /nowhere can't be read: No such file or directory\n"
    )
    monkeypatch.setattr(kubernetes, "find_spec", lambda _: None)
    assert main(serve) == 2
    assert capsys.readouterr().err == (
        "pdproxy serve: pods as engines need lightkube: pip install 'pdproxy[kubernetes]'\n"
    )
