"""Media by URL: where engines would find one is known, whatever it is hidden in, and texts that
only look like one pass.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.kit.errors import BadRequestError
from pdproxy.settings.crosscheck import crosscheck
from pdproxy.settings.errors import Mistakes, SettingsError
from pdproxy.settings.limits import MediaSettings
from pdproxy.settings.schema import Settings
from pdproxy.wire.fields import Fields
from pdproxy.wire.media import MediaUrlError, check_media
from pdproxy.wire.media_rule import ANY, Media

OFF = Media("off")
HOSTS = Media("hosts", ("images.example", "10.0.0.1", "[fd00::1]"))
FAR = "http://169.254.169.254/latest"


def fields(body: dict[str, Any]) -> Fields:
    return {name: msgspec.Raw(json.dumps(value).encode()) for name, value in body.items()}


def passes(body: dict[str, Any], rule: Media = OFF) -> bool:
    try:
        check_media(fields(body), rule)
    except MediaUrlError as error:
        return error.status != 400 or "media.urls" not in error.message
    return True


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def places(url: Any) -> list[dict[str, Any]]:
    """Bodies of all routes in which an engine would fetch a URL."""
    source = {"type": "image", "source": {"type": "url", "url": url}}
    return [
        user({"type": "image_url", "image_url": {"url": url}}),
        user({"type": "image_url", "image_url": url}),
        user({"image_url": {"url": url}}),
        user({"image_url": url}),
        user({"type": "x_call", "uuid": "u", "image_url": {"url": url}}),
        user({"type": "x_tool_use", "uuid": "u", "video_url": url}),
        user({"type": "audio_url", "audio_url": {"url": url}}),
        user({"type": "video_url", "video_url": {"url": url, "fps": 2}}),
        user({"type": "input_image", "image_url": url}),
        user({"type": "image", "image": url}),
        user(
            {"type": "text", "text": "x"},
            {"type": "image_url", "image_url": {"detail": "low", "url": url}},
        ),
        {
            "messages": [
                {"role": "tool", "content": [{"type": "image_url", "image_url": {"url": url}}]}
            ]
        },
        {
            "messages": [
                [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
            ]
        },
        {"messages": [{"role": "user", "content": [source]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [source]}]}]},
        {"system": [source]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
        {
            "input": [
                {
                    "type": "x_call",
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": url}],
                }
            ]
        },
        {
            "input": [
                {
                    "type": "function_call_output",
                    "output": [{"type": "input_image", "image_url": url}],
                }
            ]
        },
        {"input": [{"type": "input_file", "file_url": url}]},
        {"documents": [{"content": [{"type": "image_url", "image_url": {"url": url}}]}]},
        {"data_1": {"content": [{"type": "video_url", "video_url": {"url": url}}]}},
        {"content_parts": [{"type": "image_url", "url": url}]},
        {"mm_processor_kwargs": {"images": [url]}},
        {"media_io_kwargs": {"video": {"fallback": url}}},
        {"data": url},
        {"data": {"data": url, "data_format": "url"}},
        {"data": [{"type": "x_call", "outputs": [{"annotations": {"any": url}}]}]},
    ]


@pytest.mark.parametrize("at", range(len(places(""))))
@pytest.mark.parametrize(
    "url", [FAR, "file:///etc/passwd", "HTTPS://images.example/x", "ftp://x/y", " http://x"]
)
def test_a_url_is_found_wherever_engines_look(at: int, url: str) -> None:
    body = places(url)[at]
    assert not passes(body)
    assert passes(body, ANY)
    assert passes(places("data:image/png;base64,AAAA")[at])


@pytest.mark.parametrize("at", range(len(places(""))))
def test_escapes_hide_nothing(at: int) -> None:
    """JSON may write each letter of a key and of a URL as a number, and slashes with a
    backslash.
    """
    plain = json.dumps(places(FAR)[at])
    letters = re.compile(r'"[^"]*"')
    escaped = letters.sub(
        lambda one: '"' + "".join(f"\\u{ord(x):04x}" for x in one[0][1:-1]) + '"', plain
    )
    top = next(iter(places(FAR)[at]))
    escaped = escaped.replace('"' + "".join(f"\\u{ord(x):04x}" for x in top) + '"', f'"{top}"', 1)
    for text in (escaped, plain.replace("/", "\\/")):
        raw = msgspec.json.decode(text.encode(), type=dict[str, msgspec.Raw])
        assert json.loads(text) == places(FAR)[at]
        with pytest.raises(MediaUrlError):
            check_media(raw, OFF)


@pytest.mark.parametrize(
    "text",
    [
        r'"http:/\/10.0.0.1/x"',
        r'"http:\//10.0.0.1/x"',
        r'"http:\n//10.0.0.1/x"',
        r'"HTTP:\t\r\n\/\/10.0.0.1/x"',
        '"FILE:/etc/passwd"',
        '"File:etc/passwd"',
    ],
)
def test_spellings_hide_nothing(text: str) -> None:
    """Where no key says that a URL follows: case, blanks that readers of URLs skip, and escapes of
    slashes.
    """
    with pytest.raises(MediaUrlError):
        check_media({"mm_processor_kwargs": msgspec.Raw(f'{{"images":[{text}]}}'.encode())}, OFF)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": f"what is at {FAR}? see image_url"}]},
        user({"type": "text", "text": f'{{"image_url": "{FAR}"}}'}),
        {"prompt": f"url {FAR} \u00e9"},
        {"input": f"see {FAR}"},
        {
            "tools": [
                {"function": {"parameters": {"properties": {"image_url": {"default": FAR}}}}}
            ],
            "messages": [],
        },
        {"response_format": {"json_schema": {"schema": {"examples": [{"url": FAR}]}}}},
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"arguments": f'{{"url": "{FAR}"}}'}}],
                }
            ]
        },
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "input": {"url": FAR}}]}
            ]
        },
        {"input": [{"type": "web_search_call", "action": {"type": "open_page", "url": FAR}}]},
        {
            "input": [
                {
                    "type": "code_interpreter_call",
                    "code": FAR,
                    "outputs": [{"type": "image", "url": FAR}],
                }
            ]
        },
        {
            "input": [
                {"type": "file_search_call", "results": [{"attributes": {"url": FAR}, "text": "x"}]}
            ]
        },
        {
            "input": [
                {
                    "content": [
                        {
                            "type": "output_text",
                            "annotations": [{"type": "url_citation", "url": FAR}],
                        }
                    ]
                }
            ]
        },
        {"mm_processor_kwargs": {"fps": 2, "mode": "min_pixels"}},
        user({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}),
        user({"type": "image_embeds", "image_embeds": "AAAA", "uuid": "url"}),
        {
            "data": {
                "data": "/9j/4AAQSkZJRgABAQAAAQ",
                "data_format": "b64_json",
                "out_data_format": "path",
            }
        },
        {
            "data": {
                "text": "Question: what is at /etc/passwd?",
                "path": ["data:image/png;base64,AAAA"],
            }
        },
    ],
)
def test_what_only_looks_like_one(body: dict[str, Any]) -> None:
    """Texts, schemas, what a model has called, and what an earlier answer cites are fetched by no
    engine.
    """
    assert passes(body)


@pytest.mark.parametrize(
    "data",
    [
        {"data": "/etc/passwd", "data_format": "path"},
        [{"inner": {"data": "x.tiff", "Data_Format": "Path"}}],
        {"image_path": "x.tiff"},
        {"filePath": ["../x.tiff"]},
        {"imageURL": "//10.0.0.1/x"},
    ],
)
def test_a_plugin_reads_no_file(data: Any) -> None:
    """Plugins of engines take paths where they take URLs."""
    assert not passes({"data": data})
    assert not passes({"data": data}, HOSTS)
    assert passes({"data": data}, ANY)


@pytest.mark.parametrize(
    ("url", "ok"),
    [
        ("https://images.example/a.png?x=1#y", True),
        ("http://IMAGES.example:8080/a", True),
        ("http://10.0.0.1/a", True),
        ("http://[fd00::1]/a", True),
        ("https://images.example", True),
        ("https://images.example.evil/a", False),
        ("https://evil/images.example", False),
        ("https://images.example@evil/a", False),
        ("https://user:images.example@evil/a", False),
        ("https://evil\\@images.example/a", False),
        ("https://images.example\\@evil/a", False),
        ("https://images.example:80@evil/a", False),
        ("https://evil#@images.example/", False),
        (" https://images.example/a", False),
        ("https://images.example/a b", False),
        ("https://images.example/\n", False),
        ("https:images.example/a", False),
        ("file://images.example/etc/passwd", False),
        ("ftp://images.example/a", False),
        ("data:image/png;base64,AAAA", True),
        ("DATA:image/png;base64,AAAA", True),
        ("", True),
    ],
)
def test_urls_of_listed_hosts(url: str, ok: bool) -> None:
    """Only what all programs read alike counts."""
    assert passes(user({"type": "image_url", "image_url": {"url": url}}), HOSTS) == ok


KEYS = ["image_url", "url", "type", "content", "x"]
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from([FAR, "url", "image_url"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["image_url", "url", "type", "content", "x"]), inner)
    ),
    max_leaves=20,
)


@given(_JSON)
def test_any_value_is_looked_at(value: Any) -> None:
    """Nothing but the refusal is raised, also for what only engines' own parser reads."""
    data = json.dumps(value).encode()
    try:
        check_media({"messages": msgspec.Raw(data)}, OFF)
    except BadRequestError:
        assert b"url" in data or b"\\u00" in data or b"://" in data


def test_deep_values_are_refused_or_read() -> None:
    deep = b"[" * 5000 + b'"url"' + b"]" * 5000
    with pytest.raises(BadRequestError):
        check_media({"messages": msgspec.Raw(deep)}, OFF)


@pytest.mark.parametrize(
    ("media", "wrong"),
    [
        (MediaSettings(), None),
        (MediaSettings(urls="hosts", hosts=("Images.Example",)), None),
        (MediaSettings(urls="hosts"), "media.hosts: expected at least one"),
        (MediaSettings(hosts=("a",)), "media.hosts: has no effect"),
    ],
)
def test_the_settings(media: MediaSettings, wrong: str | None) -> None:
    found = Mistakes()
    crosscheck(Settings(media=media), found, need_engines=False)
    if wrong is None:
        found.raise_any()
        assert media.rule.hosts in ((), ("images.example",))
        return
    with pytest.raises(SettingsError, match=wrong):
        found.raise_any()
