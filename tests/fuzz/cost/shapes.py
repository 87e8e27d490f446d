"""What inputs are made of, by kind: named recipes of what has been costly, and the grammars that
search from there.
"""

from __future__ import annotations

from tests.fuzz.cost.recipes import Grammar, Recipe, many, nested, recipe

_PROMPT = '"model":"m","prompt":"x"'
_CHAT = '"model":"m","messages":[{"role":"user","content":"x"}]'

BODIES: dict[str, Recipe] = {
    "a plain prompt": recipe('{"model":"m","prompt":"', many("a"), '"}'),
    "a plain chat": recipe('{"model":"m","messages":[{"role":"user","content":"', many("a"),
    '"}]}'),
    "prompts of a letter": recipe('{"model":"m","prompt":[', many('"a",'), "]}"),
    "prompts of an id": recipe('{"model":"m","prompt":[', many("[1],"), "]}"),
    "empty prompts": recipe('{"model":"m","prompt":[', many('"",'), "]}"),
    "token ids": recipe('{"model":"m","prompt":[', many("1,"), "]}"),
    "a number of many digits": recipe('{"model":"m","prompt":[', many("1"), "]}"),
    "top-level keys": recipe("{" + _PROMPT + ",", many('"k@@":0,'), "}"),
    "one key many times": recipe("{" + _PROMPT + ",", many('"k":0,'), "}"),
    "arrays in response_format": recipe("{" + _CHAT + ',"response_format":[', many("[],"), "]}"),
    "objects in response_format": recipe("{" + _CHAT + ',"response_format":[', many("{},"), "]}"),
    "numbers in structured_outputs": recipe("{" + _PROMPT + ',"structured_outputs":[', many("0,"),
    "]}"),
    "brackets in a text": recipe("{" + _PROMPT + ',"structured_outputs":"', many("["), '"}'),
    "empty messages": recipe('{"model":"m","messages":[', many("{},"), "]}"),
    "short messages": recipe('{"model":"m","messages":[', many('{"role":"user","content":"a"},'),
    "]}"),
    "short conversations": recipe('{"model":"m","messages":[',
    many('[{"role":"user","content":"a"}],'), "]}"),
    "empty conversations": recipe('{"model":"m","messages":[', many("[{}],"), "]}"),
    "numbers as conversations": recipe('{"model":"m","messages":[', many("[1],"), "]}"),
    "NaN in conversations": recipe('{"model":"m","messages":[', many('[{"x":NaN}],'), "]}"),
    "content parts": recipe(
        '{"model":"m","messages":[{"role":"user","content":[', many('{"type":"text","text":"a"},'),
        "]}]}"
    ),
    "empty content parts": recipe('{"model":"m","messages":[{"role":"user","content":[',
    many("{},"), "]}]}"),
    "media": recipe(
        '{"model":"m","max_tokens":1,"messages":[{"role":"user","content":[',
        many('{"type":"image_url","image_url":"data:"},'), "]}]}"
    ),
    "input items": recipe('{"model":"m","input":[', many('{"content":0},'), "]}"),
    "blocks": recipe(
        '{"model":"m","max_tokens":1,"messages":[{"content":[', many('{"type":"text"},'), "]}]}"
    ),
    "results in results": nested(
        '{"model":"m","max_tokens":1,"messages":[{"content":',
        '[{"type":"tool_result","content":', "0", "}]", "}]}"
    ),
    "NaN": recipe("{" + _PROMPT + ',"x":[', many("NaN,"), "]}"),
    "one NaN in a long text": recipe('{"model":"m","x":NaN,"prompt":"', many("a"), '"}'),
    "UTF-16": recipe("{" + _PROMPT + ',"x":[', many("0,"), "]}", encoding="utf-16"),
    "UTF-16 of a long text": recipe('{"model":"m","prompt":"', many("a"), '"}', encoding="utf-16"),
    "UTF-16 of letters beyond ASCII": recipe('{"model":"m","prompt":"', many("\u4e2d"), '"}',
    encoding="utf-16"),
    "UTF-32 of keys": recipe("{" + _PROMPT + ",", many('"k@@":0,'), "}", encoding="utf-32"),
    "a byte order mark": recipe("{" + _PROMPT + ',"x":[', many("[],"), "]}", encoding="utf-8-sig"),
    "a byte order mark before objects": recipe("{" + _PROMPT + ',"x":[', many('{"content":[{}]},'),
    "]}", encoding="utf-8-sig"),
    "half surrogates": recipe("{" + _PROMPT + ',"x":"', many("\\ud800"), '"}'),
    "escapes": recipe('{"model":"m","prompt":"', many("\\u0061"), '"}'),
    "letters beyond ASCII": recipe('{"model":"m","prompt":"', many("\u4e2d"), '"}'),
    "keys of vllm_xargs": recipe("{" + _PROMPT + ',"vllm_xargs":{', many('"k@@":0,'), "}}"),
    "objects in vllm_xargs": recipe("{" + _PROMPT + ',"vllm_xargs":{"a":[', many("{},"), "]}}"),
    "keys of extra_args": recipe(
        "{" + _PROMPT + ',"sampling_params":{"extra_args":{', many('"k@@":0,'), "}}}"
    ),
    "arrays in each other": nested('{"model":"m","prompt":', "[", "1", "]", "}"),
    "objects in each other": nested("{" + _PROMPT + ',"x":', '{"a":', "1", "}", "}"),
    "arrays never closed": recipe('{"model":"m","prompt":', many("[")),
    "a long model": recipe('{"prompt":"x","model":"', many("m"), '"}'),
    "a model of control characters": recipe('{"prompt":"x","model":"', many("\\u0001"), '"}'),
    "a long request_id": recipe("{" + _PROMPT + ',"request_id":"', many("r"), '"}'),
    "blanks": recipe("{" + _PROMPT, many(" "), "}"),
    "inputs of embeddings": recipe('{"model":"m","input":[', many('"a",'), "]}"),
    "a list at the top": recipe("[", many("0,"), "]"),
    "a text at the top": recipe('"', many("/a.a"), '"'),
}  # fmt: skip
"""Bodies of clients: known to have cost much, or to be like those."""

