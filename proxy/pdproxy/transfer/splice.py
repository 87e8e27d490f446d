"""Makes one answer of two engines': the prefill engine's first token, then the decode engine's
completion.

Owns the state of one such answer: whether its opening has been sent. The decode engine gets a
completion whose prompt ends with the first token. The client gets the same answer as from one
engine that served its own request: a chat if it was one, with the token in the text, in the ids and
in the usage. Source of the shapes: vLLM 0.32.0 `entrypoints/openai/*`.
"""

from __future__ import annotations

import msgspec

from pdproxy.transfer.chat_chunks import (
    NULL,
    NotACompletionError,
    body_decoder,
    chat_choice,
    choices_decoder,
    moved_usage,
)
from pdproxy.transfer.contract import FirstToken, Handle, raw
from pdproxy.wire.engine import UNREADABLE, Usage
from pdproxy.wire.fields import Fields
from pdproxy.wire.request import Parsed
from pdproxy.wire.route import Route

_TRUE = b"true"
_NO_DETAILS = b',"completion_tokens_details":null}'
_counts_decoder = msgspec.json.Decoder(Usage)
_text_decoder = msgspec.json.Decoder(str | None)


def _without_nulls(value: object) -> object:
    """Return an object of a whole answer in the form of streams: without fields that are null, at
    every level.
    """
    if not isinstance(value, dict):
        return value
    return {name: _without_nulls(item) for name, item in value.items() if item is not None}


