"""`/v1/chat/completions`: a conversation in, a message out. Bodies and events have vLLM's bytes."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from pdproxy_lab.sim import since
from pdproxy_lab.sim.api import answer, reasoning
from pdproxy_lab.sim.api.errors import EngineRefused, RefusedRequest, response
from pdproxy_lab.sim.api.generation import Delta, LoadFailedError, SimPrompt, deltas
from pdproxy_lab.sim.api.logprobs import chat_logprobs, prompt_logprobs
from pdproxy_lab.sim.api.parsing import ChoiceParser, finish_of, looks_for_calls
from pdproxy_lab.sim.api.pictures import with_pictures
from pdproxy_lab.sim.api.protocol import ChatBody
from pdproxy_lab.sim.api.sampling import admit, check_lengths, check_prompt, sampling_params
from pdproxy_lab.sim.api.template import has_media, render
from pdproxy_lab.sim.api.tools import CallParser, calls_tools, grammar_of_calls
from pdproxy_lab.sim.engine import SimEngine
from pdproxy_lab.sim.request import SamplingParams


async def chat(
    engine: SimEngine, body: ChatBody, request: Request, date: Callable[[], str]
) -> Response:
    """Answer one request; `date` is what a template that prints the date prints.

    Raises:
        Refused, EngineDeadError, LoadFailedError: for the caller to answer.
    """
    answer.check_model(body.model, engine)
    check_lengths(body, engine.facts)
    if body.tools and body.tool_choice == "auto" and not engine.facts.enable_auto_tool_choice:
        raise RefusedRequest(
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        )
    prompt = chat_prompt(engine, body, date)
    calls = calls_tools(body, prompt.ids)
    rank = answer.rank_of(request)
    request.state.answer_id = answer.request_id("chatcmpl", request, body)
    job = _Job(engine, body, prompt, request.state.answer_id, rank=rank)
    params = sampling_params(body, prompt.ids, engine.facts, engine.tokenizer)
    grammar = partial(grammar_of_calls, body, engine.tokenizer) if calls else None
    try:
        admit(params, body, prompt.ids, engine.facts, engine.tokenizer, grammar, rank)
    except EngineRefused as error:
        if body.stream:
            return answer.streamed_refusal(error, engine.facts.version, chat=True)
        raise
    if body.stream:
        return answer.streamed(job.events(params), engine.facts.version, chat=True)
    return await job.whole(params)


def chat_prompt(engine: SimEngine, body: ChatBody, date: Callable[[], str]) -> SimPrompt:
    """Return a chat's prompt: P's ids if the request has them, else rendered and tokenized here."""
    given = _given_ids(engine, body)
    if given is not None:
        return SimPrompt(check_prompt(given, body, engine.facts, tokenized=False), "")
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    text = render(
        engine.facts.template,
        body.messages,
        tools=tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        kwargs=body.chat_template_kwargs,
        date=date(),
        sees=engine.facts.vision,
    )
    special = body.add_special_tokens
    if not engine.facts.vision:
        ids = engine.tokenizer.encode(text, add_special_tokens=special)
        return SimPrompt(check_prompt(ids, body, engine.facts, tokenized=True), text)
    ids, media = with_pictures(engine, body.messages, text, special=special)
    return SimPrompt(check_prompt(ids, body, engine.facts, tokenized=True), text, media)


def _given_ids(engine: SimEngine, body: ChatBody) -> list[int] | None:
    """Return the ids that stand for a chat's messages, None if there are none or the messages are
    needed.
    """
    ids = (body.kv_transfer_params or {}).get("prompt_token_ids")
    if ids is None or body.echo or not all(map(_is_text, body.messages)):
        return None
    param = "kv_transfer_params.prompt_token_ids"
    if not isinstance(ids, list) or not ids or any(type(one) is not int or one < 0 for one in ids):
        raise RefusedRequest(
            "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative "
            "integers.",
            param,
        )
    if max(ids) >= engine.tokenizer.vocab_size:
        raise RefusedRequest(f"Token id {max(ids)} is out of vocabulary", param)
    return ids


def _is_text(message: dict[str, Any]) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, list) else ()
    return not has_media(parts)


def choice_of(
    engine: SimEngine, body: ChatBody, prompt: SimPrompt, index: int, made: list[Delta]
) -> dict[str, Any]:
    """Return the choice that a batch has for one of its chats. It hides nothing of what is reported
    about the choice's tokens.
    """
    return _Job(engine, body, prompt, "", batch=True).choice(index, made)


class _Job:
    """The answer to one request while it is generated."""

    def __init__(
        self,
        engine: SimEngine,
        body: ChatBody,
        prompt: SimPrompt,
        request_id: str,
        *,
        rank: int | None = None,
        batch: bool = False,
    ) -> None:
        self._engine, self._body, self._prompt, self._id = engine, body, prompt, request_id
        self._rank = rank
        self._created = int(time.time())
        self._usage_at_end, self._running_usage = body.usage_in_stream(
            forced=engine.facts.enable_force_include_usage
        )
        self._parsed = not batch and looks_for_calls(body)
        last = body.messages[-1]
        self._role = "assistant" if body.add_generation_prompt else str(last.get("role"))
        self._echo = (
            str(last.get("content") or "") if body.echo and last.get("role") == self._role else ""
        )
        self._thinks = engine.facts.reasoning_parser != "none"
        # A parser of either kind hides the boundaries of tokens.
        self._hides = (
            not batch
            and not body.include_reasoning
            and (self._thinks or engine.facts.enable_auto_tool_choice)
        )

    def _run(self, params: SamplingParams) -> AsyncGenerator[Delta, None]:
        return deltas(
            self._engine,
            self._id,
            [self._prompt],
            [params],
            self._body,
            numbered=False,
            skip_special_tokens=not self._parsed,
            rank=self._rank,
        )

    def _head(self, kind: str) -> dict[str, Any]:
        model = answer.shown_model(self._body.model, self._engine)
        return {"id": self._id, "object": kind, "created": self._created, "model": model}

    def _parser(self) -> CallParser | None:
        return CallParser(f"chatcmpl-tool-{secrets.token_hex(8)}") if self._parsed else None

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not self._body.logprobs or self._hides:
            return None
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return chat_logprobs(
            self._engine.tokenizer, delta.tokens, self._body.top_logprobs or 0, as_ids
        )

    def _ids(self, delta: Delta) -> list[int] | None:
        return delta.ids if self._body.return_token_ids and not self._hides else None

    def _thought(self, tokens: int) -> dict[str, int] | None:
        """Return `completion_tokens_details`."""
        return {"reasoning_tokens": tokens} if self._thinks else None

    async def whole(self, params: SamplingParams) -> Response:
        """Return the whole answer."""
        body, facts = self._body, self._engine.facts
        parts: list[list[Delta]] = [[] for _ in range(body.children)]
        handle, encoded = None, None
        async with aclosing(self._run(params)) as found:
            async for delta in found:
                if delta.finish_reason == "error":
                    raise LoadFailedError
                parts[delta.index].append(delta)
                handle = delta.kv_transfer_params or handle
                encoded = delta.ec_transfer_params or encoded
        choices = [self.choice(index, made) for index, made in enumerate(parts)]
        first = parts[0][0]
        counted = answer.usage(
            len(self._prompt.ids), sum(len(delta.tokens) for made in parts for delta in made)
        )
        thoughts = sum(
            reasoning.count([token for delta in made for token in delta.ids]) for made in parts
        )
        return response(
            {
                **self._head("chat.completion"),
                "choices": choices,
                "service_tier": None,
                "system_fingerprint": answer.fingerprint(facts),
                "usage": counted
                | {
                    "prompt_tokens_details": answer.details(
                        facts, first.cached, first.created, self._prompt.media
                    ),
                    "completion_tokens_details": self._thought(thoughts),
                },
                "prompt_logprobs": prompt_logprobs(self._engine.tokenizer, first.prompt_logprobs),
                "prompt_token_ids": self._prompt.ids if body.return_token_ids else None,
                "prompt_text": self._prompt_text(),
                "kv_transfer_params": handle,
                "ec_transfer_params": encoded,
                "metrics": None,
            }
        )

    def choice(self, index: int, made: list[Delta]) -> dict[str, Any]:
        """Return one choice of a whole answer."""
        body, last = self._body, made[-1]
        tokens = tuple(token for delta in made for token in delta.tokens)
        text = "".join(delta.text for delta in made)
        thoughts, content = reasoning.split(text) if self._thinks else (None, text)
        parser = self._parser() if content is not None else None
        message: dict[str, Any] = {"role": self._role, "content": content}
        message |= {"refusal": None, "annotations": None, "audio": None, "function_call": None}
        if parser is not None:
            text = content or ""
            for piece in (text[: len(text) // 2], text[len(text) // 2 :], ""):
                parser.add(piece)
            message["content"] = parser.content
            if parser.content is None:
                function = {"name": parser.name, "arguments": parser.arguments}
                call = {
                    "id": f"chatcmpl-tool-{secrets.token_hex(8)}",
                    "type": "function",
                    "function": function,
                }
                message["tool_calls"] = [call]
        message["reasoning"] = thoughts if body.include_reasoning else None
        if self._echo:
            message["content"] = self._echo + (message["content"] or "")
        merged = Delta(
            index, 0, text, tokens, last.finish_reason, last.stop_reason, 0, 0, None, None
        )
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(merged),
            "finish_reason": finish_of(body, last.finish_reason, parser),
            "stop_reason": last.stop_reason,
            "token_ids": self._ids(merged),
            "routed_experts": None,
            **since.weight_versions(self._engine.facts.version),
        }

    def _prompt_text(self) -> str | None:
        """Return the prompt's text if it is asked for. Ids from P have none."""
        return (self._prompt.text or None) if self._body.return_prompt_text else None

    async def events(self, params: SamplingParams) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream except `[DONE]`."""
        body, facts = self._body, self._engine.facts
        head = self._head("chat.completion.chunk")
        parsers = [
            ChoiceParser(facts, self._prompt.ids, self._parser(), hides=self._hides)
            for _ in range(body.children)
        ]
        generated: list[list[int]] = [[] for _ in range(body.children)]
        cached: int | None = None
        created = 0
        async with aclosing(self._run(params)) as found:
            async for delta in found:
                if cached is None:
                    cached, created = delta.cached, delta.created
                    for one in self._openings(head):
                        yield one
                if delta.finish_reason == "error":
                    raise LoadFailedError
                index, parser = delta.index, parsers[delta.index]
                generated[index] += delta.ids
                if not delta.text and not generated[index]:
                    continue  # an engine that only encodes has ended it
                content = parser.add(delta.text, delta.ids)
                logprobs = self._logprobs(delta)
                if content is None:
                    if (
                        delta.finish_reason is None
                        and logprobs is None
                        and self._ids(delta) is None
                    ):
                        continue
                    content = {}
                finish = finish_of(body, delta.finish_reason, parser.calls)
                choice = {
                    "index": index,
                    "delta": content,
                    "logprobs": logprobs,
                    "finish_reason": finish,
                }
                if finish is not None:
                    choice["stop_reason"] = delta.stop_reason
                choice["token_ids"] = self._ids(delta)
                if finish is not None:
                    choice |= since.weight_versions(facts.version)
                chunk = head | {"choices": [choice]}
                if self._running_usage:
                    counted = answer.usage(len(self._prompt.ids), len(generated[index]))
                    thoughts = reasoning.count(generated[index])
                    chunk["usage"] = counted | {
                        "completion_tokens_details": self._thought(thoughts)
                    }
                if finish is not None and not self._usage_at_end:
                    chunk["system_fingerprint"] = answer.fingerprint(facts)
                if since.v033(facts.version):
                    chunk["kv_transfer_params"] = (
                        None if finish is None else delta.kv_transfer_params
                    )
                yield answer.event(chunk)
        if self._usage_at_end:
            counted = answer.usage(len(self._prompt.ids), sum(map(len, generated)))
            details = answer.details(facts, cached or 0, created, self._prompt.media)
            if details is not None:
                counted["prompt_tokens_details"] = {
                    key: value for key, value in details.items() if value is not None
                }
            if self._thinks:
                counted["completion_tokens_details"] = self._thought(
                    sum(map(reasoning.count, generated))
                )
            yield answer.event(
                head
                | {"choices": [], "usage": counted, "system_fingerprint": answer.fingerprint(facts)}
            )

    def _openings(self, head: dict[str, Any]) -> list[bytes]:
        """Return the events before the first token: the role of each choice, and the echo."""
        body, found = self._body, []
        counted = answer.usage(len(self._prompt.ids), 0) | {
            "completion_tokens_details": self._thought(0)
        }
        for index in range(body.children):
            choice = {
                "index": index,
                "delta": {"role": self._role, "content": ""},
                "logprobs": None,
            }
            choice["finish_reason"] = None
            chunk = head | {"choices": [choice]}
            if self._running_usage:
                chunk["usage"] = counted
            chunk["prompt_token_ids"] = self._prompt.ids if body.return_token_ids else None
            chunk["prompt_text"] = self._prompt_text()
            found.append(answer.event(chunk))
        if self._echo:
            for index in range(body.children):
                choice = {
                    "index": index,
                    "delta": {"content": self._echo},
                    "logprobs": None,
                    "finish_reason": None,
                }
                chunk = head | {"choices": [choice]}
                if self._running_usage:
                    chunk["usage"] = counted
                found.append(answer.event(chunk))
        return found
