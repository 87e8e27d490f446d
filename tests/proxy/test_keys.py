"""API keys: who is accepted, when that is decided, what a client without a key reads, and files of
keys that change.
"""

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

from pdproxy.cli.main import main
from pdproxy.kit.errors import UnauthorizedError
from pdproxy.observe.events import RequestEnded
from pdproxy.serving.access.keys import Keys, ValidKey, digest
from pdproxy.settings.keys import Auth
from pdproxy.settings.schema import Settings
from tests.fakes.client import bearer, request
from tests.fakes.engine import Reply
from tests.fakes.files import renewed
from tests.fakes.forked import piped
from tests.fakes.ports import free_port
from tests.fakes.world import CHAT, COMPLETIONS, World, chat, completion, until, world


async def status(w: World, key: str) -> int:
    return (await w.ask(COMPLETIONS, completion(), bearer(key))).status


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "pdproxy.files" and record.levelno >= logging.ERROR
    ]


# -- what a client without a key reads


@pytest.mark.parametrize(
    ("given", "code", "begins"),
    [
        (None, None, "You didn't provide an API key."),
        ("Basic b25l", None, "You didn't provide an API key."),
        ("Bearer", None, "You didn't provide an API key."),
        ("Bearer sk-WRONGKEY", "invalid_api_key", "Incorrect API key provided."),
        ("Bearer one two", "invalid_api_key", "Incorrect API key provided."),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/models"])
async def test_a_refusal_is_openais(
    path: str, given: str | None, code: str | None, begins: str
) -> None:
    """Missing and wrong keys have OpenAI's messages and codes, the same on every route; the key is
    not repeated.
    """
    async with world(auth={"api_keys": ("one", "two")}) as w:
        headers = [("authorization", given)] if given is not None else []
        answer = await (
            w.get(path, headers) if path == "/v1/models" else w.ask(path, completion(), headers)
        )
        error = answer.json["error"]
        assert answer.status == 401
        assert list(error) == ["message", "type", "param", "code"]
        assert (error["type"], error["param"], error["code"]) == (
            "invalid_request_error",
            None,
            code,
        )
        assert error["message"].startswith(begins)
        assert answer.header("www-authenticate") == "Bearer"
        assert b"WRONG" not in answer.body
        assert not [r for engine in w.engines for r in engine.requests]


async def test_what_is_open_without_a_key() -> None:
    """Health, readiness, version and metrics ask for no key, as vLLM's do not."""
    async with world(auth={"api_keys": ("one",)}) as w:
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert (await w.get(path)).status == 200, path
        assert (await w.get("/v1/models", bearer("one"))).status == 200


def bytecodes(call: Callable[[], object]) -> int:
    """The bytecodes that a call runs, those of all that it calls included."""
    count = 0

    def each(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return each

    before = sys.gettrace()
    sys.settrace(each)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def key_of(key: bytes) -> ValidKey:
    return ValidKey(name="a key", digest=digest(key))


class Counted(dict[bytes, ValidKey]):
    """A dictionary whose look-ups are counted, and which nobody may walk through."""

    def __init__(self, keys: Iterable[ValidKey]) -> None:
        super().__init__({one.digest: one for one in keys})
        self.asked: list[int] = []

    def __iter__(self) -> Iterator[bytes]:
        raise AssertionError("all keys were looked at")

    def get(self, key: bytes, default: object = None) -> object:  # type: ignore[override]
        self.asked.append(len(key))
        return super().get(key, default)


@pytest.mark.parametrize("given", [b"key-20999", b"nothing"])
def test_what_a_look_up_costs_does_not_depend_on_the_number_of_keys(given: bytes) -> None:
    """It was 4.3 ms for a wrong key among 21,000, twice for each request."""
    counts = []
    for number in (1, 21_000):
        known = Counted(
            [key_of(b"key-20999"), *(key_of(b"key-%d" % at) for at in range(number - 1))]
        )
        assert len(known) == number
        keys = Keys(lambda known=known: known)  # type: ignore[misc]

        def look(keys: Keys = keys) -> None:
            with contextlib.suppress(UnauthorizedError):
                keys.verified(b"Bearer " + given)

        look()
        counts.append(bytecodes(look))
        assert known.asked == [32, 32], "one look-up each time, by a digest"
    assert counts[0] == counts[1] > 0


async def test_a_key_is_looked_up_once_per_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is wrong, on each kind of route."""
    looked: list[bytes | None] = []
    real = Keys.verified

    def counted(self: Keys, authorization: bytes | None) -> ValidKey:
        looked.append(authorization)
        return real(self, authorization)

    monkeypatch.setattr(Keys, "verified", counted)
    async with world(auth={"api_keys": ("one",)}) as w:
        for path in (COMPLETIONS, "/v1/embeddings", "/v1/responses/x/cancel"):
            for key in ("one", "wrong"):
                await w.ask(path, completion(), bearer(key))
                assert looked == [f"Bearer {key}".encode()], path
                looked.clear()


# -- before the body


def head(path: str, length: int, *headers: tuple[str, str]) -> bytes:
    """The head of a request whose body is announced only."""
    whole = request("POST", path, b"", headers)
    return whole.replace(b"content-length: 0", b"content-length: %d" % length)


async def test_without_a_key_a_request_is_refused_before_its_body() -> None:
    """No byte of the body is waited for; the connection closes, and the request is reported as any
    other.
    """
    async with world(auth={"api_keys": ("one",)}, deadlines={"client_body": 30}) as w:
        answer = await w.exchange(head(COMPLETIONS, 64 * 2**20, *bearer("wrong")))
        assert (answer.status, answer.header("connection")) == (401, "close")
        ended = await w.ended()
        assert (ended.status, ended.outcome, ended.model) == (401, "client", None)


async def test_without_a_key_a_client_is_not_asked_to_continue() -> None:
    """`Expect: 100-continue` is answered by the 401 alone."""
    async with world(auth={"api_keys": ("one",)}) as w:
        assert (await w.exchange(head(COMPLETIONS, 100, ("expect", "100-continue")))).status == 401


async def test_a_body_without_a_key_is_not_held_and_its_answer_not_lost() -> None:
    """A client that sends all of a large body before it reads still gets its 401, and nothing of
    the body is kept.
    """
    async with world(auth={"api_keys": ("one",)}) as w:
        client = await w.client()
        size = 4 * 2**20
        client.send(head(COMPLETIONS, size, *bearer("wrong")))
        await w.ended()
        (connection,) = w.connections
        client.send(b"x" * (size - 1))
        await client.writer.drain()
        assert connection.cycle._body == b""
        client.send(b"x")
        answer = await client.answer()
        assert answer.status == 401
        assert await client.closed()


async def test_a_body_without_a_key_is_no_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a refused client sends as its body, and after it, is never served, whatever it looks
    like.
    """
    monkeypatch.setattr("pdproxy.web.client_connection.LINGER", 0.2)
    async with world(auth={"api_keys": ("one",)}) as w:
        hidden = request("POST", COMPLETIONS, completion(), bearer("one"))
        client = await w.client()
        client.send(head(COMPLETIONS, len(hidden), *bearer("wrong")))
        assert (await client.answer()).status == 401
        client.send(hidden + hidden)  # the body, and a good request behind it
        assert await client.closed()
        await until(lambda: not w.tasks)
        assert not [r for engine in w.engines for r in engine.requests]
        assert len(w.events(RequestEnded)) == 1


async def test_a_body_without_a_key_that_never_ends_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A refused client gets some seconds to finish; then the connection closes although the body is
    not whole.
    """
    monkeypatch.setattr("pdproxy.web.client_connection.LINGER", 0.05)
    async with world(auth={"api_keys": ("one",)}) as w:
        client = await w.client()
        client.send(head(COMPLETIONS, 100, *bearer("wrong")) + b"{")
        assert (await client.answer()).status == 401
        assert await client.closed()


async def test_a_small_refused_request_keeps_its_connection() -> None:
    """A body that came with its head is read already: the client may try another key on the same
    connection.
    """
    async with world(auth={"api_keys": ("one",)}) as w:
        client = await w.client()
        client.post(COMPLETIONS, completion(), bearer("wrong"))
        assert (await client.answer()).status == 401
        client.post(COMPLETIONS, completion(), bearer("one"))
        assert (await client.answer()).status == 200


# -- keys in files


async def test_keys_of_settings_and_file_together(tmp_path: Path) -> None:
    """Comments, blank lines and line ends of any kind are no keys; keys of both sources count."""
    path = tmp_path / "keys"
    path.write_bytes(b"# ours\r\n\r\nfile-one\r\n  file-two  \n#file-three\n")
    async with world(auth={"api_keys": ("fixed",), "api_keys_file": str(path)}) as w:
        found = [
            await status(w, key)
            for key in ("fixed", "file-one", "file-two", "file-three", "#file-three", "#")
        ]
        assert found == [200, 200, 200, 401, 401, 401]


async def test_a_file_of_keys_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The running proxy notices a changed file by itself: keys come and go without a restart."""
    monkeypatch.setattr("pdproxy.app.credentials.LOOK_EVERY", 0.01)
    path = tmp_path / "keys"
    path.write_text("old\nboth\n")
    async with world(auth={"api_keys_file": str(path)}) as w:
        assert [await status(w, key) for key in ("old", "both", "new")] == [200, 200, 401]
        before = [one.service.keys._valid() for one in w.workers]  # type: ignore[misc]
        renewed(path, "both\nnew\n")
        await until(lambda: all(one.service.keys._valid() not in before for one in w.workers))  # type: ignore[misc]
        assert [await status(w, key) for key in ("old", "both", "new")] == [401, 200, 200]


async def test_a_file_that_is_cut_while_it_is_written_opens_nothing(tmp_path: Path) -> None:
    """What stands behind a key bounds it: a key without its words, and a part of a key, are
    none.
    """
    path, ends = tmp_path / "keys", "models=nothing max_tokens=1\n"
    path.write_text(f"a:whole-key {ends}")
    async with world(auth={"api_keys_file": str(path)}) as w:
        assert [await status(w, key) for key in ("whole-key", "whole-")] == [403, 401]
        for cut in ("a:whole-key", "a:whole-"):
            path.write_text(cut)
            w.look_at_files()
            assert [await status(w, key) for key in ("whole-key", "whole-")] == [403, 401]
            assert "no newline" in str((await w.get("/ready")).json["details"])
        path.write_text(f"b:whole-key\na:whole- {ends}")
        w.look_at_files()
        assert [await status(w, key) for key in ("whole-key", "whole-")] == [200, 403]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: path.unlink(), "can't be read: No such file or directory"),
        (lambda path: path.write_text("good\n\nTWO WORDS\n"), "line 3 is no key"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "is no text"),
        (lambda path: (path.unlink(), path.mkdir()), "is a directory, not a regular file"),
    ],
)
async def test_a_file_that_goes_bad_changes_nothing_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], object], why: str
) -> None:
    """The last good keys stay; one log line and /ready show why, until the file is good again."""
    path = tmp_path / "keys"
    path.write_text("one\n")
    async with world(auth={"api_keys_file": str(path)}) as w:
        spoil(path)
        for _ in range(3):
            w.look_at_files()
        (line,) = errors(caplog)
        assert line.startswith(
            "auth.api_keys_file can't be read again, the value from before stays in use: "
        )
        assert why in line
        assert "WORDS" not in line
        assert await status(w, "one") == 200
        (detail,) = [
            text for text in (await w.get("/ready")).json["details"] if "api_keys_file" in text
        ]
        assert why in detail
        if path.is_dir():
            path.rmdir()
        path.write_text("two\n")
        w.look_at_files()
        assert [await status(w, key) for key in ("one", "two")] == [401, 200]
        assert not [
            text for text in (await w.get("/ready")).json["details"] if "api_keys_file" in text
        ]
        assert len(errors(caplog)) == 1


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "can't be read: No such file or directory"),
        (b"", "holds no key"),
        (b"#\n\n", "holds no key"),
        (b"good\nBAD KEY\n", "line 2 is no key of visible ASCII characters without blanks"),
        (
            "good\n\nschlüssel\n".encode(),
            "line 3 is no key of visible ASCII characters without blanks",
        ),
    ],
)
@pytest.mark.parametrize("setting", ["auth.api_keys_file", "auth.engine_api_key_file"])
def test_a_bad_file_at_the_start_is_one_line_and_exit_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    setting: str,
    content: bytes | None,
    why: str,
) -> None:
    """The line names setting, file and line, never what stands there."""
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    option = "--" + setting.removeprefix("auth.").replace("_", "-")
    assert main(["config", "validate", "--decode", "127.0.0.1:1", option, str(path)]) == 2
    assert capsys.readouterr().err == f"pdproxy config validate: {setting}: {path}: {why}\n"