class Splice:
    """Rewrites the decode engine's completion as the client's answer. The answer's id contains
    `request_id`.
    """

    def __init__(self, parsed: Parsed, given: Handle, request_id: str) -> None:
        assert given.first is not None
        self._first: FirstToken = given.first
        self._prompt_ids = given.token_ids or b"[]"
        self._is_chat = parsed.route is Route.CHAT
        self._wants_ids = (
            parsed.adds_ids or bytes(parsed.fields.get("return_token_ids", NULL)) == _TRUE
        )
        prefix = "chatcmpl-" if self._is_chat else "cmpl-"
        self._id = raw(msgspec.json.encode(prefix + request_id))
        self._opened = False

    def events(self, payload: bytes) -> list[bytes]:
        """Return the client's events (JSON) for one of the decode engine's. The first of them are
        preceded by the opening.

        Raises:
            NotACompletionError: it is no event of a completion.
        """
        try:
            return self._events(body_decoder.decode(payload))
        except UNREADABLE as error:
            raise NotACompletionError(str(error)) from None

    def whole(self, body: bytes) -> bytes:
        """Return the client's whole answer from the decode engine's.

        Raises:
            NotACompletionError: it is no completion.
        """
        try:
            return self._whole(body_decoder.decode(body), behind=True)
        except (*UNREADABLE, KeyError) as error:
            raise NotACompletionError(str(error)) from None

    # -- if the first token is also the last

    def finished_events(self, body: bytes) -> list[bytes]:
        """Return the prefill engine's whole answer as the events (JSON) of a stream, with its usage
        at the end.

        Raises:
            NotACompletionError: it is no completion.
        """
        try:
            answer = body_decoder.decode(body)
            choice = choices_decoder.decode(answer["choices"])[0]
            top: Fields = {"id": self._id, "object": self._object(chunk=True)}
            top |= {name: answer[name] for name in ("created", "model")}
            events = self._opening(top, choice, self._first)
            usage = raw(msgspec.json.encode(_without_nulls(msgspec.json.decode(answer["usage"]))))
            end = top | {"choices": raw(b"[]"), "usage": usage}
            if "system_fingerprint" in answer:
                end["system_fingerprint"] = answer["system_fingerprint"]
            return [*events, msgspec.json.encode(end)]
        except (*UNREADABLE, KeyError, IndexError) as error:
            raise NotACompletionError(str(error)) from None

    def finished_whole(self, body: bytes) -> bytes:
        """Return the client's whole answer from the prefill engine's.

        Raises:
            NotACompletionError: it is no completion.
        """
        try:
            return self._whole(body_decoder.decode(body), behind=False)
        except (*UNREADABLE, KeyError) as error:
            raise NotACompletionError(str(error)) from None

    # -- events

    def _object(self, *, chunk: bool) -> msgspec.Raw:
        if not self._is_chat:
            return raw(b'"text_completion"')
        return raw(b'"chat.completion.chunk"' if chunk else b'"chat.completion"')

    def _events(self, event: Fields) -> list[bytes]:
        if "choices" not in event:
            return [msgspec.json.encode(event)]  # an error: the relay handles it
        event["id"], event["object"] = self._id, self._object(chunk=True)
        choices = choices_decoder.decode(event["choices"])
        prompt_tokens = None
        if bytes(event.get("usage", NULL)) != b"null":
            prompt_tokens = _counts_decoder.decode(event["usage"]).prompt_tokens - 1
            event["usage"] = self._usage(event["usage"], running=bool(choices))
        opening: list[bytes] = []
        if not self._opened and choices:
            top = {name: value for name, value in event.items() if name not in ("choices", "usage")}
            first = msgspec.structs.replace(self._first, finish_reason=None)
            opening = self._opening(top, choices[0], first, prompt_tokens)
        if choices:
            event["choices"] = raw(
                msgspec.json.encode([self._choice(choice) for choice in choices])
            )
        return [*opening, msgspec.json.encode(event)]

    def _opening(
        self, top: Fields, like: Fields, first: FirstToken, prompt_tokens: int | None = None
    ) -> list[bytes]:
        """Return the events up to the first token. `top`: the fields of all events, `like`: a
        choice of the same stream.

        `prompt_tokens`: for the usage of each event, None if only the stream's end has one.
        """
        self._opened = True
        index = like.get("index", raw(b"0"))
        prompt_ids = raw(self._prompt_ids) if self._wants_ids else NULL
        ids = raw(b"[%d]" % first.id) if self._wants_ids else NULL
        finish = raw(msgspec.json.encode(first.finish_reason))
        text = raw(msgspec.json.encode(first.text))
        if not self._is_chat:
            choice: Fields = {
                "index": index,
                "text": text,
                "logprobs": NULL,
                "finish_reason": finish,
            }
            choice["stop_reason"] = raw(first.stop_reason)
            choice |= {"prompt_token_ids": prompt_ids, "token_ids": ids}
            return [msgspec.json.encode(top | self._with_usage(choice, prompt_tokens, 1))]
        choice = {"index": index, "delta": raw(b'{"role":"assistant","content":""}')}
        choice |= {"logprobs": NULL, "finish_reason": NULL}
        role = top | self._with_usage(choice, prompt_tokens, 0)
        role |= {"prompt_token_ids": prompt_ids, "prompt_text": NULL}
        choice = {"index": index, "delta": raw(b'{"content":' + bytes(text) + b"}")}
        choice |= {"logprobs": NULL, "finish_reason": finish}
        if first.finish_reason is not None:
            choice["stop_reason"] = raw(first.stop_reason)
        choice["token_ids"] = ids
        return [
            msgspec.json.encode(role),
            msgspec.json.encode(top | self._with_usage(choice, prompt_tokens, 1)),
        ]

    def _with_usage(
        self, choice: Fields, prompt_tokens: int | None, completion_tokens: int
    ) -> Fields:
        """Return an event's choices, and its usage if each event has one (`prompt_tokens` is not
        None).
        """
        found: Fields = {"choices": raw(msgspec.json.encode([choice]))}
        if prompt_tokens is not None:
            total = prompt_tokens + completion_tokens
            usage = b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d' % (
                prompt_tokens,
                total,
                completion_tokens,
            )
            found["usage"] = raw(usage + (_NO_DETAILS if self._is_chat else b"}"))
        return found

    def _choice(self, choice: Fields) -> Fields:
        """Return one choice of an event after the opening."""
        if "prompt_token_ids" in choice:
            choice["prompt_token_ids"] = NULL  # the opening has them
        return chat_choice(choice) if self._is_chat else choice

    def _usage(self, usage_json: msgspec.Raw, *, running: bool = False) -> msgspec.Raw:
        """Return the usage as one engine would count it: the first token belongs to the answer, not
        to the prompt.

        `running`: it is that of an event with a choice.
        """
        return moved_usage(usage_json, 1, of_chat_event=running and self._is_chat)

    # -- whole answers

    def _whole(self, answer: Fields, *, behind: bool) -> bytes:
        answer["id"], answer["object"] = self._id, self._object(chunk=False)
        choices = choices_decoder.decode(answer["choices"])
        answer["choices"] = raw(
            msgspec.json.encode([self._whole_choice(choice, behind=behind) for choice in choices])
        )
        answer["kv_transfer_params"] = NULL
        if behind:
            answer["usage"] = self._usage(answer["usage"])
        if not self._is_chat:
            return msgspec.json.encode(answer)
        found: Fields = {
            name: answer[name]
            for name in ("id", "object", "created", "model", "choices")
            if name in answer
        }
        found |= {
            name: answer[name]
            for name in ("service_tier", "system_fingerprint", "usage")
            if name in answer
        }
        prompt_ids = raw(self._prompt_ids) if self._wants_ids else NULL
        found |= {"prompt_logprobs": NULL, "prompt_token_ids": prompt_ids, "prompt_text": NULL}
        return msgspec.json.encode(
            found | {name: value for name, value in answer.items() if name not in found}
        )

    def _whole_choice(self, choice: Fields, *, behind: bool) -> Fields:
        text = _text_decoder.decode(choice.get("text", NULL)) or ""
        ids = bytes(choice.get("token_ids", NULL)) if self._wants_ids else b"null"
        if behind:
            text = self._first.text + text
            if ids.startswith(b"["):
                ids = b"[%d" % self._first.id + (b"," if ids.strip(b"[] ") else b"") + ids[1:]
        elif self._wants_ids:
            ids = b"[%d]" % self._first.id
        choice["token_ids"] = raw(ids)
        if not self._is_chat:
            choice["text"] = raw(msgspec.json.encode(text))
            choice["prompt_token_ids"] = raw(self._prompt_ids) if self._wants_ids else NULL
            return choice
        message = {
            "role": "assistant",
            "content": text,
            "refusal": None,
            "annotations": None,
            "audio": None,
        }
        message |= {"function_call": None, "reasoning": None}
        found: Fields = {
            "index": choice["index"],
            "message": raw(msgspec.json.encode(message)),
            "logprobs": NULL,
        }
        for name in ("finish_reason", "stop_reason", "token_ids", "routed_experts"):
            found[name] = choice.get(name, NULL)
        return found
