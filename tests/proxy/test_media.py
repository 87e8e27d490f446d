"""Media on all routes: no engine gets a request that names one by URL, unless the settings let it;
media within the body are split between two engines.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

from pdproxy.observe.events import ServedAlone
from pdproxy.settings.limits import MediaSettings
from pdproxy.settings.schema import Settings
from tests.fakes import scripts
from tests.fakes.client import Answer
from tests.fakes.passed import MESSAGES, PATHS, RESPONSES, everyone, fine, shape
from tests.fakes.pictures import asking, part, png, url
from tests.fakes.world import CHAT, PROMPT, World, world
from tests.proxy.test_continued import results
from tests.proxy.test_continued_not import broken

FAR = "http://169.254.169.254/latest"
BATCH, INVOCATIONS = "/v1/chat/completions/batch", "/invocations"
A, B, LARGE = png("a"), png("b"), png("a", 300, 300)
"""A and B have one size: 4 tokens."""
SEES = {"vision": True}
SAID = {"model": "tiny", "max_tokens": 4, "temperature": 0}
ID = [("x-request-id", "r")]


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
        return {"model": "tiny", "input": messages, "max_output_tokens": 4}
    if path == MESSAGES:
        found["messages"] = [
            {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": url}}]},
        ]
    return found


def data_of(picture: bytes) -> str:
    """The part of a picture's URL that depends on the picture."""
    return url(picture).partition(",")[2]


def encoded(w: World) -> tuple[int, int]:
    """How many pictures the prefill and the decode engines have encoded."""
    prefill, decode = [
        sum(one.sim.engine.stats.encoder_inputs for one in engines)
        for engines in (w.prefill, w.decode)
    ]
    return prefill, decode


async def asked_alone(w: World, path: str, sent: dict[str, Any]) -> Answer:
    """The answer of an engine that has had no KV from another."""
    w.port, port = w.prefill[0].port, w.port
    answer = await w.ask(path, sent, ID)
    w.port = port
    return answer


def still(answer: Answer) -> tuple[int, list[Any]]:
    """An answer without its times and ids."""
    parts = answer.events or [answer.body]
    return answer.status, [
        part if b"[DONE]" in part else shape(re.sub(rb'"created":\d+', b'"created":0', part))
        for part in parts
    ]


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
    """Both engines get them as they came, one encodes them, and the answer is that of one engine.
    No ids go with them: engines do not read those then.
    """
    sent = body(path, url(A)) | {"temperature": 0, "stream": stream}
    if path == MESSAGES:
        source = {"type": "base64", "media_type": "image/png", "data": data_of(A)}
        sent["messages"][0]["content"] = [{"type": "image", "source": source}]
    async with world(facts=SEES) as w:
        answer = await w.ask(path, sent, ID)
        (made,), (loaded,) = w.prefill[0].requests, w.decode[0].requests
        told = "input" if path == RESPONSES else "messages"
        assert made.json[told] == loaded.json[told] == sent[told]
        assert loaded.kv is not None
        assert "prompt_token_ids" not in loaded.kv
        await w.settled()
        assert w.books.endings == {"loaded": 1}
        assert encoded(w) == (1, 0)
        assert still(answer) == still(await asked_alone(w, path, sent))
        other = json.loads(json.dumps(sent).replace(data_of(A), data_of(B)))
        assert still(answer) != still(await asked_alone(w, path, other)), "a control"


async def test_several_pictures() -> None:
    """Over several turns: what engines have had before is found by its content."""
    facts = {**SEES, "enable_prompt_tokens_details": True}
    async with world(facts=facts) as w:
        turns = [asking(A, PROMPT, LARGE, "or", A)]
        first = await w.ask(CHAT, {**SAID, "messages": turns})
        assert encoded(w) == (2, 0)
        usage = first.json["usage"]["prompt_tokens_details"]
        assert usage["multimodal_tokens"] == {"image": 4 + 64 + 4}
        for picture, tokens in ((B, 3), (A, 3)):
            more = [*turns, {"role": "assistant", "content": first.text}, asking("And?", picture)]
            sent = {**SAID, "messages": more}
            answer = await w.ask(CHAT, sent)
            assert answer.text == (await asked_alone(w, CHAT, sent)).text
            assert encoded(w) == (tokens, 0)
        await w.settled()
        assert w.books.endings == {"loaded": 3}
        assert not w.events(ServedAlone)