def test_all_bad_files_are_reported_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys of clients and engines, certificates of both sides: a line for each, and what engines
    share only once.
    """
    none = tmp_path / "none"
    path = tmp_path / "x.yaml"
    path.write_text(
        f"auth: {{api_keys_file: {none}1, engine_api_key_file: {none}2}}\nlisten: {{tls: "
        f"{{certificate: {none}3}}}}\n"
        f"pools: [{{tls: {{ca: {none}4}}, nodes: [{{url: 'https://a:1', role: decode}}, {{url: "
        f"'https://b:1', role: decode}},"
        f" {{url: 'http://c:1', role: decode, api_key_file: {none}5}}]}}]"
    )
    assert main(["config", "validate", "--config", str(path)]) == 2
    why = "can't be read: No such file or directory"
    assert capsys.readouterr().err.splitlines() == [
        f"pdproxy config validate: auth.api_keys_file: {none}1: {why}",
        f"pdproxy config validate: auth.engine_api_key_file: {none}2: {why}",
        f"pdproxy config validate: pools[0].tls.ca: {none}4: {why}",
        f"pdproxy config validate: pools[0].nodes[2].api_key_file: {none}5: {why}",
        f"pdproxy config validate: listen.tls.certificate: {none}3: {why}",
    ]


async def test_serve_does_not_start_with_a_bad_file(tmp_path: Path) -> None:
    """`serve` prints the same line as `config validate`, and exits with 2."""
    path = tmp_path / "keys"
    path.write_text("MARK ER\n")
    line = [
        "serve",
        "--port",
        str(free_port()),
        "--decode",
        "127.0.0.1:1",
        "--api-keys-file",
        str(path),
    ]
    process = await piped(*line, env=os.environ)
    _, printed = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    (text,) = printed.decode().splitlines()
    assert (
        text == f"pdproxy serve: auth.api_keys_file: {path}: line 1 is no key of visible ASCII "
        f"characters without blanks"
    )


# -- the engines' keys


async def seen_by_probes(w: World) -> list[str | None]:
    """The keys that each engine's health route is asked with, in order."""
    seen: list[str | None] = []

    async def health(reply: Reply) -> None:
        seen.append(reply.request.header("authorization"))
        await reply.whole(b"")

    for engine in w.engines:
        engine.admin["/health"] = health
        await w.proxy.prober.probe(w.proxy.engines[engine.url], scrape=False)
    return seen


