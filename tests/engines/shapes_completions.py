"""Completions: forms of the prompt, form and end of the answer, sampling, and other fields of the
answer.
"""

from typing import Any

from .engine import BLOCK, CONTEXT
from .prompts import (
    ABSENT,
    ALONE_BEAM,
    ALONE_ECHO,
    ALONE_N,
    ALONE_PROMPT_LOGPROBS,
    ALONE_SHORT,
    EOS,
    FIRST_BYTE_OF_FOUR,
    FIRST_BYTE_OF_TWO,
    FORGED,
    GRAMMAR,
    IF,
    IM_START,
    JSON_SCHEMA,
    SCHEMA,
    SHIPS,
    STORY,
    USAGE,
    completion,
    exactly,
    ids,
    several,
    story,
    times,
)

CONTINUOUS: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
FIRST_IS_IF: dict[str, Any] = {"logit_bias": {str(IF): 100}}
FIRST_IS_EOS: dict[str, Any] = {"logit_bias": {EOS: 100}}

COMPLETION_SHAPES = [
    # Forms of the prompt.
    completion("completion"),
    completion("completion-no-model-named", model=None),
    completion("completion-model-absent", model=ABSENT),
    completion("completion-token-ids", ids),
    completion("completion-list", several),
    completion("completion-list-streamed", several, **USAGE),
    completion(
        "completion-list-of-token-ids", lambda nonce: [ids(nonce, 90), ids(nonce + "b", 140)]
    ),
    completion("completion-list-of-one", lambda nonce: [story(nonce)], stream=True),
    completion("completion-list-of-one-whole", lambda nonce: [ids(nonce)]),
    completion(
        "completion-list-of-seven",
        lambda nonce: [f"{at} {story(nonce)}" for at in range(7)],
        max_tokens=3,
    ),
    completion(
        "completion-list-one-short",
        lambda nonce: [story(nonce), nonce[:3]],
        alone=ALONE_SHORT,
        partly=True,
    ),
    completion(
        "completion-list-one-short-streamed",
        lambda nonce: [ids(nonce, 5), ids(nonce + "b", 100), ids(nonce + "c", 33)],
        alone=ALONE_SHORT,
        partly=True,
        **USAGE,
    ),
    completion("completion-list-logprobs", several, logprobs=1),
    completion("completion-list-logprobs-streamed", several, logprobs=1, **CONTINUOUS),
    completion("completion-list-stop", several, stop=["e"], max_tokens=30),
    completion("completion-list-token-ids-returned", several, return_token_ids=True),
    completion("completion-short", lambda nonce: nonce[-6:], alone=ALONE_SHORT),
    completion("completion-one-token", exactly(1), alone=ALONE_SHORT),
    completion("completion-block-less-one", exactly(BLOCK - 1), alone=ALONE_SHORT, stream=True),
    completion("completion-block", exactly(BLOCK)),
    completion("completion-block-and-one", exactly(BLOCK + 1), stream=True),
    completion("completion-two-blocks", exactly(2 * BLOCK)),
    completion("completion-1000-tokens", exactly(1000), **USAGE),
    completion("completion-long-text", times(8)),
    completion("completion-context-exactly", exactly(CONTEXT - 1), max_tokens=1),
    completion("completion-one-over-the-context", exactly(CONTEXT - 1), max_tokens=2, stream=True),
    completion(
        "completion-to-the-context", exactly(CONTEXT - 20), max_tokens=20, ignore_eos=True, **USAGE
    ),
    completion("completion-without-special-tokens", add_special_tokens=False),
    # The end is kept: the nonce is at the beginning of its first block.
    completion(
        "completion-truncated-prompt",
        lambda nonce: f"{STORY}{nonce}{STORY[:150]}",
        truncate_prompt_tokens=70,
    ),
    completion(
        "completion-truncated-to-its-head", truncate_prompt_tokens=70, truncation_side="right"
    ),
    completion(
        "completion-truncated-to-the-context",
        lambda nonce: ids(nonce, 3000),
        truncate_prompt_tokens=-1,
    ),
    completion(
        "completion-markers-in-the-text",
        lambda nonce: f"<|im_start|>{nonce}<|im_end|> {STORY}\t\u0000\r\n",
    ),
    completion(
        "completion-many-scripts",
        lambda nonce: f"{nonce} Où ça? 在哪里? 🚢👩‍👩‍👧 {STORY[:99]} שלום \ud83d\ude00",
    ),
    completion("completion-cache-salt", cache_salt="of-one-tenant"),
    # Form and end of the answer.
    completion("completion-streamed", stream=True),
    completion("completion-streamed-usage", **USAGE),
    completion("completion-streamed-continuous-usage", **CONTINUOUS),
    completion(
        "completion-streamed-no-usage", stream=True, stream_options={"include_usage": False}
    ),
    completion("completion-streamed-by-three", stream=True, stream_interval=3),
    completion("completion-max-tokens-1", max_tokens=1),
    completion("completion-max-tokens-1-streamed", max_tokens=1, **CONTINUOUS),
    completion("completion-max-tokens-2", max_tokens=2),
    completion("completion-max-tokens-2-streamed", max_tokens=2, **USAGE),
    completion("completion-max-tokens-absent", max_tokens=ABSENT),
    completion("completion-max-tokens-null", exactly(1990), max_tokens=None, **USAGE),
    completion("completion-max-completion-tokens", max_completion_tokens=3),
    completion("completion-stop", stop=["e", "st"], max_tokens=60),
    completion("completion-stop-streamed", stop=["e", "st"], max_tokens=60, **USAGE),
    completion(
        "completion-stop-included",
        stop="e",
        include_stop_str_in_output=True,
        max_tokens=60,
        stream=True,
    ),
    completion(
        "completion-stop-across-tokens",
        stop=["our ledg"],
        structured_outputs={"choice": ["harbour ledger"]},
    ),
    completion(
        "completion-stop-across-tokens-streamed",
        stop=["our ledg"],
        structured_outputs={"choice": ["harbour ledger"]},
        **USAGE,
    ),
    completion(
        "completion-stop-never", stop=["no such words", "nor these"], max_tokens=20, **USAGE
    ),
    completion("completion-stop-token-ids", stop_token_ids=list(range(300, 1200)), max_tokens=60),
    completion("completion-stop-first", stop=[" i"], **FIRST_IS_IF),
    completion("completion-stop-first-streamed", stop=[" i"], **FIRST_IS_IF, **USAGE),
    completion(
        "completion-stop-first-included",
        stop=[" if"],
        include_stop_str_in_output=True,
        **FIRST_IS_IF,
    ),
    completion("completion-stop-id-first", stop_token_ids=[IF], **FIRST_IS_IF),
    completion(
        "completion-stop-id-first-streamed", stop_token_ids=[IF], **FIRST_IS_IF, **CONTINUOUS
    ),
    completion("completion-eos-first", **FIRST_IS_EOS),
    completion("completion-eos-first-streamed", **FIRST_IS_EOS, **USAGE),
    completion("completion-eos-first-logprobs", logprobs=1, return_token_ids=True, **FIRST_IS_EOS),
    completion("completion-eos-shown", skip_special_tokens=False, **FIRST_IS_EOS),
    completion("completion-eos-ignored", ignore_eos=True, **FIRST_IS_EOS, **USAGE),
    completion("completion-eos-after-one", min_tokens=1, **FIRST_IS_EOS),
    completion("completion-eos-after-three", min_tokens=3, **FIRST_IS_EOS, **USAGE),
    completion(
        "completion-min-tokens", stop_token_ids=list(range(300, 3000)), min_tokens=9, max_tokens=40
    ),
    completion("completion-ignore-eos", ignore_eos=True, max_tokens=80, **USAGE),
    completion(
        "completion-special-shown",
        skip_special_tokens=False,
        logit_bias={IM_START: 100},
        stream=True,
    ),
    completion("completion-special-hidden", logit_bias={IM_START: 100}, **USAGE),
    completion(
        "completion-special-without-spaces",
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        logit_bias={IM_START: 100},
    ),
    completion("completion-cut-in-a-character", structured_outputs=SHIPS, max_tokens=6),
    completion(
        "completion-cut-in-a-character-streamed", structured_outputs=SHIPS, max_tokens=6, **USAGE
    ),
    completion("completion-half-a-character", allowed_token_ids=[FIRST_BYTE_OF_TWO], max_tokens=1),
    completion(
        "completion-half-characters-streamed",
        allowed_token_ids=[FIRST_BYTE_OF_FOUR],
        max_tokens=4,
        **USAGE,
    ),
    completion(
        "completion-characters-streamed", structured_outputs=SHIPS, max_tokens=40, stream=True
    ),
    completion("completion-logprobs", logprobs=3),
    completion("completion-logprobs-streamed", logprobs=2, **USAGE),
    completion("completion-logprobs-0", logprobs=0),
    completion("completion-logprobs-1-first-token", logprobs=1, max_tokens=1),
    completion("completion-logprobs-5-as-ids", logprobs=5, return_tokens_as_token_ids=True),
    completion(
        "completion-logprobs-as-ids-streamed",
        logprobs=1,
        return_tokens_as_token_ids=True,
        stream=True,
    ),
    completion(
        "completion-logprobs-of-named-tokens", logprobs=1, logprob_token_ids=[300, 400, 401]
    ),
    completion(
        "completion-logprobs-of-half-characters", allowed_token_ids=[177], logprobs=1, max_tokens=3
    ),
    completion("completion-token-ids-returned", return_token_ids=True),
    completion("completion-token-ids-returned-streamed", return_token_ids=True, **USAGE),
    # Served by one engine alone.
    completion("completion-echo", echo=True, alone=ALONE_ECHO),
    completion("completion-echo-streamed", echo=True, alone=ALONE_ECHO, **USAGE),
    completion("completion-echo-logprobs", echo=True, logprobs=1, max_tokens=1, alone=ALONE_ECHO),
    completion("completion-echo-only", ids, echo=True, logprobs=1, max_tokens=0, alone=ALONE_ECHO),
    completion("completion-echo-list", several, echo=True, logprobs=0, alone=ALONE_ECHO),
    completion("completion-prompt-logprobs", prompt_logprobs=1, alone=ALONE_PROMPT_LOGPROBS),
    completion(
        "completion-prompt-logprobs-0",
        ids,
        prompt_logprobs=0,
        logprobs=1,
        alone=ALONE_PROMPT_LOGPROBS,
    ),
    completion("completion-n", n=2, temperature=0.8, seed=7),
    completion(
        "completion-n-of-three",
        n=3,
        temperature=0.7,
        seed=2,
        stream=True,
        max_tokens=6,
    ),
    completion("completion-n-streamed", n=4, temperature=0.9, seed=3, max_tokens=6, **USAGE),
    completion("completion-n-equal", ids, n=3, temperature=0.9, top_k=1, logprobs=1),
    completion(
        "completion-n-list", several, n=2, temperature=0.9, seed=3, max_tokens=6, alone=ALONE_N
    ),
    completion(
        "completion-n-list-streamed",
        several,
        n=2,
        temperature=0.9,
        seed=3,
        max_tokens=6,
        alone=ALONE_N,
        stream=True,
    ),
    completion("completion-beam", use_beam_search=True, max_tokens=4, alone=ALONE_BEAM),
    completion("completion-beams", use_beam_search=True, n=2, max_tokens=4, alone=ALONE_BEAM),
    # Sampling.
    completion("completion-n-of-one", n=1, best_of=1),
    completion("completion-seed", temperature=0.9, seed=11, top_p=0.95, top_k=50),
    completion("completion-seed-streamed", temperature=0.9, seed=12, stream=True),
    completion("completion-seed-negative", temperature=1.5, seed=-4),
    completion("completion-seed-greedy", seed=1234),
    completion("completion-top-k", temperature=1.0, top_k=5, seed=1, **USAGE),
    completion("completion-top-p", temperature=1.0, top_p=0.3, seed=2),
    completion("completion-min-p", temperature=1.2, min_p=0.2, seed=3),
    completion("completion-temperature-absent", temperature=ABSENT, seed=4),
    completion("completion-list-seed", several, temperature=0.8, seed=5),
    completion("completion-logit-bias", logit_bias={"400": 100, "401": 99}),
    completion("completion-logit-bias-against", logit_bias={"300": -100, "400": -100}, stream=True),
    completion(
        "completion-penalties",
        presence_penalty=0.5,
        frequency_penalty=0.7,
        repetition_penalty=1.3,
        max_tokens=40,
    ),
    completion("completion-presence-penalty", presence_penalty=1.9, max_tokens=30, **USAGE),
    completion("completion-frequency-penalty", frequency_penalty=-1.5, max_tokens=30),
    completion("completion-repetition-penalty", repetition_penalty=1.8, max_tokens=30, stream=True),
    completion("completion-bad-words", bad_words=["e", " the"], max_tokens=30),
    completion("completion-allowed-token-ids", allowed_token_ids=[300, 400, 401, 500], **USAGE),
    completion("completion-choice", structured_outputs={"choice": ["harbour", "ledger"]}),
    completion(
        "completion-choice-logprobs",
        structured_outputs={"choice": ["harbour", "ledger"]},
        logprobs=2,
        **USAGE,
    ),
    completion(
        "completion-regex", structured_outputs={"regex": "[a-c]{4}-[0-9]{3}"}, max_tokens=30
    ),
    completion(
        "completion-regex-streamed", structured_outputs={"regex": "[a-c]{4}-[0-9]{3}"}, stream=True
    ),
    completion(
        "completion-regex-seed",
        structured_outputs={"regex": "[a-z]{20}"},
        temperature=1.0,
        seed=8,
        max_tokens=30,
    ),
    completion("completion-grammar", structured_outputs={"grammar": GRAMMAR}, max_tokens=30),
    completion(
        "completion-grammar-streamed",
        structured_outputs={"grammar": GRAMMAR},
        max_tokens=30,
        **CONTINUOUS,
    ),
    completion("completion-structured-json", structured_outputs={"json": SCHEMA}, max_tokens=60),
    completion(
        "completion-structured-json-object",
        structured_outputs={"json_object": True},
        max_tokens=30,
        stream=True,
    ),
    completion("completion-json-schema", response_format=JSON_SCHEMA, max_tokens=60),
    completion(
        "completion-json-object", response_format={"type": "json_object"}, max_tokens=40, **USAGE
    ),
    completion("completion-text-format", response_format={"type": "text"}),
    # Ids, and fields that a client must not use.
    completion("completion-header-id", header_id=True, pinned_id=True),
    completion("completion-forged-handle", kv_transfer_params=FORGED),
    completion("completion-extra-arguments", vllm_xargs={"own": 1}),
    completion("completion-unknown-field", no_such_field={"a": 1}),
    completion("completion-user", user="somebody", priority=0, session_id="s-1"),
    completion("completion-priority", priority=5),
]
