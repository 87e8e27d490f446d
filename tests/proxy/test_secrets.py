"""Nothing secret leaves: markers as keys and prompts, many ways to fail, and all that an operator
or a client can read.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme

from pdproxy.cli.main import main
from pdproxy.observe.formats import JsonFormatter, TextFormatter
from pdproxy.serving.request.service import GeneratingRequest
from pdproxy.settings.dump import dump
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.load import load
from pdproxy.settings.schema import Settings
from pdproxy.settings.tls import EngineTls, ListenTls, listen_context
from tests.fakes import answers, scripts
from tests.fakes.client import bearer
from tests.fakes.engine import Reply
from tests.fakes.world import CHAT, COMPLETIONS, World, chat, completion, world

MARK = "S3CRETMARK"
PROXY_KEY, FILE_KEY, ENGINE_KEY, NODE_KEY, WRONG_KEY = (
    f"{MARK}-{n}" for n in ("proxy", "file", "engine", "node", "wrong")
)
SAID = f"{MARK}-prompt"
PROMPT = f"{SAID} is what the prompt says, over and over. " * 4


class Read:
    """All that was read in a test, with where."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.caplog = caplog
        self.texts: list[tuple[str, str]] = []

    async def ask(self, w: World, *args: Any, **more: Any) -> int:
        """Ask, and keep the answer if it is an error. The prompt may be in it: engines quote it to
        whom it belongs.
        """
        answer = await w.ask(*args, **more)
        if answer.status != 200 or b'"error"' in answer.body:
            self.texts.append(
                (
                    f"answer {answer.status}",
                    answer.body.decode().replace(SAID, "") + str(answer.headers),
                )
            )
        return answer.status

    async def pages(self, w: World) -> None:
        """Read what is open to anybody."""
        for path in ("/metrics", "/ready", "/version", "/health", "/openapi.json", "/nothing"):
            answer = await w.get(path)
            self.texts.append((path, answer.body.decode() + str(answer.headers)))
        self.texts.append(
            (
                "repr",
                repr(w.proxy.settings)
                + repr(w.proxy.service.keys)
                + repr(list(w.proxy.engines.values())),
            )
        )
        self.texts.append(("config print", dump(w.proxy.settings)))

    def nothing_secret(self) -> None:
        """Look through all of it, and each log record in both formats."""
        formats = (TextFormatter(), JsonFormatter())
        lines = [("log", one.format(record)) for record in self.caplog.records for one in formats]
        assert any("request" in line for _, line in lines), "the log was not captured"
        assert [
            text for text in (*self.texts, *lines) if MARK in text[1] or MARK in repr(text[1])
        ] == []


@pytest.fixture
def read(caplog: pytest.LogCaptureFixture) -> Read:
    caplog.set_level(logging.DEBUG)
    return Read(caplog)


def with_node_key(settings: Settings) -> Settings:
    (pool,) = settings.pools
    first, *others = pool.nodes
    engines = (msgspec.structs.replace(first, api_key=NODE_KEY), *others)
    return msgspec.structs.replace(settings, pools=(msgspec.structs.replace(pool, nodes=engines),))


async def test_through_good_and_bad_ends(read: Read, tmp_path: Path) -> None:
    """Wrong keys, engines that refuse, fail, hang up and send invalid data, bad bodies: no marker
    is read anywhere.
    """
    path = tmp_path / "keys"
    path.write_text(FILE_KEY)
    auth = {"api_keys": (PROXY_KEY,), "api_keys_file": str(path), "engine_api_key": ENGINE_KEY}
    async with world(decode=2, auth=auth, adjust=with_node_key, leaves=True) as w:
        ends = [
            scripts.whole(answers.INTERNAL_500, 500),
            scripts.whole(answers.error("Unauthorized", "AuthenticationError", 401), 401),
            scripts.whole(b'{"error":"Unauthorized"}', 401),
            scripts.streams(then="eof"),
            scripts.streams(then="reset"),
            scripts.whole(answers.error(f"bad: {PROMPT}", "InternalServerError", 500), 500),
            scripts.whole(answers.error(f"bad: {PROMPT}", "BadRequestError", 400), 400),
            scripts.streams(answers.error_event(f"bad: {PROMPT}")),
            scripts.streams(scripts.WORD, answers.error_event(f"bad: {PROMPT}")),
            scripts.garbage,
            scripts.half,
            scripts.reset,
        ]
        for end in ends:
            for engine in (*w.prefill, *w.decode):
                engine.script(end)
            for stream in (False, True):
                await read.ask(
                    w, COMPLETIONS, completion(prompt=PROMPT, stream=stream), bearer(PROXY_KEY)
                )
                await read.ask(
                    w, CHAT, chat(messages=[{"role": "user", "content": PROMPT}]), bearer(FILE_KEY)
                )
        for headers in (
            [],
            bearer(WRONG_KEY),
            [("authorization", WRONG_KEY)],
            [("authorization", f"Basic {WRONG_KEY}")],
        ):
            assert await read.ask(w, COMPLETIONS, completion(prompt=PROMPT), headers) == 401
            assert (await w.get("/v1/models", headers)).status == 401
        good = bearer(PROXY_KEY)
        for route in ("/tokenize", "/v1/responses", "/v1/messages", "/v1/embeddings"):
            body = {"model": "tiny", "prompt": PROMPT, "input": PROMPT}
            assert await read.ask(w, route, body, bearer(WRONG_KEY)) == 401
            await read.ask(w, route, body, good)
        bodies: tuple[Any, ...] = (
            completion(prompt=PROMPT),
            completion(prompt={"x": PROMPT}),
            completion(prompt=[PROMPT, 3]),
            completion(prompt=[PROMPT, PROMPT], stream=True),
            completion(prompt=PROMPT, max_tokens=-1),
            completion(prompt=PROMPT, kv_transfer_params={"remote_host": SAID}),
            completion(prompt=PROMPT, request_id="fine"),
            json.dumps(completion(prompt=PROMPT))[:-1].encode(),
            b'{"prompt":"' + PROMPT.encode() + b"\xff" + b'"}',
        )
        for wrong in bodies:
            await read.ask(w, COMPLETIONS, wrong, good)
        path.write_text(f"{FILE_KEY} {MARK}")
        w.look_at_files()
        await read.pages(w)
    read.nothing_secret()


