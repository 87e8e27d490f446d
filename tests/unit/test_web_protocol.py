"""What `web` relies on in uvicorn's classes: a new uvicorn has to pass this before its version
bound moves.
"""

from __future__ import annotations

import asyncio
import inspect
import re

import pytest
import uvicorn
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from pdproxy.web import client_connection, cycle, guard, lean_flow_control, protocol
from tests.fuzz.ingress import Ingress, Transport


@pytest.mark.parametrize(
    "name",
    ["on_headers_complete", "on_body", "on_message_complete", "on_response_complete",
    "connection_lost", "pause_writing",
     "resume_writing", "_start_asgi_task", "_should_upgrade", "_unset_keepalive_if_required",
     "data_received",
     "on_message_begin", "on_url", "on_header"],
)  # fmt: skip
def test_methods_of_the_protocol(name: str) -> None:
    """Methods that are overridden or called."""
    assert callable(getattr(HttpToolsProtocol, name))


async def test_attributes_of_the_protocol() -> None:
    """State that is read on a connection's protocol."""
    config = uvicorn.Config(lambda: None, http=HttpToolsProtocol, log_config=None)
    config.load()
    made = HttpToolsProtocol(config, ServerState(), {}, asyncio.get_running_loop())
    for name in ("parser", "cycle", "pipeline", "scope", "transport", "flow", "logger",
        "access_logger", "app", "url",
                 "server_state", "expect_100_continue", "tasks",
                 "timeout_keep_alive_task"):  # fmt: skip
        assert hasattr(made, name) or name == "url", name
    made.on_message_begin()
    assert made.url == b""
    assert isinstance(made.scope["headers"], list)
    for name in ("get_method", "get_http_version", "should_keep_alive", "should_upgrade"):
        assert callable(getattr(made.parser, name))
    assert isinstance(made.server_state.default_headers, list)


def test_the_cycles_state() -> None:
    """Attributes that uvicorn's protocol and ours both read."""
    source = inspect.getsource(RequestResponseCycle.__init__)
    for name in ("disconnected", "keep_alive", "waiting_for_100_continue", "response_started",
        "response_complete",
                 "transport", "flow", "default_headers", "message_event"):  # fmt: skip
        assert f"self.{name}" in source, name
        assert name in cycle.ResponseCycle.__slots__
    assert issubclass(cycle.GenerateCycle, cycle.ResponseCycle)
    assert inspect.iscoroutinefunction(RequestResponseCycle.run_asgi)
    assert list(inspect.signature(RequestResponseCycle.run_asgi).parameters) == ["self", "app"]


def test_uvicorn_starts_requests_in_one_place() -> None:
    """Direct and pipelined requests both go through `_start_asgi_task`, which shows whose turn it
    is.
    """
    for method in (HttpToolsProtocol.on_headers_complete, HttpToolsProtocol.on_response_complete):
        assert "self._start_asgi_task(" in inspect.getsource(method)
    assert "run_asgi" in inspect.getsource(HttpToolsProtocol._start_asgi_task)
    assert "run_asgi" not in inspect.getsource(HttpToolsProtocol.on_headers_complete)


def test_what_waits_on_a_connection() -> None:
    """uvicorn, and we, ask the pipeline for nothing that a deque does and ours does not."""
    for module in (httptools_impl, client_connection, guard, protocol):
        asked = set(re.findall(r"self\.pipeline\.(\w+)", inspect.getsource(module)))
        assert all(hasattr(lean_flow_control.LeanPipeline, name) for name in asked)


def test_flow_and_status_lines() -> None:
    """Flow control shows whether writing is paused; status lines exist for every status we send."""
    assert "write_paused" in inspect.getsource(FlowControl.__init__)
    own = {name for name in vars(FlowControl) if not name.startswith("_")}
    assert own | {"received"} == {
        name
        for name in vars(lean_flow_control.LeanFlowControl)
        if callable(getattr(lean_flow_control.LeanFlowControl, name)) and not name.startswith("_")
    }
    for status in range(200, 600):
        assert httptools_impl.STATUS_LINE[status].startswith(b"HTTP/1.1 %d " % status)


def _on_one_line(source: str) -> str:
    """A source whose imports are on one line each: the formatter may break them."""
    return re.sub(
        r"import \(\s*([^)]*?),?\s*\)", lambda names: "import " + " ".join(names[1].split()), source
    )


async def test_behind_a_large_read_others_have_their_turn() -> None:
    """A client that sends as fast as it can is read once in a turn; one that is not to be read
    stays paused.
    """
    transport = Transport()
    flow = lean_flow_control.LeanFlowControl(transport)
    flow.received(lean_flow_control.LARGE_READ - 1)
    assert not transport.reading_paused
    flow.received(lean_flow_control.LARGE_READ)
    assert transport.reading_paused
    await asyncio.sleep(0)
    assert not transport.reading_paused
    flow.received(lean_flow_control.LARGE_READ)
    flow.pause_reading()
    await asyncio.sleep(0)
    assert transport.reading_paused
    flow.resume_reading()
    assert not transport.reading_paused


@pytest.mark.parametrize(
    ("framing", "waits"),
    [
        (b"content-length: 900000", True),
        (b"content-length: %d" % (200_000 + protocol.ONE_READ + 1), True),
        (b"content-length: %d" % (200_000 + protocol.ONE_READ), False),
        (b"transfer-encoding: chunked", True),
    ],
    ids=["long", "a byte too long for one read more", "one read more", "unknown"],
)
async def test_a_connection_counts_its_reads(framing: bytes, *, waits: bool) -> None:
    """Those of a body are such reads, unless the next one is its last one."""
    entry, transport = Ingress(), Transport()
    made = entry.config.http_protocol_class(  # type: ignore[call-arg]
        config=entry.config,
        server_state=ServerState(),
        app_state={},
        _loop=asyncio.get_running_loop(),
    )
    made.connection_made(transport)
    made.data_received(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n" % framing
        + (b"186a00\r\n" if b"chunked" in framing else b"")
        + b"x" * 200_000
    )
    assert transport.reading_paused == waits
    await asyncio.sleep(0)
    assert not transport.reading_paused
    made.connection_lost(None)
    await asyncio.sleep(0)


@pytest.mark.parametrize(("more", "status"), [(0, 200), (1, 413)])
@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/chat/completions"])
async def test_a_body_in_chunks_has_the_same_limit(path: bytes, more: int, status: int) -> None:
    """To the byte, although no header announces its size."""
    entry = Ingress(max_body=5000)
    head = b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" % path
    chunks = [b"%x\r\n%b\r\n" % (size, b"x" * size) for size in (4000, 1000 + more)]
    seen = await entry.connection([head, *chunks, b"0\r\n\r\n"])
    assert seen.statuses == [status]
    assert [len(body) for _, _, body in seen.served] == ([] if more else [5000])


def test_every_name_used_is_named_here() -> None:
    """The modules use nothing else of uvicorn than its class, its cycle and its status lines."""
    modules = (protocol, client_connection, cycle, guard)
    sources = [_on_one_line(inspect.getsource(module)) for module in modules]
    assert [source.count("uvicorn.protocols") for source in sources] == [1, 1, 1, 1]
    assert "import RequestResponseCycle" in sources[0]
    assert "import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle" in sources[1]
    assert "import STATUS_LINE, RequestResponseCycle" in sources[2]
    assert "import HttpToolsProtocol, RequestResponseCycle" in sources[3]
    bound = protocol.protocol_class(None)  # type: ignore[arg-type]
    assert issubclass(bound, HttpToolsProtocol)