NAMES = {
    name: one
    for name, one in BODIES.items()
    if "model" in name or "request_id" in name or "at the top" in name
}
"""Those of which a log line might show something."""

UNITS = (
    '"a",', "1,", "{},", "[],", "null,", "true,", "NaN,", "1e5,", "-0.0,", '"\u4e2d",',
    '"\\u0041",', '"\\ud800",', '"",',
    f'"k{"@@"}":1,', '"k":{},', '{"role":"user","content":"a"},', '{"type":"text","text":"a"},',
    '{"a":1},', "[1],", "[[]],",
    '{"content":[]},', '{"content":[{}]},', '"kv_transfer_params":{},', '"vllm_xargs":{},',
    "123456789,", " ", "\n", "a",
)  # fmt: skip
WORDS = (
    "NaN", "\\ud800", "\u4e2d", '"', "\\", "[", "]", "{", "}", ",", ":", "0", "1e999",
    '"kv_transfer_params":{},', '"stream":true,',    '"n":2,', '"echo":true,', '"logprobs":1,',
    '"store":false,',
    '"stream_options":{"include_usage":true},', '"prompt_embeds":"x",',
)  # fmt: skip
PAIRS = (("[", "]"), ('{"a":', "}"), ('[{"a":', "}]"), ('{"content":[', "]}"), ("[[", "]]"))