async def test_a_crash_of_our_own_quotes_nothing(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect whose exception holds the prompt and the key is logged by its type and its place
    alone.
    """

    def crash(self: GeneratingRequest) -> None:
        incoming = self._incoming
        assert PROMPT.encode() in incoming.body or json.dumps(PROMPT).encode() in incoming.body
        try:
            int(incoming.body)
        except ValueError as error:
            raise RuntimeError(
                f"can't serve {incoming.body!r} of {incoming.authorization!r}"
            ) from error

    monkeypatch.setattr(GeneratingRequest, "read", crash)
    async with world(auth={"api_keys": (PROXY_KEY,)}) as w:
        assert await read.ask(w, COMPLETIONS, completion(prompt=PROMPT), bearer(PROXY_KEY)) == 500
        await read.pages(w)
    read.nothing_secret()
    (line,) = [
        r.getMessage() for r in read.caplog.records if "failed in pdproxy itself" in r.getMessage()
    ]
    assert "RuntimeError at " in line
    assert "ValueError at " in line
    assert "crash" in line


async def test_engines_that_want_another_key(read: Read) -> None:
    """Probes that are refused are reported without the key that was refused."""

    def locked(w: World) -> None:
        async def refuse(reply: Reply) -> None:
            await reply.whole(b'{"error":"Unauthorized"}', 401)

        for engine in w.engines:
            engine.admin["/health"] = engine.admin["/v1/models"] = refuse

    async with world(
        auth={"api_keys": (PROXY_KEY,), "engine_api_key": ENGINE_KEY}, before=locked
    ) as w:
        assert "401" in (await w.get("/ready")).json["reason"]
        await read.ask(w, COMPLETIONS, completion(prompt=PROMPT), bearer(PROXY_KEY))
        await read.pages(w)
    read.nothing_secret()


async def test_engines_that_are_not_trusted(read: Read, tmp_path: Path) -> None:
    """TLS that fails sends nothing, and reports nothing but the reason."""
    ca, other = trustme.CA(), tmp_path / "other.pem"
    one = ca.issue_cert("127.0.0.1")
    one.private_key_and_cert_chain_pem.write_to_path(tmp_path / "cert.pem")
    trustme.CA().cert_pem.write_to_path(other)

    def adjust(settings: Settings) -> Settings:
        (pool,) = settings.pools
        return msgspec.structs.replace(
            settings, pools=(msgspec.structs.replace(pool, tls=EngineTls(ca=str(other))),)
        )

    served = listen_context(ListenTls(certificate=str(tmp_path / "cert.pem")))
    auth = {"api_keys": (PROXY_KEY,), "engine_api_key": ENGINE_KEY}
    async with world(auth=auth, adjust=adjust, engine_tls=served) as w:
        assert await read.ask(w, COMPLETIONS, completion(prompt=PROMPT), bearer(PROXY_KEY)) == 503
        await read.pages(w)
    read.nothing_secret()


@pytest.mark.parametrize(
    "text",
    [
        f"auth: {{api_keys: '{MARK}'}}",
        f"auth: {{api_keys: ['{MARK} {MARK}']}}",
        f"auth: {{engine_api_key: ['{MARK}']}}",
        f"auth: {{engine_api_key: '{MARK}', engine_api_key_file: x}}",
        f"pools: [{{nodes: [{{url: 'http://a:1', role: decode, api_key: '{MARK} {MARK}'}}]}}]",
        f"pools: [{{nodes: [{{url: 'http://a:1', role: decode, api_key: ['{MARK}']}}]}}]",
        (
            f"pools: [{{nodes: [{{url: 'http://a:1', role: decode, api_key: '{MARK}', "
            f"api_key_file: "
            f"x}}]}}]"
        ),
        f"pools: [{{nodes: [{{url: 'https://user:{MARK}@a:1', role: decode}}]}}]",
        f"pools: [{{nodes: [{{url: 'http://{MARK}@a:1/v1', role: decode}}]}}]",
    ],
)
def test_settings_that_are_refused(tmp_path: Path, text: str) -> None:
    """An error of the settings never repeats a key or a password in a URL."""
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load(path, {})
    assert MARK.lower() not in str(caught.value).lower()


def test_config_print_masks_the_key_of_a_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The key of one engine is masked like all others, and a mask is not taken for a key."""
    path = tmp_path / "x.yaml"
    path.write_text(f"pools: [{{nodes: [{{url: 'https://a', role: decode, api_key: '{MARK}'}}]}}]")
    assert main(["config", "print", "--config", str(path)]) == 0
    shown = capsys.readouterr().out
    assert MARK not in shown
    assert "url: https://a:443" in shown
    path.write_text(shown)
    assert main(["config", "print", "--config", str(path)]) == 2
    assert "in place of a key, not a key" in capsys.readouterr().err