async def test_a_body_of_megabytes_is_split() -> None:
    """It is read in a reader process, which looks at all parts."""
    picture = A + bytes(2_400_000)
    named = {**part(picture), "uuid": "u"}
    async with world(facts=SEES) as w:
        for content, alone in ((part(picture), 0), (named, 1)):
            sent = {**SAID, "messages": [{"role": "user", "content": [part(PROMPT), content]}]}
            answer = await w.ask(CHAT, sent)
            assert answer.status == 200
            assert len(w.events(ServedAlone)) == alone
            assert answer.text == (await asked_alone(w, CHAT, sent)).text
        assert w.proxy.bodies.workers is not None
        assert len(w.prefill[0].requests) == 3
        await w.settled()


@pytest.mark.parametrize(
    "content",
    [
        part("http://127.0.0.1/picture.png"),
        {**part(A), "uuid": "u"},
        {"type": "image_url", "image_url": None, "uuid": "u"},
    ],
    ids=["url", "uuid", "uuid alone"],
)
@pytest.mark.parametrize("beside", [(), (A,)], ids=["", "beside another"])
async def test_two_engines_may_see_other_pictures(content: dict[str, Any], beside: Any) -> None:
    """At one URL, or under one name. So one engine gets them; what it says is passed on."""

    def adjust(settings: Settings) -> Settings:
        return msgspec.structs.replace(settings, media=MediaSettings(urls="any"))

    parts = [part(PROMPT), content, *map(part, beside)]
    sent = {**SAID, "messages": [{"role": "user", "content": parts}]}
    async with world(facts=SEES, adjust=adjust) as w:
        answer = await w.ask(CHAT, sent)
        known = content["image_url"] is not None
        assert answer.status == (200 if known else 400)
        assert [one.reason for one in w.events(ServedAlone)] == ["non_text"]
        assert not w.prefill[0].requests
        assert encoded(w) == (0, (1 + len(beside)) * known)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_engine_fails_before_data(stream: bool) -> None:
    """Another one gets the picture as it came, with the handle of a fresh prefill."""
    sent = {**SAID, "messages": [asking(A, PROMPT)], "stream": stream}
    async with world(decode=2, facts=SEES) as w:
        w.decode[1].script(scripts.reset)
        answer = await w.ask(CHAT, sent)
        assert answer.status == 200
        assert len(w.prefill[0].requests) == 2
        kvs = [engine.requests[0].kv or {} for engine in w.decode]
        assert kvs[0]["remote_request_id"] != kvs[1]["remote_request_id"]
        assert w.decode[0].requests[0].json["messages"] == sent["messages"]
        await w.settled()
        assert w.books.endings == {"released": 1, "loaded": 1}
        assert encoded(w) == (1, 0)
        assert answer.text == (await asked_alone(w, CHAT, sent)).text


async def test_an_unreadable_picture_is_refused_as_by_one_engine() -> None:
    """The decode engine has the last word, without a handle."""
    async with world(facts=SEES) as w:
        sent = {**SAID, "messages": [asking(PROMPT, "data:image/png;base64://no")]}
        answer = await w.ask(CHAT, sent)
        assert answer.status == 400
        assert answer.body == (await asked_alone(w, CHAT, sent)).body
        assert [one.kv for one in w.decode[0].requests] == [None]
        assert encoded(w) == (0, 0)
        await w.settled()


@pytest.mark.parametrize("fault", ["reset", "kill", "dead_core"])
async def test_a_stream_about_a_picture_does_not_go_on(fault: str) -> None:
    """Its ids do not stand for the prompt: it ends with an error."""
    sent = {**SAID, "messages": [asking(A, PROMPT)], "stream": True, "max_tokens": 12}
    async with world(decode=2, facts=SEES, leaves=True) as w:
        whole = (await asked_alone(w, CHAT, sent)).text
        w.decode[1].sim.faults.add(f"{fault}@mid_stream:events=3")
        broken(await w.ask(CHAT, sent), whole)
        assert results(w) == [("refused", "media")]
        assert not w.decode[0].requests
        await w.quiet()


async def test_a_conversation_of_a_batch_has_a_picture() -> None:
    """Each is split by itself."""
    chats: Any = [[asking(PROMPT)], [asking(A, PROMPT)], [asking(B, PROMPT)]]
    async with world(facts=SEES) as w:
        sent = {**SAID, "messages": chats}
        answer = await w.ask(BATCH, sent, ID)
        assert not w.events(ServedAlone)
        assert encoded(w) == (2, 0)
        await w.settled()
        assert w.books.endings == {"loaded": 3}
        assert still(answer) == still(await asked_alone(w, BATCH, sent))