_SMALL = (
    recipe('{"model":"m","prompt":["a","b"],"max_tokens":1,"stream":true}'),
    recipe('{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"x"}]}],'
        '"tools":[{"a":1}]}'),
    recipe("{" + _CHAT + ',"response_format":{"type":"json_schema","json_schema":{"a":1}},'
        '"logprobs":'
        'true,'
        '"top_logprobs":1}'),
    recipe("{" + _PROMPT + ',"vllm_xargs":{"a":1},"sampling_params":{"extra_args":{"a":[1]}},'
        '"logit_bias":'
        '{"1":'
        '2}'
        '}'),
    recipe('{"model":"m","input":[{"role":"user","content":"x"}],"store":false,"metadata":{"a":"b"}'
        '}'),
)  # fmt: skip
BODY = Grammar((*BODIES.values(), *_SMALL), UNITS, PAIRS, WORDS)

_EVENT = (
    'data: {"id":"c","object":"o","created":1,"model":"m","choices":[{"index":0,"text":"a",'
    '"logprobs":null,'
)
_EVENT += '"finish_reason":null,"stop_reason":null,"token_ids":[1]}]}\n\n'
_LAST = 'data: {"id":"c","choices":[{"index":0,"text":"a","finish_reason":"stop"}]}\n\n'
_USAGE = (
    'data: {"id":"c","choices":[],"usage":{"prompt_tokens":1,"total_tokens":2,'
    '"completion_tokens":1}}\n\n'
)
_DONE = "data: [DONE]\n\n"

STREAMS: dict[str, Recipe] = {
    "plain events": recipe(many(_EVENT), _LAST, _USAGE, _DONE),
    "an event without an end": recipe(_EVENT, 'data: {"id":"', many("a")),
    "tiny events": recipe(_EVENT, many("data: {}\n\n"), _DONE),
    "comments": recipe(many(": a\n\n"), _EVENT, _DONE),
    "comments behind data": recipe(_EVENT, many(":\n\n"), _DONE),
    "line feeds": recipe(_EVENT, many("\n"), _DONE),
    "lines of one event": recipe(_EVENT, many("data: 1\n"), "\n", _DONE),
    "ends of choices": recipe(_EVENT, many(_LAST), _DONE),
    "usages": recipe(_EVENT, many(_USAGE), _DONE),
    "spaced events": recipe(many(_EVENT.replace('":', '": ')), _DONE),
    "spaces in an event": recipe('data: {"id": "c","choices":[{"text":"a"', many(" "), "}]}\n\n",
    _DONE),
    "quotes in a spaced event": recipe('data: {"id": "c","choices":[{"text":"', many('\\"'),
    '"}]}\n\n', _DONE),
    "bare quotes in a spaced event": recipe('data: {"id": "c","choices":[{"text":"', many('"'),
    '"}]}\n\n', _DONE),
    "token ids of one event": recipe(_EVENT.replace("[1]", "["), many("1,"), "1]}]}\n\n", _DONE),
    "lists of token ids": recipe(_EVENT, 'data: {"id":"c","choices":[', many('{"token_ids":[1]},'),
    "]}\n\n", _DONE),
    "logprobs": recipe(_EVENT,
    many('data: {"id":"c","choices":[{"text":"a","logprobs":{"@@":[1]},"finish_reason":null}]}\n\n'
        '')),
    "carriage returns": recipe(_EVENT, many("data: 1\r\n\r\n"), _DONE),
    "data behind blanks": recipe(_EVENT, "data:", many(" "), '{"id":"c"}\n\n', _DONE),
    ("opening chunks of a "
     "chat"): recipe(many('data: {"id":"c","choices":[{"delta":{"role":"assistant"}}]}\n\n'),
     _EVENT, _DONE),
    "all in one event": recipe('data: {"id":"c","choices":[{"index":0,"text":"', many("a"),
    '","finish_reason":null}]}\n\n'),
}  # fmt: skip
"""Streams of an engine: the bytes behind its head, unframed."""
STREAM = Grammar(
    tuple(STREAMS.values()),
    (_EVENT, _LAST, _USAGE, "data: {}\n\n", "data: 1\n", ":\n\n", "\n", " ", "a", "data: [1]\n\n",
    "1,", "event: x\n", "\r\n"),
    (("[", "]"), ('{"a":', "}")),
    ("data: ", "\n\n", "\r", '"finish_reason":"abort"', '"token_ids":[', "]", '{"error":', "[DONE]",
    '"sequence_number": 1'),
)  # fmt: skip

