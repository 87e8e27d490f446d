"""The comparator sees what it is there for, and nothing else."""

import json
from dataclasses import replace

import pytest

from tests.sim.recordings.reading import names, read, read_all
from tests.sim.shape import Seen, differences


def recorded(name):
    return read(name).answer


def unlike(wanted, got, **more):
    return differences(wanted, got, block_size=32, **more)


def changed(answer, **fields):
    """A recorded JSON answer with top-level fields changed; its length is put right."""
    body = json.dumps({**answer.json, **fields}, ensure_ascii=False, separators=(",", ":")).encode()
    return with_body(answer, body)


def with_body(answer, body):
    return replace(answer, body=body, headers={**answer.headers, "content-length": str(len(body))})


def choice(answer, **fields):
    return changed(answer, choices=[{**answer.json["choices"][0], **fields}])


WHOLE = recorded("pd01_P_completion_nonstream")
WITH_IDS = recorded("pd05_P_completion_tokenids_prompt")
USAGE = WHOLE.json["usage"]
HANDLE = WHOLE.json["kv_transfer_params"]


@pytest.mark.parametrize(
    "name", [name for name in names() if name.startswith(("agg", "err", "misc", "pd"))]
)
def test_each_recording_is_like_itself(name):
    answer = recorded(name)
    if "models" in name:  # edited: a path in them is shorter than it was
        answer = with_body(answer, answer.body)
    assert not unlike(answer, answer)


def test_sequences_are_like_themselves():
    assert all(not unlike(one.answer, one.answer) for one in read_all("connector_notify_01"))


@pytest.mark.parametrize(
    "got",
    [
        choice(WHOLE, text="something else"),
        changed(WHOLE, id="cmpl-0000000000000000", created=1),
        changed(WHOLE, system_fingerprint="vllm-0.32.0-00000000"),
        replace(WHOLE, headers={**WHOLE.headers, "date": "Mon, 01 Jan 2024 00:00:00 GMT"}),
        changed(
            WHOLE, kv_transfer_params=HANDLE | {"remote_block_ids": [[7, 8]], "remote_port": 1}
        ),
        changed(
            WHOLE,
            usage=USAGE | {"prompt_tokens": 40, "total_tokens": 41},
            kv_transfer_params=HANDLE | {"remote_num_tokens": 40},
        ),
    ],
)
def test_words_ids_times_and_counts_of_prompt_tokens_are_free(got):
    assert not unlike(WHOLE, got)


@pytest.mark.parametrize(
    ("got", "named"),
    [
        (replace(WHOLE, status=201), "status"),
        (replace(WHOLE, line="HTTP/1.1 200 Okay"), "first line"),
        (replace(WHOLE, headers=dict(reversed(WHOLE.headers.items()))), "headers: keys"),
        (replace(WHOLE, headers={**WHOLE.headers, "content-type": "text/json"}), "content-type"),
        (replace(WHOLE, headers={**WHOLE.headers, "content-length": "3"}), "content-length"),
        (replace(WHOLE, headers={**WHOLE.headers, "date": "today"}), "date"),
        (changed(WHOLE, metrics=0), "metrics"),
        (changed(WHOLE, more=None), "keys"),
        (with_body(WHOLE, json.dumps(WHOLE.json).encode()), "compact"),
        (changed(WHOLE, model="other"), "model"),
        (changed(WHOLE, id="cmpl-1"), "id"),
        (changed(WHOLE, created=1.5), "created"),
        (choice(WHOLE, text=None), "text"),
        (choice(WHOLE, index=False), "index"),
        (choice(WHOLE, finish_reason="stop"), "finish_reason"),
        (choice(WHOLE, token_ids=[]), "token_ids"),
        (choice(WITH_IDS, token_ids=[1, 2]), "token_ids"),
        (changed(WHOLE, choices=WHOLE.json["choices"] * 2), "choices"),
        (
            changed(WHOLE, usage=USAGE | {"completion_tokens": 2, "total_tokens": 63}),
            "completion_tokens",
        ),
        (changed(WHOLE, usage=USAGE | {"total_tokens": 1}), "total_tokens"),
        (changed(WHOLE, kv_transfer_params=HANDLE | {"remote_block_ids": [[1]]}), "blocks"),
        (
            changed(WHOLE, kv_transfer_params=HANDLE | {"remote_block_ids": [[1], [2]]}),
            "remote_block_ids",
        ),
        (
            changed(WHOLE, kv_transfer_params=HANDLE | {"remote_num_tokens": 60}),
            "remote_num_tokens",
        ),
        (
            changed(WHOLE, kv_transfer_params=HANDLE | {"remote_prefill_cached_tokens": 32}),
            "cached_tokens",
        ),
        (changed(WHOLE, kv_transfer_params=HANDLE | {"tp_size": 2}), "tp_size"),
    ],
)
def test_all_else_is_seen(got, named):
    wanted = WITH_IDS if got.json["choices"][0].get("prompt_token_ids") else WHOLE
    assert named in "\n".join(unlike(wanted, got))


def test_with_the_same_prompt_tokens_their_count_is_compared_too():
    got = choice(WITH_IDS, prompt_token_ids=list(range(40)))
    handle = got.json["kv_transfer_params"] | {"remote_num_tokens": 40}
    got = changed(
        got,
        usage=got.json["usage"] | {"prompt_tokens": 40, "total_tokens": 41},
        kv_transfer_params=handle,
    )
    assert not unlike(WITH_IDS, got)
    assert "prompt_tokens" in "\n".join(unlike(WITH_IDS, got, same_prompt=True))


def test_errors_are_compared_byte_for_byte():
    wanted = recorded("err_chat_max_tokens0")
    assert unlike(wanted, with_body(wanted, wanted.body.replace(b"got 0", b"got 1")))
    assert unlike(wanted, with_body(wanted, wanted.body.replace(b'":"', b'": "', 1)))


STREAM = recorded("pd10_D_chat_stream")
BROKEN = recorded("fail_P_killed_D_policy_fail_chat_stream")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"content":""', b'"content":"x"'),
        (b'"delta":{"role"', b'"delta":{"rule"'),
        (b"data: [DONE]\n\n", b""),
        (b"data: [DONE]\n\n", b"data: [DONE]"),
        (b"data: [DONE]\n\n", b"data: [DONE]\n\n: bye\n\n"),
        (b'"finish_reason":"length","stop_reason":null', b'"finish_reason":"length"'),
        (b'"usage":{', b'"usage": {'),
        (b"data: {", b"event: x\ndata: {"),
    ],
)
def test_a_streams_events_are_compared_one_by_one(old, new):
    assert old in STREAM.body
    assert unlike(STREAM, replace(STREAM, body=STREAM.body.replace(old, new)))
    events = STREAM.events
    for fewer in (events[:-1], events[1:], [events[1], events[0], *events[2:]]):
        assert unlike(STREAM, replace(STREAM, body=b"".join(fewer)))


def test_an_error_in_a_stream_is_compared_byte_for_byte():
    assert unlike(BROKEN, replace(BROKEN, body=BROKEN.body.replace(b'{"error": {', b'{"error":{')))


def test_what_is_no_stream_is_unlike_one():
    assert unlike(STREAM, WHOLE)
    assert unlike(Seen(200, b""), WHOLE)