async def test_an_engine_may_have_a_key_of_its_own(tmp_path: Path) -> None:
    """Probes and both legs bring each engine its own key, the common one where it has none, and
    never the client's.
    """
    path = tmp_path / "decode-key"
    path.write_text("decode-key\n")

    def adjust(settings: Settings) -> Settings:
        (pool,) = settings.pools
        first, second = pool.nodes
        engines = (first, msgspec.structs.replace(second, api_key_file=str(path)))
        return msgspec.structs.replace(
            settings, pools=(msgspec.structs.replace(pool, nodes=engines),)
        )

    async with world(
        auth={"api_keys": ("mine",), "engine_api_key": "common-key"}, adjust=adjust
    ) as w:
        assert (await w.ask(CHAT, chat(), bearer("mine"))).status == 200
        legs = [r.header("authorization") for engine in w.engines for r in engine.requests]
        assert legs == ["Bearer common-key", "Bearer decode-key"]
        assert await seen_by_probes(w) == ["Bearer common-key", "Bearer decode-key"]
        renewed(path, "another\n")
        w.look_at_files()
        assert (await w.ask(CHAT, chat(), bearer("mine"))).status == 200
        assert w.decode[0].requests[-1].header("authorization") == "Bearer another"
        assert (await seen_by_probes(w))[1] == "Bearer another"


async def test_without_keys_of_clients_the_engines_stay_closed(tmp_path: Path) -> None:
    """An engine's key from a file serves probes alone where clients are asked for none."""
    path = tmp_path / "key"
    path.write_text("engine-key")
    async with world(auth={"engine_api_key_file": str(path)}) as w:
        await w.ask(COMPLETIONS, completion())
        assert [r.header("authorization") for engine in w.engines for r in engine.requests] == [
            None,
            None,
        ]
        assert await seen_by_probes(w) == ["Bearer engine-key"] * 2


async def test_no_settings_show_a_key() -> None:
    """Neither repr nor an error body nor a detail of /ready shows a key."""
    async with world(auth={"api_keys": ("MARK1",), "engine_api_key": "MARK2"}) as w:
        shown = (
            repr(w.proxy.settings)
            + repr(w.proxy.service.keys)
            + json.dumps((await w.get("/ready")).json)
        )
        assert "MARK" not in shown
        assert "MARK" not in repr(Auth(api_keys=("MARK1",)))
