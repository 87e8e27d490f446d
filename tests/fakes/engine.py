"""A simulated engine as the proxy's tests use it: the simulator behind real sockets, scripts for
single answers, and its books.

A test gives it scripts, one a request; where there are none left the simulated vLLM answers. A
script is an async function of a `Reply`. Requests with `max_tokens: 0` (handles given back) never
use up a script.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.sim.api.app import _today
from pdproxy_lab.sim.api.chat import chat_prompt
from pdproxy_lab.sim.api.protocol import ChatBody
from pdproxy_lab.sim.core import Core
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.journal import Request
from pdproxy_lab.sim.nixl import Nixl, SideChannelPeer
from pdproxy_lab.sim.reply import ScriptedReply as SimReply
from pdproxy_lab.sim.request import EngineRequest, SamplingParams
from pdproxy_lab.sim.script import Scripts
from pdproxy_lab.sim.server import SimServer
from tests.fakes import answers
from tests.fakes.books import Books
from tests.fakes.client import exchange, request
from tests.fakes.ports import free_port

_ids = itertools.count(1)


class Reply(SimReply):
    """A script's hand on one request's answer. Data that it writes for a request with a handle
    means: the KV was loaded.
    """

    engine: FakeEngine  # type: ignore[assignment]

    async def piece(self, data: bytes) -> None:
        if self.request.kv is not None:
            self.engine.loaded(self.request)
        await super().piece(data)


Script = Callable[[Reply], Awaitable[None]]


async def serve(reply: Reply) -> None:
    """The simulated engine's own answer."""
    await reply.serve()


prefill = decode = serve


