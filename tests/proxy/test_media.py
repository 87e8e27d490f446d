"""Media by URL on all routes: no engine gets a request that names one, unless the settings let
it.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pdproxy.observe.events import ServedAlone
from pdproxy.settings.limits import MediaSettings
from pdproxy.settings.schema import Settings
from tests.fakes.passed import MESSAGES, PATHS, RESPONSES, everyone, fine
from tests.fakes.pool import pool
from tests.fakes.world import CHAT, World, world

FAR = "http://169.254.169.254/latest"
BATCH, INVOCATIONS = "/v1/chat/completions/batch", "/invocations"


def content(url: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": url}}]


def body(path: str, url: str) -> dict[str, Any]:
    messages: Any = [{"role": "user", "content": content(url)}]
    found = {
        "model": "tiny",
        "max_tokens": 4,
        "messages": [messages] if path == BATCH else messages,
    }
    if path == RESPONSES:
        return {"model": "tiny", "input": messages}
    if path == MESSAGES:
        found["messages"] = [
            {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": url}}]},
        ]
    return found


def _nothing_sent(w: World) -> bool:
    return not any(engine.requests for engine in w.engines)


@pytest.mark.parametrize("path", [CHAT, BATCH, INVOCATIONS, RESPONSES, MESSAGES, *PATHS])
@pytest.mark.parametrize("form", ["plain", "escaped", "utf-16", "unusual"])
async def test_a_medium_by_url_is_refused(path: str, form: str) -> None:
    """With a 400 in the shape of the route that names the setting; no engine sees the request."""
    async with world() as w:
        seen = everyone(w, path, fine)
        sent = body(path, FAR)
        data = json.dumps(sent).encode()
        if form == "escaped":
            data = data.replace(b"image_url", b"image_\\u0075rl").replace(b'"url"', b'"\\u0075rl"')
            data = data.replace(b"http://", b"http:\\/\\/")
        elif form == "utf-16":
            data = json.dumps(sent).encode("utf-16")
        elif form == "unusual":
            data = json.dumps({**sent, "temperature": float("nan"), "n": "many"}).encode()
        answer = await w.ask(path, data, [("content-type", "application/json")])
        assert answer.status == 400, answer.body
        assert "media.urls" in answer.json["error"]["message"]
        assert _nothing_sent(w)
        assert not seen


@pytest.mark.parametrize("path", [CHAT, BATCH, INVOCATIONS, RESPONSES, MESSAGES, *PATHS])
@pytest.mark.parametrize("kind", ["image_url", "audio_url", "video_url"])
async def test_a_type_hides_no_medium(path: str, kind: str) -> None:
    """A part with a `uuid` is a medium to engines, whatever its type."""
    part = {"type": "x_call", "uuid": "u", kind: {"url": FAR}}
    messages: Any = [{"role": "user", "content": [part]}]
    async with world() as w:
        seen = everyone(w, path, fine)
        sent = body(path, FAR)
        sent["input" if path == RESPONSES else "messages"] = (
            [messages] if path == BATCH else messages
        )
        for more in ({}, {"documents": [{"content": [part]}]}, {"data_1": {"content": [part]}}):
            answer = await w.ask(path, {**sent, **more})
            assert (answer.status, "media.urls" in answer.json["error"]["message"]) == (400, True)
        assert _nothing_sent(w)
        assert not seen


@pytest.mark.parametrize("path", [CHAT, INVOCATIONS, RESPONSES, MESSAGES])
@pytest.mark.parametrize("field", ["mm_processor_kwargs", "media_io_kwargs"])
async def test_media_beside_a_text_are_looked_at(path: str, field: str) -> None:
    async with world() as w:
        seen = everyone(w, path, fine)
        text: Any = [{"role": "user", "content": "x"}]
        sent = {
            **body(path, FAR),
            "input" if path == RESPONSES else "messages": text,
            field: {"images": [FAR]},
        }
        answer = await w.ask(path, sent)
        assert (answer.status, "media.urls" in answer.json["error"]["message"]) == (400, True)
        assert _nothing_sent(w)
        assert not seen


@pytest.mark.parametrize("path", ["/pooling", INVOCATIONS])
@pytest.mark.parametrize(
    "data",
    [FAR, {"data": FAR, "data_format": "url"}, {"data": "/etc/passwd", "data_format": "path"}],
    ids=str,
)
async def test_what_a_plugin_would_fetch_or_read_is_refused(path: str, data: object) -> None:
    async with world() as w:
        seen = everyone(w, path, fine)
        answer = await w.ask(path, {"model": "tiny", "data": data})
        assert (answer.status, "media.urls" in answer.json["error"]["message"]) == (400, True)
        assert not seen


async def test_a_large_body_is_looked_at_in_a_reader_process() -> None:
    async with world() as w:
        for path in (CHAT, RESPONSES):
            everyone(w, path, fine)
            sent = {**body(path, FAR), "user": "x" * 600_000}
            answer = await w.ask(path, sent)
            assert (answer.status, "media.urls" in answer.json["error"]["message"]) == (400, True)
        assert _nothing_sent(w)


@pytest.mark.parametrize(
    ("media", "url", "ok"),
    [
        (MediaSettings(), "data:image/png;base64,AAAA", True),
        (
            MediaSettings(urls="hosts", hosts=("images.example",)),
            "https://images.example/x.png",
            True,
        ),
        (MediaSettings(urls="hosts", hosts=("images.example",)), FAR, False),
        (MediaSettings(urls="any"), FAR, True),
    ],
)
async def test_what_the_settings_let_pass(media: MediaSettings, url: str, ok: bool) -> None:
    def adjust(settings: Settings) -> Settings:
        return msgspec.structs.replace(settings, media=media)

    async with world(aggregated=1, adjust=adjust) as w:
        await w.ask(CHAT, body(CHAT, url))
        assert any(engine.requests for engine in w.engines) == ok
        await w.ask(RESPONSES, body(RESPONSES, url))
        paths = [one.path for engine in w.engines for one in engine.requests]
        assert (RESPONSES in paths) == ok


@pytest.mark.parametrize("path", [CHAT, BATCH, INVOCATIONS, RESPONSES, MESSAGES])
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 6, 10]}},
        {"type": "video_embeds"},
        {"audio_embeds": None, "uuid": "u"},
    ],
)
async def test_embeddings_in_the_place_of_a_medium_are_refused(
    path: str, hidden: bool, part: dict[str, Any]
) -> None:
    """A decode engine takes them, and ends at one without a tensor. Operators may let them pass."""
    sent = body(path, "data:image/png;base64,AAAA")
    told = sent["input" if path == RESPONSES else "messages"]
    (told[0] if path == BATCH else told)[0]["content"].append(part)
    data = json.dumps(sent).replace("_embeds", "\\u005fembeds" if hidden else "_embeds").encode()
    for let in (False, True):

        def adjust(settings: Settings, let: bool = let) -> Settings:
            return msgspec.structs.replace(settings, media=MediaSettings(embeds=let))

        async with world(adjust=adjust) as w:
            answer = await w.ask(path, data, [("content-type", "application/json")])
            refused = b"--enable-mm-embeds" in answer.body and answer.status == 400
            assert (refused, _nothing_sent(w)) == (not let, not let)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
async def test_media_within_the_body_are_split(path: str, stream: bool) -> None:
    """Both engines get them as they came. No ids go with them: engines do not read those then."""
    sent = body(path, "data:image/png;base64,AAAA") | {"temperature": 0, "stream": stream}
    if path == MESSAGES:
        source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
        sent["messages"][0]["content"] = [{"type": "image", "source": source}]
    async with world() as w:
        assert (await w.ask(path, sent)).status == 200
        (made,), (loaded,) = w.prefill[0].requests, w.decode[0].requests
        told = "input" if path == RESPONSES else "messages"
        assert made.json[told] == loaded.json[told] == sent[told]
        assert loaded.kv is not None
        assert "prompt_token_ids" not in loaded.kv
        await w.quiet()


async def test_a_contract_that_knows_kv_by_ids_splits_no_media() -> None:
    """Two pictures may have the same ids."""
    async with pool("shared") as pair:
        await pair.ask(CHAT, body(CHAT, "data:image/png;base64,AAAA"))
        assert [one.reason for one in pair.world.events(ServedAlone)] == ["non_text"]