_HEAD = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ANSWERS: dict[str, Recipe] = {
    "a plain answer": recipe("HTTP/1.1 200 OK\r\n\r\n", many("a")),
    "chunks of a byte": recipe(_HEAD, many("1\r\na\r\n")),
    "chunks of an event": recipe(_HEAD, many(f"{len(_EVENT):x}\r\n{_EVENT}\r\n"), "e\r\n", _DONE,
    "\r\n0\r\n\r\n"),
    "chunks of a tiny event": recipe(_HEAD, f"{len(_EVENT):x}\r\n{_EVENT}\r\n",
    many("a\r\ndata: {}\n\n\r\n")),
    "a header without an end": recipe("HTTP/1.1 200 OK\r\nx: ", many("a")),
    "headers without an end": recipe("HTTP/1.1 200 OK\r\n", many("a: b\r\n")),
    "trailers": recipe(_HEAD, "1\r\na\r\n0\r\n", many("a: b\r\n"), "\r\n"),
    "a size line without an end": recipe(_HEAD, "1;", many("a")),
    "answers before the answer": recipe(many("HTTP/1.1 100 Continue\r\n\r\n"),
    "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"),
}  # fmt: skip
"""Answers of an engine as they are on the wire."""
ANSWER = Grammar(
    tuple(ANSWERS.values()),
    (
        "1\r\na\r\n",
        "a: b\r\n",
        "a",
        "\r\n",
        "a\r\ndata: {}\n\n\r\n",
        "HTTP/1.1 100 Continue\r\n\r\n",
        " ",
        "0",
        "@@: b\r\n",
    ),
    (),
    (
        "\r\n",
        "0\r\n\r\n",
        "HTTP/1.1 204 No\r\n\r\n",
        "content-length: 0\r\n",
        "connection: close\r\n",
        ";",
    ),
    json=False,
)

_GET = "GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
_POST = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
_PASS = _POST.replace("completions", "embeddings")
REQUESTS: dict[str, Recipe] = {
    "a plain body": recipe(_POST, "content-length: 90000000\r\n\r\n", many("a")),
    "a plain body, passed": recipe(_PASS, "content-length: 90000000\r\n\r\n", many("a")),
    "chunks of a byte": recipe(_POST, "transfer-encoding: chunked\r\n\r\n", many("1\r\na\r\n"),
    "0\r\n\r\n"),
    "chunks of a byte, passed": recipe(_PASS, "transfer-encoding: chunked\r\n\r\n",
    many("1\r\na\r\n"), "0\r\n\r\n"),
    "chunks of 64 bytes": recipe(_POST, "transfer-encoding: chunked\r\n\r\n",
    many("40\r\n" + "a" * 64 + "\r\n"), "0\r\n\r\n"),
    "extensions of chunks": recipe(_POST, "transfer-encoding: chunked\r\n\r\n",
    many("1;a=b\r\na\r\n"), "0\r\n\r\n"),
    "a header without an end": recipe("GET / HTTP/1.1\r\nhost: x\r\nx: ", many("a")),
    "headers without an end": recipe("GET / HTTP/1.1\r\nhost: x\r\n", many("a: b\r\n")),
    "a target without an end": recipe("GET /", many("a")),
    "requests in a row": recipe(many(_GET)),
    "generating requests in a row": recipe(many(_POST + "content-length: 2\r\n\r\n{}")),
    "empty lines": recipe(many("\r\n"), _GET),
    "a body of a route without one": recipe(_GET[:-2] + "content-length: 90000000\r\n\r\n",
    many("a")),
    "heads of many headers": recipe(_GET[:-2], many("a: b\r\n"), "\r\n"),
    "percent signs": recipe("POST /v1/", many("%63"), " HTTP/1.1\r\nhost: x\r\n\r\n"),
    "percent signs alone": recipe("POST /v1/", many("%%"), " HTTP/1.1\r\nhost: x\r\n\r\n"),
    ("targets of percent "
     "signs"): recipe(many("GET /v1/" + "%%" * 250 + " HTTP/1.1\r\nhost: x\r\n\r\n")),
}  # fmt: skip
"""What a client sends on a connection."""
REQUEST = Grammar(
    tuple(REQUESTS.values()),
    ("1\r\na\r\n", "a: b\r\n", "a", "\r\n", _GET, "%63", "1;a=b\r\na\r\n",
    _POST + "content-length: 0\r\n\r\n", "host: x\r\n"),
    (),
    ("\r\n", "0\r\n\r\n", "connection: close\r\n", "expect: 100-continue\r\n",
    "content-length: 0\r\n", "GET ", "x-request-id: "),
    json=False,
)  # fmt: skip

