"""Turns a request's body into sampling parameters; refuses what vLLM refuses, with its texts and in
its order. Pure.

The handler refuses some values. The engine refuses others later, when a stream's status 200 has
been sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pdproxy_lab.sim.api.errors import EngineRefused, RefusedRequest
from pdproxy_lab.sim.api.protocol import ChatBody, CompletionBody, GenerationBody
from pdproxy_lab.sim.api.structured import grammar_for
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.kvstore_keys import refusal
from pdproxy_lab.sim.request import Grammar, SamplingParams
from pdproxy_lab.sim.tokenizer import BuiltInTokenizer

_MAX_LOGPROBS = 20
_MAX_CHOICES = 16384
_GREEDY = 1e-5
"""A lower temperature counts as 0."""


def check_lengths(
    body: GenerationBody, facts: SimFacts, limit: str = "max_completion_tokens"
) -> None:
    """Refuse lengths that are too large for every prompt. `limit`: what the client calls a chat's
    `max_completion_tokens`.
    """
    name, wanted = "max_tokens", getattr(body, "max_tokens", None)
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        name, wanted = limit, body.max_completion_tokens
    longest = facts.max_model_len
    if wanted is not None and wanted > longest:
        raise RefusedRequest(
            f"{name}={wanted} cannot be greater than max_model_len={longest}. Please request "
            f"fewer output tokens.",
            name,
            value=wanted,
        )
    cut = body.truncate_prompt_tokens
    if cut is not None and cut > longest:
        raise RefusedRequest(
            f"truncate_prompt_tokens={cut} cannot be greater than max_model_len = {longest}."
            " Please request a smaller truncation size.",
            "truncate_prompt_tokens",
            value=cut,
        )


def check_prompt(
    ids: list[int], body: GenerationBody, facts: SimFacts, *, tokenized: bool
) -> list[int]:
    """Return a prompt's ids as the engine takes them, truncated if the request asks for it.

    `tokenized`: vLLM's tokenizer made them, and stops one token beyond the longest prompt.
    """
    if facts.connector == "kvstore-keys" and (why := refusal(body.kv_transfer_params)) is not None:
        raise RefusedRequest(why)
    longest = facts.max_model_len
    if body.truncate_prompt_tokens is not None:
        keep = longest - 1 if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
        ids = (
            ids[:keep]
            if body.truncation_side == "right"
            else ids[len(ids) - keep :]
            if keep < len(ids)
            else ids
        )
    if len(ids) > longest:
        count = longest + 1 if tokenized else len(ids)
        qualifier = "at least " if count == longest + 1 else ""
        raise RefusedRequest(
            f"This model's maximum context length is {longest} tokens. However, your prompt "
            f"contains {qualifier}{count}"
            " input tokens, which exceeds this limit even without any output tokens."
            " Please reduce the length of the input prompt.",
            "input_tokens",
            value=count,
        )
    return ids


def sampling_params(
    body: GenerationBody, prompt: list[int], facts: SimFacts, tokenizer: BuiltInTokenizer
) -> SamplingParams:
    """Return the sampling parameters of one prompt, as the handler makes them; `admit` them next.

    Raises:
        Refused: a value is out of its range.
    """
    wanted = getattr(body, "max_tokens", None)
    if isinstance(body, ChatBody):
        wanted = body.max_completion_tokens if body.max_completion_tokens is not None else wanted
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        echo = body.echo
    else:
        assert isinstance(body, CompletionBody)
        logprobs, echo = body.logprobs, bool(body.echo)
    space_left = facts.max_model_len - len(prompt)
    max_tokens = space_left if wanted is None else min(space_left, wanted)
    if echo and wanted == 0 and not isinstance(body, ChatBody):
        max_tokens = 1
    temperature = 1.0 if body.temperature is None else body.temperature
    prompt_logprobs = body.prompt_logprobs
    if prompt_logprobs is None and echo:
        prompt_logprobs = (body.top_logprobs or 0) if isinstance(body, ChatBody) else logprobs
    logit_bias = _logit_bias(body)
    _verify(body, temperature, max_tokens)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=0.0 if body.top_k == 1 else temperature,  # one token is left to draw from
        seed=body.seed,
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=logit_bias,
        bad_words=tuple(
            tuple(tokenizer.encode(word, add_special_tokens=False)) for word in body.bad_words
        ),
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        thinking_token_budget=None
        if body.thinking_token_budget == -1
        else body.thinking_token_budget,
    )


def admit(
    params: SamplingParams,
    body: GenerationBody,
    prompt: list[int],
    facts: SimFacts,
    tokenizer: BuiltInTokenizer,
    grammar: Callable[[], Grammar | None] | None = None,
    rank: int | None = None,
) -> None:
    """Check one prompt, its parameters and its data-parallel rank as the engine does.

    They get their grammar, by default the request's own.

    Raises:
        EngineRefused: a value is invalid.
    """
    for kind, count in (("sample", params.logprobs), ("prompt", params.prompt_logprobs)):
        asked = tokenizer.vocab_size if count == -1 else count
        if asked is not None and asked > _MAX_LOGPROBS:
            raise EngineRefused(
                f"Requested {kind} logprobs of {asked}, which is greater than max allowed: "
                f"{_MAX_LOGPROBS}",
                "logprobs" if kind == "sample" else "prompt_logprobs",
                value=asked,
            )
    _check_vocabulary(body, params.logit_bias, tokenizer.vocab_size)
    params.grammar = grammar() if grammar is not None else grammar_for(body, tokenizer)
    if params.thinking_token_budget is not None and facts.reasoning_parser == "none":
        raise EngineRefused(
            "thinking_token_budget is set but reasoning_config is not configured. Please set "
            "--reasoning-parser and/or"
            " --reasoning-config to use thinking_token_budget."
        )
    if rank is not None and not 0 <= rank < facts.data_parallel_size:
        raise EngineRefused(
            f"data_parallel_rank {rank} is out of range [0, {facts.data_parallel_size})."
        )
    if not prompt:
        raise EngineRefused("The decoder prompt cannot be empty")
    if max(prompt) >= tokenizer.vocab_size:
        raise EngineRefused(f"Token id {max(prompt)} is out of vocabulary")


def _logit_bias(body: GenerationBody) -> dict[int, float]:
    found: dict[int, float] = {}
    wrong: list[str] = []
    for token, bias in (body.logit_bias or {}).items():
        try:
            found[int(token)] = bias
        except ValueError:
            wrong.append(token)
    if wrong:
        message = (
            f"logit_bias contains key(s) that cannot be converted to integer token IDs: {wrong!r}"
        )
        raise RefusedRequest(message, "logit_bias", value=wrong)
    return found


def _check_vocabulary(body: GenerationBody, logit_bias: dict[int, float], size: int) -> None:
    for name, tokens in (
        ("logit_bias", list(logit_bias)),
        ("stop_token_ids", body.stop_token_ids or []),
    ):
        wrong = [token for token in tokens if not 0 <= token < size]
        if wrong:
            message = (
                f"token_id(s) {wrong} in {name} contain out-of-vocab token ids. Vocabulary size: "
                f"{size}"
            )
            raise EngineRefused(message, name, value=wrong)
    allowed = body.allowed_token_ids
    if allowed is not None and not allowed:
        raise EngineRefused(
            "allowed_token_ids is not None and empty!", "allowed_token_ids", value=[]
        )
    if wrong := [token for token in allowed or () if not 0 <= token < size]:
        raise EngineRefused(
            "allowed_token_ids contains out-of-vocab token id!", "allowed_token_ids", value=wrong
        )


def _verify(body: GenerationBody, temperature: float, max_tokens: int) -> None:
    """vLLM's checks of one request's parameters, in its order."""
    n = body.children
    if n < 1:
        raise RefusedRequest(f"n must be at least 1, got {n}.")
    if n > _MAX_CHOICES:
        raise RefusedRequest(
            f"n must be at most {_MAX_CHOICES}, got {n}. To increase this limit, set the "
            f"VLLM_MAX_N_SEQUENCES"
            " environment variable."
        )
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(body, name) or 0.0
        if not -2.0 <= value <= 2.0:
            raise RefusedRequest(f"{name} must be in [-2, 2], got {value}.")
    penalty = 1.0 if body.repetition_penalty is None else body.repetition_penalty
    if penalty <= 0.0:
        raise RefusedRequest(f"repetition_penalty must be greater than zero, got {penalty}.")
    if not math.isfinite(temperature):
        raise RefusedRequest(
            f"temperature must be a finite number, got {temperature}.",
            "temperature",
            value=temperature,
        )
    if temperature < 0.0:
        raise RefusedRequest(
            f"temperature must be non-negative, got {temperature}.",
            "temperature",
            value=temperature,
        )
    if temperature > 2.0:
        raise RefusedRequest(
            f"temperature must be in [0, 2], got {temperature}.", "temperature", value=temperature
        )
    top_p = 1.0 if body.top_p is None else body.top_p
    if not 0.0 < top_p <= 1.0:
        raise RefusedRequest(f"top_p must be in (0, 1], got {top_p}.", "top_p", value=top_p)
    if body.top_k is not None and body.top_k < -1:
        raise RefusedRequest(f"top_k must be 0 (disable), or at least 1, got {body.top_k}.")
    if body.min_p is not None and not 0.0 <= body.min_p <= 1.0:
        raise RefusedRequest(f"min_p must be in [0, 1], got {body.min_p}.")
    if max_tokens < 1:
        raise RefusedRequest(
            f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", value=max_tokens
        )
    if body.min_tokens < 0:
        raise RefusedRequest(
            f"min_tokens must be greater than or equal to 0, got {body.min_tokens}."
        )
    if body.min_tokens > max_tokens:
        raise RefusedRequest(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got "
            f"{body.min_tokens}."
        )
    budget = body.thinking_token_budget
    if budget is not None and budget < -1:
        message = "`thinking_token_budget` must be a non-negative integer or -1 for unlimited."
        raise RefusedRequest(message, "thinking_token_budget", value=budget)
    if "" in body.stops:
        raise RefusedRequest("stop cannot contain an empty string.")
    if "" in body.bad_words:
        raise RefusedRequest(
            f"bad_words cannot contain an empty string. Got bad_words={body.bad_words}"
        )
    if n > 1 and temperature < _GREEDY:
        raise RefusedRequest(f"n must be 1 when using greedy sampling, got {n}.")
