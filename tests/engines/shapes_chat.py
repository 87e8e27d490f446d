"""Chats: messages and templates, form and end of the answer, tools and grammars."""

from typing import Any

from .prompts import (
    ABSENT,
    ALONE_BEAM,
    ALONE_ECHO,
    ALONE_PROMPT_LOGPROBS,
    ALONE_SHORT,
    CALL,
    EOS,
    FIRST_BYTE_OF_TWO,
    GRAMMAR,
    IF,
    IM_START,
    JSON_SCHEMA,
    SCHEMA,
    SHIPS,
    STORY,
    TOOLS,
    USAGE,
    begun,
    chat,
    conversation,
    image,
    question,
    story,
    talk,
    tool_result,
)

CONTINUOUS: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
FIRST_IS_IF: dict[str, Any] = {"logit_bias": {str(IF): 100}}
FIRST_IS_EOS: dict[str, Any] = {"logit_bias": {EOS: 100}}
TIDES: dict[str, Any] = {"type": "function", "function": {"name": "tide_table"}}
CALLED: dict[str, Any] = {"tools": TOOLS, "structured_outputs": {"regex": CALL}, "max_tokens": 120}
CALLED_TWICE: dict[str, Any] = {
    "tools": TOOLS,
    "structured_outputs": {"regex": CALL + r"\n" + CALL},
    "max_tokens": 240,
}
CALLED_AFTER_WORDS: dict[str, Any] = {
    "tools": TOOLS,
    "structured_outputs": {"regex": "Let me see\\. " + CALL},
    "max_tokens": 140,
}


def told_in_parts(nonce: str) -> list[dict[str, Any]]:
    """Return messages whose texts have what SDKs put beside a text."""
    more: dict[str, Any] = {
        "cache_control": {"type": "ephemeral"},
        "annotations": [],
        "index": 0,
        "id": "part_1",
    }
    return [
        {
            "role": "system",
            "content": [{"type": "text", "text": nonce, "cache_control": {"type": "ephemeral"}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": story(nonce), **more},
                {"type": "input_text", "text": "?"},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "refusal", "refusal": "No."},
                {"type": "output_text", "text": "Yes"},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "text", "text": "Why?", "image_url": None, "uuid": None}],
        },
    ]


