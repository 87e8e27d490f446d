"""Chats with pictures on real engines: the proxy answers as one plain engine does, and a picture is
encoded by one engine.
"""

import http.server
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fakes.pictures import asking, png

from .client import ask
from .compare import differs
from .engine import Role
from .equality import equal
from .fleet import Fleet
from .launcher import Launcher
from .prompts import CHAT, JSON_SCHEMA, STORY, USAGE, Body, Shape, chat
from .proxy import Proxy
from .vision import FLAGS, encoded, vision_launcher

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300, func_only=True)]

NAMES: dict[str, Role] = {"seer": "plain", "seer-p": "prefill", "seer-d": "decode"}
ALONE = ""
"""Why one engine serves a chat whose pictures the chat itself holds; empty if two split it."""


def _one(nonce: str) -> list[Body]:
    return [asking(f"{nonce} {STORY}", png(nonce), "What is missing?")]


def _several(nonce: str) -> list[Body]:
    """Three sizes: more tokens for a larger picture, and a smaller one is enlarged."""
    pictures = (png(nonce), png(nonce, 300, 300), png(nonce, 20, 130))
    return [asking(nonce, *pictures, STORY, pictures[0], "Which one was there twice?")]


def _first(nonce: str) -> list[Body]:
    return [asking(png(nonce, 140, 84), STORY)]


def _last(nonce: str) -> list[Body]:
    return [asking(f"{nonce} {STORY}", png(nonce, 140, 84))]


def _alone(nonce: str) -> list[Body]:
    return [asking(png(nonce, 200, 200))]


def _earlier(nonce: str) -> list[Body]:
    return [
        {"role": "system", "content": f"{nonce} You keep the ledgers."},
        *_one(nonce),
        {"role": "assistant", "content": "A barrel."},
        asking("And here?", png(f"{nonce} second", 84, 84)),
        {"role": "assistant", "content": "Nothing."},
        {"role": "user", "content": "So where is it?"},
    ]


def _broken(nonce: str) -> list[Body]:
    return [asking(nonce, b"no picture", "What is missing?")]


def _row(name: str, messages: Callable[[str], Any] = _one, /, **given: Any) -> Shape:
    return chat(name, messages, alone=ALONE, **given)


SHAPES = [
    _row("one"),
    _row("one-streamed", stream=True),
    _row("one-streamed-usage", **USAGE),
    _row("several", _several),
    _row("several-streamed", _several, **USAGE),
    _row("first", _first),
    _row("last", _last),
    _row("without-text", _alone),
    _row("in-earlier-turns", _earlier),
    _row("salted", cache_salt="a tenant's"),
    _row("token-ids", return_token_ids=True),
    _row("logprobs", logprobs=True, top_logprobs=2),
    _row("seed", temperature=0.8, seed=7),
    _row("one-token", max_tokens=1),
    _row("json-schema", response_format=JSON_SCHEMA, max_tokens=60),
    _row("broken", _broken, status=400),
]


@pytest.fixture(scope="module")
def seers(launcher: Launcher) -> Iterator[Fleet]:
    """A plain, a prefill and a decode engine with a vision-language model."""
    seeing = vision_launcher(launcher.built)
    seers = Fleet(seeing, flags=FLAGS)
    try:
        seers.launch(NAMES)
        yield seers
    finally:
        seeing.close()
        seers.end()


@pytest.fixture(scope="module")
def proxy(seers: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """pdproxy in front of them, which lets engines fetch pictures."""
    proxy = Proxy.start(
        seers.prefills,
        seers.decodes,
        tmp_path_factory.mktemp("seers"),
        settings={"media": {"urls": "any"}},
    )
    yield proxy
    assert proxy.stop() == 0, proxy.tail()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_answers_are_the_plain_engines(seers: Fleet, proxy: Proxy, shape: Shape) -> None:
    """Status, body and events equal the plain engine's. Where two engines split the chat, all KV
    moves and the decode engine encodes nothing.
    """
    (prefill,), (decode,) = seers.prefills, seers.decodes
    before = encoded(prefill), encoded(decode)
    await equal(seers, proxy, shape)
    made = encoded(prefill) - before[0], encoded(decode) - before[1]
    assert bool(sum(made)) == (shape.status == 200)
    assert shape.alone or not made[1]


async def test_pictures_differ(seers: Fleet) -> None:
    """Control: a plain engine answers otherwise to another picture of the same size."""
    texts = set()
    for seed in ("one", "two"):
        body = {"messages": [asking("What?", png(seed), "Tell.")], "temperature": 0}
        texts.add((await ask(seers.plain.url, CHAT, body | {"max_tokens": 8})).text)
    assert len(texts) == 2


async def test_prompts_that_begin_with_one_picture(seers: Fleet, proxy: Proxy) -> None:
    """A conversation, the same chat once more, and another picture in the same place: prefix caches
    mix up nothing.
    """
    nonce = secrets.token_hex(6)
    begin = [asking(nonce, png(nonce, 140, 84), STORY)]
    answer = {"role": "assistant", "content": "A barrel."}
    chats = (
        begin,
        [*begin, answer, asking("And here?", png(f"{nonce} second"))],
        begin,
        [asking(nonce, png(f"{nonce} another", 140, 84), STORY)],
    )
    for messages in chats:
        body = {"messages": messages, "temperature": 0, "max_tokens": 12}
        plain, other = [await ask(one.url, CHAT, body) for one in (seers.plain, proxy)]
        assert plain.status == 200
        assert not differs(plain, other, strict=False, warm=True)


async def test_a_picture_behind_a_url_is_fetched_by_one_engine(seers: Fleet, proxy: Proxy) -> None:
    """Each engine would fetch it for itself. The server answers the second one with a larger
    picture, which would end a decode engine that has the KV of the smaller one.
    """
    fetched: list[str] = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fetched.append(self.path)
            size = 56 if len(fetched) == 1 else 300
            picture = png("fetched", size, size)
            self.send_response(200)
            self.send_header("Content-Length", str(len(picture)))
            self.end_headers()
            self.wfile.write(picture)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        where = f"http://127.0.0.1:{server.server_port}/picture.png"
        messages = [asking(f"{secrets.token_hex(6)} {STORY}", where, "What is missing?")]
        body = {"messages": messages, "temperature": 0, "max_tokens": 12}
        answer = await ask(proxy.url, CHAT, body)
    finally:
        server.shutdown()
        server.server_close()
    assert answer.status == 200, answer.body
    assert len(fetched) == 1
    plain = await ask(
        seers.plain.url,
        CHAT,
        body | {"messages": [asking(*_texts(messages, png("fetched", 56, 56)))]},
    )
    assert not differs(plain, answer, warm=True)


def _texts(messages: list[Body], picture: bytes) -> list[str | bytes]:
    """Return the parts of the only message, with `picture` in the place of its URL."""
    return [part.get("text", picture) for part in messages[0]["content"]]
