"""Requests that an engine refuses: the error text is the engine's own."""

from .engine import CONTEXT
from .prompts import ABSENT, TOOLS, USAGE, begun, chat, completion, exactly, ids, story

REFUSED_SHAPES = [
    chat("error-unknown-model", model="no-such-model", status=404),
    completion("error-unknown-model-completion", model="no-such-model", status=404),
    chat("error-temperature", temperature=-1, status=400),
    completion("error-max-tokens-too-big", max_tokens=5000, status=400),
    chat("error-max-tokens-zero", max_tokens=0, status=400),
    completion("error-max-tokens-type", max_tokens="many", status=400),
    completion("error-min-tokens-over-max-tokens", min_tokens=20, max_tokens=10, status=400),
    chat("error-stream-options-without-stream", stream_options={"include_usage": True}, status=400),
    completion("error-prompt-too-long", lambda nonce: story(nonce) * 20, status=400),
    chat(
        "error-prompt-too-long-streamed",
        lambda nonce: [{"role": "user", "content": story(nonce) * 20}],
        status=400,
        stream=True,
    ),
    completion("error-top-logprobs", logprobs=5000, status=400),
    completion("error-stop-streamed", stop=[""], stream=True, status=400),
    chat("error-empty-messages", lambda nonce: [], status=400),
    chat("error-bad-role", lambda nonce: [{"role": 5, "content": story(nonce)}], status=400),
    completion("error-empty-prompt", lambda nonce: "", status=400),
    completion("error-token-out-of-range", lambda nonce: [*ids(nonce), 999999], status=400),
    chat("error-tool-choice-without-tools", tool_choice="required", status=400),
    chat(
        "error-schema",
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "zebra"}},
        },
        status=400,
    ),
    completion("error-regex", structured_outputs={"regex": "[unclosed"}, status=400),
    completion("error-context-and-one", exactly(CONTEXT), max_tokens=1, status=400),
    completion(
        "error-one-of-a-list-too-long",
        lambda nonce: [ids(nonce), ids(nonce + "b", 3000)],
        status=400,
    ),
    completion("error-n-zero", n=0, status=400),
    completion("error-top-p", top_p=2, status=400),
    completion("error-top-k", top_k=-5, status=400),
    completion("error-min-p", min_p=7, status=400),
    completion("error-seed-type", seed="x", status=400),
    completion("error-stop-type", stop=[5], status=400),
    completion("error-penalty", repetition_penalty=0, stream=True, status=400),
    completion("error-presence-penalty", presence_penalty=9, status=400),
    completion("error-min-tokens-negative", min_tokens=-1, status=400),
    completion("error-max-tokens-negative", max_tokens=-1, status=400),
    completion("error-logit-bias", logit_bias={"no-number": 1}, status=400),
    completion("error-logit-bias-out-of-range", logit_bias={"999999": 1}, status=400),
    completion("error-allowed-out-of-range", allowed_token_ids=[999999], status=400),
    completion("error-allowed-none", allowed_token_ids=[], status=400),
    completion("error-logprobs-negative", logprobs=-3, status=400),
    completion("error-prompt-logprobs-streamed", prompt_logprobs=1, stream=True, status=400),
    completion("error-prompts-mixed", lambda nonce: [story(nonce), ids(nonce)], status=400),
    completion("error-prompt-a-number", lambda nonce: 5, status=400),
    completion("error-prompt-null", lambda nonce: None, status=400),
    completion("error-prompt-list-empty", lambda nonce: [], status=400),
    completion("error-token-negative", lambda nonce: [-1, *ids(nonce)], status=400),
    completion("error-beam-streamed", use_beam_search=True, stream=True, status=400),
    completion("error-suffix", suffix="the end", status=400),
    completion("error-cache-salt-empty", cache_salt="", status=400),
    completion("error-n-greedy", n=3, status=400),
    chat("error-n-greedy-streamed", n=2, stream=True, status=400),
    chat("error-tools-empty", tools=[], status=400),
    completion("error-stream-type", stream="perhaps", status=400),
    completion("error-truncate-too-far", truncate_prompt_tokens=99999, status=400),
    completion(
        "error-grammar", structured_outputs={"grammar": "root ::= nothing here"}, status=400
    ),
    completion(
        "error-two-grammars", structured_outputs={"regex": "a", "choice": ["b"]}, status=400
    ),
    completion("error-choice-empty", structured_outputs={"choice": []}, status=400),
    completion("error-thinking-budget", thinking_token_budget=5, status=400),
    chat("error-template-in-the-request", chat_template="{{ messages }}", status=400),
    chat(
        "error-max-completion-tokens-zero", max_tokens=ABSENT, max_completion_tokens=0, status=400
    ),
    chat("error-top-logprobs-without-logprobs", top_logprobs=2, status=400),
    chat("error-top-logprobs-too-many", logprobs=True, top_logprobs=999, status=400),
    chat(
        "error-tool-unknown",
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "zzz"}},
        status=400,
    ),
    chat("error-tool-choice", tools=TOOLS, tool_choice="sometimes", status=400),
    chat("error-tool-without-name", tools=[{"type": "function", "function": {}}], status=400),
    chat("error-format-type", response_format={"type": "verse"}, status=400),
    chat("error-format-without-schema", response_format={"type": "json_schema"}, status=400),
    chat("error-generation-prompt-and-continued", continue_final_message=True, status=400),
    chat("error-messages-a-text", lambda nonce: story(nonce), **USAGE, status=400),
    completion("error-cut-to-nothing", truncate_prompt_tokens=0, status=400),
    completion("error-second-prompt-empty", lambda nonce: [ids(nonce), []], status=400),
    completion("error-thinking-budget-negative", thinking_token_budget=-2, **USAGE, status=400),
    chat("error-unknown-model-streamed", model="no-such-model", **USAGE, status=404),
]

REFUSED_IN_THE_STREAM = [
    completion("grammar", structured_outputs={"regex": "[unclosed"}, stream=True),
    # the renderer turned its text into a list of parts
    chat("echoed-chat", begun, echo=True, stream=True),
    chat("cut-to-nothing-streamed", truncate_prompt_tokens=0, **USAGE),
    chat("logit-bias-out-of-range-streamed", logit_bias={"999999": 1}, **USAGE),
    completion("stop-ids-out-of-range-streamed", stop_token_ids=[999999], **USAGE),
    chat("top-logprobs-too-many-streamed", logprobs=True, top_logprobs=999, stream=True),
    completion("two-things-streamed", logit_bias={"-1": 1}, truncate_prompt_tokens=0, stream=True),
    chat("choice-empty-streamed", structured_outputs={"choice": []}, stream=True),
    chat("thinking-budget-streamed", thinking_token_budget=5, stream=True),
]
"""Requests that the engine refuses after its HTTP handler has accepted them: it answers 200 and an
error event.
"""
