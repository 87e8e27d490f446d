"""A real API server with etcd, and what a test does to it.

The program of `build.py` knows no pods: they are objects of a definition of the tests' own, and a
front gives them the paths that pods have. It forwards bytes as they come, and knows who may ask.
Between it and a client is a proxy for TCP, whose connections a test cuts or holds up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import trustme
from aiohttp import web

from tests.fakes.ports import free_port
from tests.kubernetes.build import Built

GROUP = "core.pdproxy.test"
CORE = f"/apis/{GROUP}/v1"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
STARTS = 120.0
"""Seconds until a program must answer: the machine may be busy."""
_ADMISSION = (
    *("NamespaceLifecycle", "MutatingAdmissionWebhook", "ValidatingAdmissionWebhook"),
    *("ValidatingAdmissionPolicy", "MutatingAdmissionPolicy"),
)
FLAGS = (
    "--authentication-skip-lookup",
    "--enable-priority-and-fairness=false",
    f"--disable-admission-plugins={','.join(_ADMISSION)}",
    "--etcd-compaction-interval=2s",
    # pages of a list may come from memory, too, whatever the storage has compacted
    "--feature-gates=ListFromCacheSnapshot=false",
)
NOWHERE = """
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
users: [{name: u, user: {}}]
current-context: c
"""
"""For what the program would ask a whole API server."""


def _definition() -> dict[str, Any]:
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"kind": "Pod", "plural": "pods", "singular": "pod"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"pods.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


class Cluster:
    """`tokens`: who may ask the front, None: everybody. `before`: awaited before each request that
    the front forwards.
    """

    def __init__(self, built: Built, folder: Path) -> None:
        self.tokens: set[str] | None = None
        self.before: Callable[[web.Request], Awaitable[None]] | None = None
        self.url = f"http://127.0.0.1:{free_port()}"
        """Where clients ask, through the proxy for TCP."""
        self.server = f"https://127.0.0.1:{free_port()}"
        """The API server itself."""
        self.folder = folder
        self._built = built
        self._etcd = f"http://127.0.0.1:{free_port()}"
        self._peer = f"http://127.0.0.1:{free_port()}"
        self._front = free_port()
        self._programs: dict[str, asyncio.subprocess.Process] = {}
        self._session: aiohttp.ClientSession | None = None
        self._between: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._secure()

    def _secure(self) -> None:
        authority = trustme.CA()
        server = authority.issue_cert("127.0.0.1")
        admin = authority.issue_cert(
            "admin", common_name="admin", organization_name="system:masters"
        )
        authority.cert_pem.write_to_path(str(self.folder / "ca.pem"))
        for name, one in (("server", server), ("admin", admin)):
            one.private_key_pem.write_to_path(str(self.folder / f"{name}.key"))
            one.cert_chain_pems[0].write_to_path(str(self.folder / f"{name}.pem"))
        (self.folder / "nowhere").write_text(NOWHERE)
        self.tls = ssl.create_default_context(cafile=str(self.folder / "ca.pem"))
        self.tls.load_cert_chain(self.folder / "admin.pem", self.folder / "admin.key")

    # its programs

    async def _start(self, name: str, *command: object) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._programs[name] = await asyncio.create_subprocess_exec(
                *map(str, command), stdout=log, stderr=log, cwd=self.folder
            )

    async def start_etcd(self) -> None:
        """Start the storage."""
        await self._start(
            "etcd",
            *(self._built.etcd, "--data-dir", self.folder / "data", "--unsafe-no-fsync"),
            *("--listen-client-urls", self._etcd, "--advertise-client-urls", self._etcd),
            *("--listen-peer-urls", self._peer, "--initial-advertise-peer-urls", self._peer),
            *("--initial-cluster", f"default={self._peer}", "--log-level", "warn"),
        )

    async def start_server(self) -> None:
        """Start the API server, and wait until it has pods."""
        nowhere = self.folder / "nowhere"
        await self._start(
            "server",
            *(self._built.api_server, "--etcd-servers", self._etcd, *FLAGS),
            *("--bind-address", "127.0.0.1", "--secure-port", self.server.rpartition(":")[2]),
            *("--tls-cert-file", self.folder / "server.pem"),
            *("--tls-private-key-file", self.folder / "server.key"),
            *("--client-ca-file", self.folder / "ca.pem", "--kubeconfig", nowhere),
            *("--authentication-kubeconfig", nowhere, "--authorization-kubeconfig", nowhere),
        )
        async with asyncio.timeout(STARTS):
            while True:
                with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                    await self.ask("POST", DEFINITIONS, _definition(), {201, 409})
                    await self.ask("GET", f"{CORE}/namespaces/default/pods")
                    return
                await asyncio.sleep(0.2)

    async def kill(self, name: str) -> None:
        """End `etcd` or `server` as a machine that fails does."""
        program = self._programs.pop(name)
        with contextlib.suppress(ProcessLookupError):
            program.send_signal(signal.SIGKILL)
        await program.wait()

    async def begin_anew(self) -> None:
        """Lose the storage with all that was in it: versions begin at 1 again."""
        await self.kill("server")
        await self.kill("etcd")
        shutil.rmtree(self.folder / "data")
        await self.start_etcd()
        await self.start_server()

    # what is in it

    async def ask(
        self, method: str, path: str, body: Any = None, expected: set[int] | None = None
    ) -> Any:
        """Ask the API server itself. Raises aiohttp.ClientError for other statuses."""
        assert self._session is not None
        kind = "merge-patch+json" if method == "PATCH" else "json"
        async with self._session.request(
            method,
            self.server + path,
            json=body,
            headers={"content-type": f"application/{kind}"},
        ) as answer:
            text = await answer.text()
            if answer.status not in (expected or {200, 201}):
                raise aiohttp.ClientError(f"{answer.status} {text}")
            return json.loads(text)

    async def put(self, name: str, **fields: Any) -> None:
        """Make a pod."""
        fields["metadata"] = {**fields.get("metadata", {}), "name": name}
        body = {"apiVersion": f"{GROUP}/v1", "kind": "Pod", **fields}
        await self.ask("POST", f"{CORE}/namespaces/default/pods", body)

    async def patch(self, name: str, **fields: Any) -> None:
        """Change a pod."""
        await self.ask("PATCH", f"{CORE}/namespaces/default/pods/{name}", fields)

    async def delete(self, name: str) -> None:
        """Delete a pod."""
        await self.ask("DELETE", f"{CORE}/namespaces/default/pods/{name}")

    async def names(self) -> set[str]:
        """The pods that there are."""
        found = await self.ask("GET", f"{CORE}/namespaces/default/pods")
        return {one["metadata"]["name"] for one in found["items"]}

    # the front

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.tokens is not None and bearer not in self.tokens:
            status = {"kind": "Status", "code": 401, "message": "Unauthorized"}
            return web.json_response(status, status=401)
        if self.before is not None:
            await self.before(request)
        assert self._session is not None
        assert request.transport is not None
        path = request.path_qs.replace("/api/v1", CORE, 1)
        answer = web.StreamResponse()
        try:
            async with self._session.get(self.server + path) as found:
                answer.set_status(found.status)
                await answer.prepare(request)
                async for part in found.content.iter_any():
                    await answer.write(part)
        except (aiohttp.ClientError, ConnectionError):
            request.transport.abort()
        return answer

    # the proxy for TCP

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._between[task] = [writer]
        still = self._goes_on
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", self._front)
            self._between[task].append(back)

            async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
                while True:
                    try:
                        data = await source.read(2**16)
                    finally:
                        await still.wait()  # not even an end passes on
                    if not data:
                        break
                    target.write(data)
                    await target.drain()
                target.close()

            await asyncio.gather(copy(reader, back), copy(there, writer))
        for one in self._between.pop(task, []):
            one.transport.abort()

    def cut(self) -> None:
        """Cut the connections of clients."""
        for writers in list(self._between.values()):
            for writer in writers:
                writer.transport.abort()

    def hold_up(self) -> None:
        """Have nothing pass on the connections that are open now, for ever: nobody is told."""
        self._goes_on.clear()
        self._goes_on = asyncio.Event()
        self._goes_on.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Have all of it run."""
        connector = aiohttp.TCPConnector(ssl=self.tls, limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_connect=5)
        )
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        server = None
        try:
            await self.start_etcd()
            await self.start_server()
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self._front).start()
            port = int(self.url.rpartition(":")[2])
            server = await asyncio.start_server(self._pass_on, "127.0.0.1", port)
            yield
        finally:
            if server is not None:
                server.close()
            self.cut()
            await runner.cleanup()
            await self._session.close()
            for name in list(self._programs):
                await self.kill(name)