_PART = '--x\r\nContent-Disposition: form-data; name="@"\r\n\r\n'
_FILE = '--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
_FORM_END = "\r\n--x--\r\n"
_ARGUMENTS = _PART.replace("@", "vllm_xargs")
FORMS: dict[str, Recipe] = {
    "a plain file": recipe(_FILE, many("a"), _FORM_END),
    "a file of dashes": recipe(_FILE, many("-"), _FORM_END),
    "a file of lines": recipe(_FILE, many("\r\n--"), _FORM_END),
    "a file without an end": recipe(_FILE, many("\r\n-")),
    "boundaries in lines": recipe(_FILE, many("--x"), _FORM_END),
    "parts": recipe(many(_PART.replace("@", "a[]") + "\r\n"), "--x--\r\n"),
    "parts without a content": recipe(many(_PART.replace("@", "a[]"))),
    "boundaries": recipe(many("--x\r\n")),
    "a head without an end": recipe("--x\r\na: ", many("a")),
    "lines of a head": recipe("--x\r\n", many("a: b\r\n"), "\r\nv", _FORM_END),
    "parameters": recipe("--x\r\nContent-Disposition: form-data", many("; name=a"), "\r\n\r\nv",
    _FORM_END),
    "quotes": recipe("--x\r\nContent-Disposition: form-data; name=", many('"'), "\r\n\r\nv",
    _FORM_END),
    "a long field": recipe(_PART.replace("@", "prompt"), many("a"), _FORM_END),
    "a long model": recipe(_PART.replace("@", "model"), many("a"), _FORM_END),
    "a long number": recipe(_PART.replace("@", "max_completion_tokens"), many("9"), _FORM_END),
    "keys of vllm_xargs": recipe(_ARGUMENTS + "{", many('"k@@":0,'), "}", _FORM_END),
    "arrays in vllm_xargs": nested(_ARGUMENTS, "[", "1", "]", _FORM_END),
}  # fmt: skip
"""Forms with the boundary x."""
FORM = Grammar(
    tuple(FORMS.values()),
    ("a", "-", "\r\n", "--x", "\r\n--", "a: b\r\n", '"', "; name=a", _PART, _FILE, "\\"),
    (),
    ("\r\n", "--x\r\n", _FORM_END, _PART, "filename=", "name=", ";", "\0"),
    json=False,
)

JSON_ANSWERS: dict[str, Recipe] = {
    "a plain completion": recipe('{"id":"c","choices":[{"index":0,"text":"', many("a"),
    '"}],"usage":{"prompt_tokens":1}}'),
    "choices": recipe('{"choices":[', many("{},"), '],"kv_transfer_params":{"a":1}}'),
    "keys": recipe("{", many('"k@@":0,'), "}"),
    "a long handle": recipe('{"kv_transfer_params":{"remote_block_ids":[[', many("1,"),
    ']]},"choices":[]}'),
    "a handle of keys": recipe('{"kv_transfer_params":{', many('"k@@":0,'), '},"choices":[]}'),
    "deep": nested('{"kv_transfer_params":', "[", "1", "]", "}"),
    "an error": recipe('{"error":{"message":"', many("a"), '","type":"x","code":400}}'),
    "an error of lines": recipe('{"error":{"message":"x","type":"x","code":400},"x":[',
    many("\n1,"), "]}"),
    "cached tokens": recipe('{"usage":{', many('"cached_tokens":1,'), '"a":1}}'),
    "usage of keys": recipe('{"choices":[],"usage":{', many('"k@@":1,'), "}}"),
}  # fmt: skip
"""Whole answers of an engine, without their head."""
JSON_ANSWER = Grammar(tuple(JSON_ANSWERS.values()), UNITS, PAIRS, WORDS)