class _Scripts(Scripts):
    """Scripts that get this folder's `Reply`."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__()
        self._engine = engine

    def take(self, request: Request) -> Any:
        script = super().take(request)
        if script is None:
            return None

        async def run(reply: SimReply) -> None:
            try:
                await script(Reply(self._engine, reply.request, reply._connection, reply._serve))  # type: ignore[arg-type]
            except asyncio.CancelledError:
                self._engine.left(reply.request)
                raise

        return run


class FakeEngine:
    """One engine. `books` are shared by all engines of a test; the rest may be changed while it
    runs.
    """

    def __init__(
        self,
        role: str,
        books: Books,
        lease: float = 30.0,
        *,
        tls: ssl.SSLContext | None = None,
        **facts: Any,
    ) -> None:
        self.role = role
        self.books = books
        books.engines.append(self)
        usual = {
            "role": role,
            "model": "tiny",
            "hardware": Hardware(speed=0),
            "eos_every": 0,
            "kv_lease_duration": lease,
            "handshake_timeout": 20.0,
            # a restart binds it again: the system must not give it to a connection
            "side_channel_port": free_port(),
        }
        self.sim = SimServer(SimFacts(**{**usual, **facts}), port=free_port(), tls=tls)
        self.sim.scripts = self.sim.faults.scripts = _Scripts(self)
        self.moves_kv = True
        # kept: the id of one that is gone would be that of a later one
        self._loaded: dict[int, Request] = {}

    # -- where it is

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.sim.url

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self.sim.port

    async def listen(self) -> None:
        """Take connections, on the port it had before if it had one."""
        if self.sim.life == "down":
            await self.sim.start()
            self._watch()
        else:
            self.sim._listener.open()
            await self.sim._listener.accept()

    def refuse(self) -> None:
        """Refuse new connections and drop the idle ones."""
        self.sim._listener.close()
        for connection in self.sim._open():
            if not connection.busy:
                connection.drop()

    def stop(self) -> None:
        """Be gone: as `refuse`, and every connection drops."""
        self.sim._listener.close()
        for connection in self.sim._open():
            connection.drop()

    async def close(self) -> None:
        """Leave nothing behind."""
        await self.sim.stop()

    def meet(self, other: FakeEngine) -> None:
        """Have exchanged KV with a prefill engine before."""
        core, theirs = self.sim.engine._core, other.sim.engine
        assert core is not None
        assert theirs._core is not None
        core.nixl._known.add(
            SideChannelPeer("127.0.0.1", theirs.side_channel_ports[0], theirs.engine_id)
        )

    # -- what it answers

    @property
    def scripts(self) -> deque[Any]:
        """The scripts for the next requests."""
        return self.sim.scripts.next

    @property
    def default(self) -> Script:
        """What answers when there is no script."""
        return self.sim.scripts.default or serve

    @default.setter
    def default(self, script: Script) -> None:
        self.sim.scripts.default = script  # type: ignore[assignment]

    @property
    def on_release(self) -> Script | None:
        """What answers requests that give a handle back; None: the engine."""
        return self.sim.scripts.on_release

    @on_release.setter
    def on_release(self, script: Script | None) -> None:
        self.sim.scripts.on_release = script  # type: ignore[assignment]

    @property
    def admin(self) -> dict[str, Any]:
        """Scripts by path, for routes that don't generate."""
        return self.sim.scripts.routes

    @admin.setter
    def admin(self, routes: dict[str, Any]) -> None:
        self.sim.scripts.routes = routes

    def script(self, *scripts: Script) -> None:
        """Answer the next requests so, one after the other."""
        self.sim.faults.script(*scripts)  # type: ignore[arg-type]

    # -- what it received

    @property
    def requests(self) -> list[Request]:
        """The generating requests so far, handles given back not among them."""
        return list(self.sim.requests)

    @property
    def releases(self) -> list[Request]:
        """The handles given back here."""
        return list(self.sim.releases)

    @property
    def crashes(self) -> list[str]:
        """Mistakes in scripts."""
        return self.sim.crashes

    async def asked(self, count: int = 1) -> Request:
        """Wait until so many generating requests have come; return the last of them."""
        return await self.sim.journal.received(count)

    async def given_back(self, count: int = 1) -> Request:
        """Wait until so many handles have been given back here; return the last such request."""
        return await self.sim.journal.released(count)

    async def get(self, path: str) -> Any:
        """The JSON that one of its routes answers."""
        return (await exchange(self.port, request("GET", path, b""))).json

    # -- what it is

    def _is(self, **facts: Any) -> None:
        self.sim.engine.facts = msgspec.structs.replace(self.sim.engine.facts, **facts)

    def be(self, **facts: Any) -> None:
        """Be another engine, as one is after a restart: model, version, block size, template."""
        self._is(**facts)

    @property
    def models(self) -> list[str]:
        """The models that it lists."""
        return [self.sim.engine.facts.model]

    @models.setter
    def models(self, names: list[str]) -> None:
        self._is(model=names[0])
        if len(names) > 1:
            cards = [
                {"id": name, "object": "model", "root": "./model", "parent": None} for name in names
            ]

            async def listed(reply: Reply) -> None:
                await reply.whole(answers.compact({"object": "list", "data": cards}))

            self.admin["/v1/models"] = listed

    @property
    def started(self) -> float:
        """When it started, seconds since the epoch."""
        return self.sim.engine.started_at

    @started.setter
    def started(self, when: float) -> None:
        self.sim.engine.started_at = when

    @property
    def by_source(self) -> Counter[str]:
        """Prompt tokens by where they came from."""
        return self.sim.engine.stats.prompt_tokens_by_source

    @by_source.setter
    def by_source(self, counts: dict[str, int]) -> None:
        self.sim.engine.stats.prompt_tokens_by_source = Counter(counts)

    def ids(self, request: Request) -> list[int]:
        """The prompt's token ids: those in the handle, else those of its tokenizer."""
        if request.kv is not None and (given := request.kv.get("prompt_token_ids")) is not None:
            return list(given)
        return self.tokenize(request.json)

    def tokenize(self, body: dict[str, Any]) -> list[int]:
        """The token ids of a prompt or a chat."""
        prompt = body.get("prompt")
        if "messages" in body:
            return chat_prompt(self.sim.engine, ChatBody.model_validate(body), _today).ids
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return list(prompt)
        return self.sim.engine.tokenizer.encode(str(prompt))

    # -- the books

    def _watch(self) -> None:
        """Write down what becomes of handles, as the engine's core knows it."""
        core = self.sim.engine._core
        assert core is not None
        if not isinstance(core.connector, Nixl):
            return  # a plain engine holds nothing for anybody
        nixl, books = core.connector, self.books
        finished, loaded, abort, reject = nixl.finished, core.loaded, core.abort, core.reject
        add, note = core.add, self.sim.journal.note

        def given(*arguments: Any) -> dict[str, Any]:
            params = finished(*arguments)
            books.given(params)
            return params

        def moved(pull: Any, pages: Any) -> None:
            books.ended(pull.remote_request_id, "loaded")
            loaded(pull, pages)

        def aborted(request_id: str, now: float) -> None:
            sequence = core._sequences.get(request_id)
            params = sequence.request.kv_transfer_params if sequence is not None else None
            abort(request_id, now)
            if (
                params
                and params.get("remote_request_id")
                and sequence is not None
                and not sequence.external
            ):
                books.ended(str(params["remote_request_id"]), "aborted")

        def rejected(params: dict[str, Any]) -> None:
            name = str(params.get("remote_request_id"))
            asked = any(
                (one.kv or {}).get("remote_request_id") == name for one in self.sim.releases
            )
            books.ended(name, "released" if asked else "refused")
            reject(params)

        def added(request: Any, now: float) -> None:
            params = request.kv_transfer_params
            if not self.moves_kv and params and params.get("do_remote_prefill"):
                books.ended(str(params["remote_request_id"]), "loaded")
                books.free(params)
                request.kv_transfer_params = None
            add(request, now)

        def noted(request: Request) -> None:
            if (
                request.generating
                and not request.release
                and request.kv is not None
                and self._decodes(request)
            ):
                books.note(request.kv, "asked")
            note(request)

        nixl.finished, core.loaded, core.abort = given, moved, aborted  # type: ignore[assignment, method-assign]
        core.reject, core.add, self.sim.journal.note = rejected, added, noted  # type: ignore[method-assign]

    def loaded(self, request: Request) -> None:
        """A scripted answer has used the request's handle; counted once."""
        if not self._decodes(request) or id(request) in self._loaded or request.kv is None:
            return
        self._loaded[id(request)] = request
        self.books.ended(str(request.kv.get("remote_request_id")), "loaded")
        self.by_source["external_kv_transfer" if self.moves_kv else "local_compute"] += len(
            self.ids(request)
        )
        self.books.free(request.kv)

    def left(self, request: Request) -> None:
        """The client left a request that a script was answering: the engine had its handle, and
        gives it back.
        """
        if (
            request.kv is None
            or not self._decodes(request)
            or request.release
            or id(request) in self._loaded
        ):
            return
        self.books.ended(str(request.kv.get("remote_request_id")), "aborted")
        self.books.free(request.kv)

    def _decodes(self, request: Request) -> bool:
        """Whether the engine is to use another one's KV for a request, not to make KV for another
        one.
        """
        return self.role != "prefill" and not (
            self.role == "any" and (request.kv or {}).get("do_remote_decode")
        )

    def core(self) -> Core:
        """The simulated core."""
        assert self.sim.engine._core is not None
        return self.sim.engine._core


async def prefilled(engine: FakeEngine, ids: Sequence[int]) -> dict[str, Any]:
    """Have a prompt prefilled in the engine, without a request; return its handle."""
    request = EngineRequest(
        id=f"cmpl-{next(_ids)}-0-9cc849e2",
        prompt=tuple(ids),
        sampling=SamplingParams(max_tokens=1),
        kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False},
    )
    outputs = [output async for output in engine.sim.engine.generate(request)]
    assert outputs[-1].kv_transfer_params is not None
    return outputs[-1].kv_transfer_params


def handle(engine: FakeEngine, ids: Sequence[int]) -> dict[str, Any]:
    """A made-up handle, unlike any other, that no engine holds."""
    number = next(_ids)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(number, number + -(-len(ids) // 16)))],
        "remote_engine_id": f"engine-{engine.port}",
        "remote_request_id": f"cmpl-{number}-0-9cc849e2",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": len(ids),
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }
