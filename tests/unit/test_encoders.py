"""What encoder engines are sent, and what is read of their answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdproxy.transfer.encoders import CONTRACTS, Output, body, outputs_in
from pdproxy.wire.request import Parsed, parse
from pdproxy.wire.route import Route

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


def chat(*parts: dict[str, Any], **fields: Any) -> Parsed:
    content = [{"type": "text", "text": "x"}, *parts]
    messages = [{"role": "user", "content": content}]
    return parse(Route.CHAT, json.dumps({"messages": messages, **fields}).encode())


def answer(**items: dict[str, Any]) -> bytes:
    return json.dumps({"object": "chat.completion", "ec_transfer_params": items}).encode()


def outputs(*named: str, **more: Any) -> list[Output]:
    found = outputs_in(
        answer(**{name: {"item_indices": [at]} | more for at, name in enumerate(named)}), 1
    )
    assert not isinstance(found, str)
    return found


def test_a_body_has_the_media_alone() -> None:
    """With the fields that change what media become, and no others."""
    kwargs = {"mm_processor_kwargs": {"fps": 1}, "media_io_kwargs": {"image": {}}}
    parsed = chat(
        PICTURE, SOUND, model="m/\u00e4", stream=True, temperature=1, cache_salt="s", **kwargs
    )
    assert json.loads(body(parsed, parsed.prompts[0].media, None)) == {
        "model": "m/\u00e4",
        "max_tokens": 1,
        "stream": False,
        "messages": [{"role": "user", "content": [PICTURE, SOUND]}],
        **kwargs,
    }
    sent = json.loads(body(parsed, parsed.prompts[0].media[1:], b'{"a":1}'))
    assert sent["messages"][0]["content"] == [SOUND]
    assert sent["ec_transfer_params"] == {"a": 1}


def test_outputs_are_in_the_order_of_their_media() -> None:
    """One output may be of several media, and a medium may have two."""
    twice = answer(b={"item_indices": [1]}, a={"item_indices": [0, 2]})
    found = outputs_in(twice, 3)
    assert not isinstance(found, str)
    assert [one.mm_hash for one in found] == ["a", "b", "a"]
    assert len(outputs("video", "its sound")) == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"{}", "has no ec_transfer_params"),
        (b'{"ec_transfer_params":null}', "has no ec_transfer_params"),
        (b'{"ec_transfer_params":{}}', "0 outputs for 1 media"),
        (b'{"ec_transfer_params":{"a":{}}}', "are incomplete"),
        (b'{"ec_transfer_params":{"a":{"item_indices":["0"]}}}', "are incomplete"),
        (b'{"ec_transfer_params":[]}', "are incomplete"),
        (b"<html>", "are incomplete"),
        (b"\xff", "are incomplete"),
        (answer(**{"a" * 300: {"item_indices": [0]}}), "a hash of more than 256 characters"),
        (answer(**{name: {"item_indices": [0]} for name in "abc"}), "3 outputs for 1 media"),
        (answer(a={"item_indices": [0, 1]}, b={"item_indices": [2]}), "3 places for 1 media"),
    ],
)
def test_answers_that_say_nothing_of_outputs(text: bytes, why: str) -> None:
    found = outputs_in(text, 1)
    assert isinstance(found, str)
    assert why in found


def test_what_a_consumer_is_told() -> None:
    """By files: nothing. Where it reads: the answers, of those outputs that can be read. Where it
    is sent outputs: which transfer is of which medium.
    """
    read = [*outputs("a", peer_host="10.0.0.1", peer_port=5601), *outputs("b")]
    assert CONTRACTS["example"].tells(read, ()) is None
    told = CONTRACTS["cpu"].tells(read, ())
    assert told is not None
    assert json.loads(told) == {
        "a": {"item_indices": [0], "peer_host": "10.0.0.1", "peer_port": 5601}
    }
    assert CONTRACTS["cpu"].tells(outputs("b"), ()) is None
    told = CONTRACTS["mooncake"].tells(outputs("a", "b"), ("1", "2"))
    assert told is not None
    assert json.loads(told) == {
        "ec_items": [{"mm_hash": "a", "transfer_id": "1"}, {"mm_hash": "b", "transfer_id": "2"}]
    }


def test_what_an_encoder_engine_is_asked() -> None:
    """To push to the consumer, under ids of the proxy's; otherwise nothing."""
    asked = CONTRACTS["mooncake"].asks(["1", "2"], "10.0.0.2:14579")
    assert asked is not None
    assert json.loads(asked) == {
        "consumer_zmq": "tcp://10.0.0.2:14579",
        "ec_items": [{"transfer_id": "1"}, {"transfer_id": "2"}],
    }
    assert CONTRACTS["example"].asks([], "") is None
    assert CONTRACTS["cpu"].asks([], "") is None