_LINE = 'vllm:prompt_tokens_by_source_total{source="a@@",model_name="m"} 1.0\n'
PAGES: dict[str, Recipe] = {
    "a plain page": recipe(
        many('vllm:something_total{engine="0",model_name="m"} 1.0\n'),
        "vllm:num_requests_running 1.0\n",
    ),
    "lines that are read": recipe(many(_LINE)),
    "one line that is read": recipe(
        "vllm:prompt_tokens_by_source_total{", many('a@@="b",'), "} 1.0\n"
    ),
    "a label without an end": recipe(
        'vllm:prompt_tokens_by_source_total{source="', many("a"), '"} 1.0\n'
    ),
    "escapes in a label": recipe('vllm:cache_config_info{block_size="', many('\\"'), '"} 1.0\n'),
    "lines that are nearly read": recipe(many("vllm:num_requests_running_\n")),
    "line feeds": recipe(many("\n")),
}
"""An engine's /metrics."""
PAGE = Grammar(
    tuple(PAGES.values()),
    (
        _LINE,
        'a="b",',
        "vllm:num_requests_running 1\n",
        'vllm:cache_config_info{a="b"} 1\n',
        "\n",
        "a",
        "# HELP a b\n",
        " ",
        "\\\\",
    ),
    (),
    ("{", "}", '"', "\\", "\n", "vllm:num_requests_waiting 1\n", "NaN", ","),
    json=False,
)

_STORED = '{"event":"request_store_finished","world_size":1,"kv_rank":0,"request_ids_set":['
TELEMETRY_POSTS: dict[str, Recipe] = {
    "stored": recipe(_STORED, many('"cmpl-a-0-01234567",'), "]}"),
    "short names": recipe(_STORED, many('"a",'), "]}"),
    "other keys": recipe(_STORED, "],", many('"k@@":0,'), "}"),
    "one long name": recipe(_STORED, '"cmpl-', many("-0"), '"]}'),
}
TELEMETRY = Grammar(tuple(TELEMETRY_POSTS.values()), (*UNITS, '"cmpl-a-0-01234567",'), PAIRS, WORDS)

NOTICES: dict[str, Recipe] = {
    "a handle": recipe('{"remote_block_ids":[[', many("1,"), "]]}"),
    "a handle of keys": recipe("{", many('"k@@":0,'), "}"),
    "a deep handle": nested('{"a":', "[", "1", "]", "}"),
    "ids": recipe("[", many("1,"), "]"),
    # Msgpack: 81 begins a map of one pair, a1 a text of one byte, 91 an array of one, dd and df
    # arrays and maps of any length.
    "arrays in each other": recipe(b"\x81\xa1a", many(b"\x91"), b"\x01"),
    "maps": recipe(b"\x81\xa1a\xdd\x00\x0e\x00\x00", many(b"\x80")),
    "texts": recipe(b"\x81\xa1a\xdd\x00\x07\x00\x00", many(b"\xa1a")),
    "keys": recipe(b"\xdf\x00\x04\x00\x00", many(b"\xa1a\x01")),
}
"""Messages of engines over ZMQ; JSON is the handle or the ids in one."""
NOTICE = Grammar(
    tuple(NOTICES.values()),
    ("\x01", "\x11", "a", "1,", "[],", "{},", '"k@@":0,'),
    PAIRS,
    ("\x00", "\x01", "a", "]", "}"),
)
