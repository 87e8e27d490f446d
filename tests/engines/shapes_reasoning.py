"""Chats with engines that separate reasoning from content (`--reasoning-parser`), with a grammar
and tools after the reasoning.

The reasoning of random weights never ends by itself: `thinking_token_budget` ends it after a number
of tokens.
"""

from typing import Any

from .prompts import CALL, EOS, IF, JSON_SCHEMA, TOOLS, USAGE, Body, chat, question

THINK_END = "4095"  # the id of </think> in tests/engines/make_model.py


def thinking(nonce: str) -> list[Body]:
    """Return a chat whose next token is the first of the reasoning."""
    return [*question(nonce), {"role": "assistant", "content": "<think>"}]


def _thought(nonce: str) -> list[Body]:
    return [*question(nonce), {"role": "assistant", "content": "<think>A barrel.</think>"}]


GOES_ON: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
BRIEFLY = GOES_ON | {"thinking_token_budget": 5, "max_tokens": 20}
CALLED: dict[str, Any] = {"tools": TOOLS, "structured_outputs": {"regex": CALL}, "max_tokens": 150}
CONTINUOUS: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}

REASONING_SHAPES = [
    chat("thoughts-alone"),
    chat("thoughts-alone-streamed", **USAGE),
    chat("thoughts-cut-after-one-token", max_tokens=1, **USAGE),
    chat("thoughts", thinking, **BRIEFLY),
    chat("thoughts-streamed", thinking, **BRIEFLY, **USAGE),
    chat("thoughts-streamed-continuous-usage", thinking, **BRIEFLY, **CONTINUOUS),
    chat("thoughts-not-included", thinking, include_reasoning=False, **BRIEFLY),
    chat("thoughts-not-included-streamed", thinking, include_reasoning=False, **BRIEFLY, **USAGE),
    chat("thoughts-alone-not-included-streamed", include_reasoning=False, **USAGE),
    chat("thoughts-end-at-once", thinking, logit_bias={THINK_END: 100}, max_tokens=3, **GOES_ON),
    chat(
        "thoughts-end-at-once-streamed",
        thinking,
        logit_bias={THINK_END: 100},
        max_tokens=3,
        **GOES_ON,
        **USAGE,
    ),
    chat("thoughts-before-the-answer", _thought, **GOES_ON),
    chat("thoughts-before-the-answer-streamed", _thought, **GOES_ON, **USAGE),
    chat("thoughts-stopped", thinking, stop=[" if"], logit_bias={str(IF): 100}, **BRIEFLY, **USAGE),
    chat("thoughts-eos-first-streamed", thinking, logit_bias={EOS: 100}, **GOES_ON, **USAGE),
    chat("thoughts-logprobs", thinking, logprobs=True, top_logprobs=1, **BRIEFLY),
    chat("thoughts-logprobs-streamed", thinking, logprobs=True, top_logprobs=1, **BRIEFLY, **USAGE),
    chat("thoughts-token-ids-returned", thinking, return_token_ids=True, **BRIEFLY),
    chat(
        "thoughts-token-ids-returned-streamed", thinking, return_token_ids=True, **BRIEFLY, **USAGE
    ),
    chat(
        "thoughts-then-json", thinking, response_format=JSON_SCHEMA, **BRIEFLY | {"max_tokens": 70}
    ),
    chat(
        "thoughts-then-json-streamed",
        thinking,
        response_format=JSON_SCHEMA,
        **BRIEFLY | {"max_tokens": 70},
        **USAGE,
    ),
    chat("thoughts-then-a-call", thinking, **BRIEFLY | CALLED),
    chat("thoughts-then-a-call-streamed", thinking, **BRIEFLY | CALLED, **USAGE),
    chat(
        "thoughts-then-a-required-call",
        thinking,
        tools=TOOLS,
        tool_choice="required",
        **BRIEFLY | {"max_tokens": 150},
    ),
    chat(
        "thoughts-then-a-required-call-streamed",
        thinking,
        tools=TOOLS,
        tool_choice="required",
        **BRIEFLY | {"max_tokens": 150},
        **USAGE,
    ),
    chat("thoughts-before-a-call-streamed", _thought, **GOES_ON | CALLED, **USAGE),
    chat(
        "thoughts-effort", reasoning_effort="none", chat_template_kwargs={"enablethinking": False}
    ),
]
