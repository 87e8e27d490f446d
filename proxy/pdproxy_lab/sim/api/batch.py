"""`/v1/chat/completions/batch`: several conversations in, one choice for each out. Bodies have
vLLM's bytes.

Owns what vLLM does otherwise here than for one chat: no stream, no tools in the prompt, no details
in the usage.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pdproxy_lab.sim.api import answer
from pdproxy_lab.sim.api.chat import chat_prompt, choice_of
from pdproxy_lab.sim.api.errors import RefusedRequest, response
from pdproxy_lab.sim.api.generation import Delta, LoadFailedError, SimPrompt, deltas
from pdproxy_lab.sim.api.protocol import ChatBody, StructuredOutputs
from pdproxy_lab.sim.api.salts import check_salt
from pdproxy_lab.sim.api.sampling import admit, check_lengths, sampling_params
from pdproxy_lab.sim.engine import SimEngine


class BatchBody(BaseModel):
    """The body of the route, with vLLM's types; other fields are those of a chat."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    messages: list[Annotated[list[dict[str, Any]], Field(min_length=1)]] = Field(min_length=1)
    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = 1
    presence_penalty: float | None = None
    response_format: Any | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = []
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    tool_choice: Literal["none"] | None = "none"
    include_reasoning: bool = True
    use_beam_search: bool = False
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    structured_outputs: StructuredOutputs | None = None
    request_id: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] = 0
    cache_salt: str | None = None
    include_stop_str_in_output: bool = False
    echo: bool = False
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool = False
    kv_transfer_params: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        check_salt(data)
        if data.get("use_beam_search"):
            raise RefusedRequest(
                "Batch chat completions do not support beam search. Please set `use_beam_search` "
                "to False.",
                "use_beam_search",
            )
        if data.get("logprob_token_ids") and not data.get("logprobs"):
            raise RefusedRequest(
                "when using `logprob_token_ids`, `logprobs` must be set to true.",
                "logprob_token_ids",
            )
        handle = data.get("kv_transfer_params")
        if isinstance(handle, dict) and handle.get("prompt_token_ids") is not None:
            raise RefusedRequest(
                "Batch chat completions do not support `kv_transfer_params['prompt_token_ids']`: "
                "one pre-tokenized prompt"
                " cannot serve several conversations.",
                "kv_transfer_params.prompt_token_ids",
            )
        n = data.get("n", 1)
        if n is not None and n != 1:
            raise RefusedRequest(
                "Batch chat completions do not support `n > 1`. Please set `n` to 1.", "n", value=n
            )
        return data

    def conversation(self, messages: list[dict[str, Any]]) -> ChatBody:
        """Return one conversation as a chat.

        Raises:
            Refused: it is none, in the words of the validator, which vLLM passes on.
        """
        data = self.model_dump(exclude={"messages"}, exclude_none=True)
        try:
            return ChatBody.model_validate({**data, "messages": messages})
        except ValidationError as error:
            raise RefusedRequest(str(error)) from None


async def chat_batch(
    engine: SimEngine, body: BatchBody, request: Request, date: Callable[[], str]
) -> Response:
    """Answer one request.

    Raises:
        Refused, EngineDeadError, LoadFailedError: for the caller to answer.
    """
    answer.check_model(body.model, engine)
    facts, tokenizer = engine.facts, engine.tokenizer
    chats = [body.conversation(messages) for messages in body.messages]
    check_lengths(chats[0], facts)
    # vLLM renders all conversations before it generates anything, and renders no tools.
    prompts = [chat_prompt(engine, chat.model_copy(update={"tools": None}), date) for chat in chats]
    params = [
        sampling_params(chat, prompt.ids, facts, tokenizer)
        for chat, prompt in zip(chats, prompts, strict=True)
    ]
    rank = answer.rank_of(request)
    for one, chat, prompt in zip(params, chats, prompts, strict=True):
        admit(one, chat, prompt.ids, facts, tokenizer, rank=rank)
    request_id = (
        f"chatcmpl-{request.headers.get('x-request-id') or body.request_id or engine.new_id()}"
    )
    created = int(time.time())
    made: list[list[Delta]] = [[] for _ in prompts]
    async with aclosing(
        deltas(engine, request_id, prompts, params, chats[0], numbered=True, rank=rank)
    ) as found:
        async for delta in found:
            if delta.finish_reason == "error":
                raise LoadFailedError
            if chats[0].stream:  # vLLM's outputs are deltas then, and its batches keep the last one
                made[delta.index].clear()
            made[delta.index].append(delta)
    choices = [
        choice_of(engine, chat, prompt, index, parts)
        for index, (chat, prompt, parts) in enumerate(zip(chats, prompts, made, strict=True))
    ]
    generated = sum(len(delta.tokens) for parts in made for delta in parts)
    return response(
        {
            "id": request_id,
            "object": "chat.completion",
            "created": created,
            "model": facts.model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": answer.fingerprint(facts),
            "usage": answer.usage(_length(prompts), generated)
            | {"prompt_tokens_details": None, "completion_tokens_details": None},
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
    )


def _length(prompts: list[SimPrompt]) -> int:
    return sum(len(prompt.ids) for prompt in prompts)