CHAT_SHAPES = [
    # Forms of the prompt.
    chat("chat"),
    chat("chat-model-absent", model=ABSENT, **USAGE),
    chat("chat-conversation", conversation),
    chat("chat-conversation-streamed", conversation, **USAGE),
    chat("chat-tool-result", tool_result, tools=TOOLS),
    chat("chat-tool-result-streamed", tool_result, **USAGE),
    chat(
        "chat-developer", lambda nonce: [{"role": "developer", "content": nonce}, *question(nonce)]
    ),
    chat(
        "chat-named-speakers",
        lambda nonce: [{"role": "user", "name": "Ann", "content": story(nonce)}],
    ),
    chat("chat-system-alone", lambda nonce: [{"role": "system", "content": story(nonce)}]),
    chat("chat-empty-content", lambda nonce: [*question(nonce), {"role": "user", "content": ""}]),
    chat("chat-unknown-role", lambda nonce: [{"role": "harbour master", "content": story(nonce)}]),
    chat(
        "chat-parts",
        lambda nonce: [{"role": "user", "content": [{"type": "text", "text": story(nonce)}] * 2}],
    ),
    chat("chat-parts-with-other-keys", told_in_parts),
    chat("chat-parts-with-other-keys-streamed", told_in_parts, **USAGE),
    chat("chat-numbers-in-other-forms", n=1.0, stream=0, max_tokens=8.0, min_tokens=2.0, echo=0),
    chat("chat-numbers-in-other-forms-streamed", n=1.0, stream=1, max_completion_tokens=8.0),
    chat("chat-1000-tokens", talk(8), **USAGE),
    chat("chat-max-tokens-absent", talk(17), max_tokens=ABSENT),
    chat(
        "chat-truncated-prompt",
        lambda nonce: talk(9)(nonce + STORY),
        truncate_prompt_tokens=90,
        truncation_side="right",
    ),
    chat("chat-continued", begun, add_generation_prompt=False, continue_final_message=True),
    chat(
        "chat-continued-streamed",
        begun,
        add_generation_prompt=False,
        continue_final_message=True,
        **USAGE,
    ),
    chat("chat-no-generation-prompt", add_generation_prompt=False),
    chat("chat-special-tokens-added", add_special_tokens=True),
    chat(
        "chat-template-arguments",
        chat_template_kwargs={"add_generation_prompt": False, "unheard_of": 1},
    ),
    chat("chat-documents", documents=[{"title": "Ledger", "text": "A barrel."}]),
    chat("chat-cache-salt", cache_salt="of-one-tenant", stream=True),
    chat("chat-short", lambda nonce: [{"role": "user", "content": nonce[-3:]}], alone=ALONE_SHORT),
    chat("chat-image", image, status=400),  # a model of text
    # Form and end of the answer.
    chat("chat-streamed", stream=True),
    chat("chat-streamed-usage", **USAGE),
    chat("chat-streamed-continuous-usage", **CONTINUOUS),
    chat("chat-streamed-by-four", stream=True, stream_interval=4, max_tokens=11),
    chat("chat-max-completion-tokens", max_tokens=None, max_completion_tokens=7),
    chat("chat-both-limits", max_tokens=9, max_completion_tokens=4, **USAGE),
    chat("chat-max-tokens-1", max_tokens=1),
    chat("chat-max-tokens-1-streamed", max_tokens=1, **CONTINUOUS),
    chat("chat-max-tokens-2-streamed", max_tokens=2, **USAGE),
    chat("chat-stop", stop="e", max_tokens=60),
    chat("chat-stop-streamed", stop=["e"], max_tokens=60, **USAGE),
    chat(
        "chat-stop-included-streamed",
        stop=["e"],
        include_stop_str_in_output=True,
        max_tokens=60,
        stream=True,
    ),
    chat(
        "chat-stop-across-tokens-streamed",
        stop=["our ledg"],
        structured_outputs={"choice": ["harbour ledger"]},
        **USAGE,
    ),
    chat("chat-stop-first", stop=[" i"], **FIRST_IS_IF),
    chat("chat-stop-first-streamed", stop=[" i"], **FIRST_IS_IF, **USAGE),
    chat("chat-stop-id-first", stop_token_ids=[IF], **FIRST_IS_IF),
    chat("chat-eos-first", **FIRST_IS_EOS),
    chat("chat-eos-first-streamed", **FIRST_IS_EOS, **CONTINUOUS),
    chat("chat-eos-after-two", min_tokens=2, **FIRST_IS_EOS, **USAGE),
    chat("chat-ignore-eos", ignore_eos=True, **FIRST_IS_EOS),
    chat("chat-special-shown", skip_special_tokens=False, logit_bias={IM_START: 100}, **USAGE),
    chat("chat-cut-in-a-character", structured_outputs=SHIPS, max_tokens=6),
    chat("chat-cut-in-a-character-streamed", structured_outputs=SHIPS, max_tokens=6, **USAGE),
    chat(
        "chat-half-a-character-streamed",
        allowed_token_ids=[FIRST_BYTE_OF_TWO],
        max_tokens=1,
        **USAGE,
    ),
    chat("chat-logprobs", logprobs=True, top_logprobs=2),
    chat("chat-logprobs-streamed", logprobs=True, top_logprobs=2, **USAGE),
    chat("chat-logprobs-alone", logprobs=True),
    chat("chat-logprobs-0", logprobs=True, top_logprobs=0, stream=True),
    chat("chat-logprobs-5-as-ids", logprobs=True, top_logprobs=5, return_tokens_as_token_ids=True),
    chat(
        "chat-logprobs-of-half-characters",
        allowed_token_ids=[177],
        logprobs=True,
        top_logprobs=1,
        max_tokens=3,
    ),
    chat("chat-token-ids-returned", return_token_ids=True),
    chat("chat-token-ids-returned-streamed", return_token_ids=True, **USAGE),
    # Served by one engine alone.
    chat("chat-echo", begun, echo=True, alone=ALONE_ECHO),
    chat("chat-prompt-text", return_prompt_text=True, alone=ALONE_ECHO),
    chat("chat-prompt-text-streamed", return_prompt_text=True, stream=True, alone=ALONE_ECHO),
    chat("chat-prompt-logprobs", prompt_logprobs=0, alone=ALONE_PROMPT_LOGPROBS),
    chat("chat-n", n=2, temperature=0.8, seed=7),
    chat("chat-n-of-four", n=4, temperature=0.7, seed=2, stream=True, max_tokens=5),
    chat("chat-n-streamed", n=2, temperature=0.8, seed=7, **USAGE),
    chat("chat-n-tools", n=2, temperature=0.7, seed=2, **CALLED),
    chat("chat-beam", use_beam_search=True, max_tokens=4, alone=ALONE_BEAM),
    # Sampling, and other fields of the answer.
    chat("chat-seed-streamed", temperature=1.0, seed=5, stream=True),
    chat("chat-sampling", temperature=1.1, seed=6, top_k=20, top_p=0.9, min_p=0.05, n=1),
    chat("chat-logit-bias", logit_bias={"400": 100, "401": 99}, stream=True),
    chat(
        "chat-penalties",
        presence_penalty=0.5,
        frequency_penalty=0.7,
        repetition_penalty=1.3,
        max_tokens=40,
        **USAGE,
    ),
    chat("chat-bad-words", bad_words=["e", " the"], max_tokens=30),
    chat("chat-body-id", request_id="chosen-by-the-client", pinned_id=True),
    chat("chat-header-id-streamed", header_id=True, pinned_id=True, **USAGE),
    chat(
        "chat-of-openai",
        user="somebody",
        metadata={"a": "b"},
        service_tier="auto",
        store=False,
        modalities=["text"],
    ),
    chat("chat-reasoning-asked", reasoning_effort="low", include_reasoning=False, **USAGE),
    # Tools and grammars.
    chat("chat-tools-auto", tools=TOOLS, tool_choice="auto"),
    chat("chat-tools-auto-streamed", tools=TOOLS, **USAGE),
    chat("chat-tools-auto-called", **CALLED),
    chat("chat-tools-auto-called-streamed", **CALLED, **USAGE),
    chat("chat-tools-called-twice", **CALLED_TWICE),
    chat("chat-tools-called-twice-streamed", **CALLED_TWICE, **USAGE),
    chat("chat-tools-called-once-of-two", parallel_tool_calls=False, **CALLED_TWICE),
    chat(
        "chat-tools-called-once-of-two-streamed",
        parallel_tool_calls=False,
        **CALLED_TWICE,
        stream=True,
    ),
    chat("chat-tools-called-after-words", **CALLED_AFTER_WORDS),
    chat("chat-tools-called-after-words-streamed", **CALLED_AFTER_WORDS, **CONTINUOUS),
    chat("chat-tools-called-logprobs-streamed", logprobs=True, top_logprobs=1, **CALLED, **USAGE),
    chat("chat-tools-called-token-ids-streamed", return_token_ids=True, **CALLED, **USAGE),
    chat("chat-tools-call-cut", **CALLED | {"max_tokens": 20}),
    chat("chat-tools-call-cut-streamed", **CALLED | {"max_tokens": 20}, **USAGE),
    chat("chat-tools-none", tools=TOOLS, tool_choice="none"),
    chat("chat-tools-none-streamed", tools=TOOLS, tool_choice="none", **USAGE),
    chat("chat-tools-required", tools=TOOLS, tool_choice="required", max_tokens=150),
    chat(
        "chat-tools-required-streamed", tools=TOOLS, tool_choice="required", max_tokens=150, **USAGE
    ),
    chat(
        "chat-tools-required-once",
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=150,
    ),
    chat("chat-tools-named", tools=TOOLS, max_tokens=90, tool_choice=TIDES),
    chat("chat-tools-named-streamed", tools=TOOLS, max_tokens=90, stream=True, tool_choice=TIDES),
    chat("chat-tools-named-usage", tools=TOOLS, max_tokens=90, tool_choice=TIDES, **CONTINUOUS),
    chat("chat-json-schema", response_format=JSON_SCHEMA, max_tokens=60),
    chat("chat-json-schema-streamed", response_format=JSON_SCHEMA, max_tokens=60, **USAGE),
    chat(
        "chat-json-schema-logprobs",
        response_format=JSON_SCHEMA,
        max_tokens=60,
        logprobs=True,
        top_logprobs=1,
    ),
    chat("chat-json-object", response_format={"type": "json_object"}, max_tokens=40),
    chat("chat-text-format", response_format={"type": "text"}, stream=True),
    chat("chat-structured-json", structured_outputs={"json": SCHEMA}, max_tokens=60, **USAGE),
    chat("chat-choice", structured_outputs={"choice": ["harbour", "ledger"]}),
    chat(
        "chat-regex-streamed",
        structured_outputs={"regex": "[a-c]{4}-[0-9]{3}"},
        max_tokens=30,
        **USAGE,
    ),
    chat("chat-grammar", structured_outputs={"grammar": GRAMMAR}, max_tokens=30),
]
