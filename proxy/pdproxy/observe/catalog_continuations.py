"""The rows of the table of metrics (`observe.catalog`) about streams that other engines go on with. Only data."""

from __future__ import annotations

from pdproxy.observe.description import Description, Kind, Label

RESULTS = (
    ("continued", "another engine goes on; counted at its first data"),
    ("finished", "only the end of the stream was missing: the client got it from pdproxy"),
    ("refused", "nobody may go on with this stream, or can: it ended with an error"),
    ("failed", "another engine was asked to go on, and sent no data: the stream ended with an error"),
)
CAUSES = (
    ("eof", "the connection closed, or the stream ended without its end mark"),
    ("unreachable", "the engine could not be reached"),
    ("deadline", "the engine sent nothing in time"),
    ("stalled", "the engine stands still"),
    ("aborted", "the engine gave the answer up"),
    ("error_event", "the engine sent an error"),
)
REASONS = (
    ("n", "several choices"),
    ("beam", "beam search"),
    ("echo", "the client wants its prompt back"),
    ("prompt_logprobs", "the client wants log probabilities of its prompt"),
    ("logprobs", "the client wants log probabilities"),
    ("media", "the prompt is not only text"),
    ("grammar", "a grammar binds the answer: it would begin anew"),
    ("penalty", "penalties depend on the answer so far"),
    ("bad_words", "bad_words depend on the answer so far"),
    ("thinking_budget", "thinking_token_budget depends on the answer so far"),
    ("repetition_detection", "repetition_detection depends on the answer so far"),
    ("seed", "drawn by chance with a seed: another engine would draw otherwise"),
    ("sampled", "drawn by chance, and continuations.sampled is off"),
    ("hidden_reasoning", "the client does not want the reasoning, so that its tokens are not known"),
    ("reasoning_seen", "a parser of the engine makes the events, and the answer is not known to be at its content"),
    ("tools", "the request has tools, whose parser would begin anew: not all engines derender, or a tool is forced"),
    ("stop_pending", "the text ends with the beginning of a stop string"),
    ("half_letter", "it is not known where the text that was sent ends in the tokens"),
    ("no_ids", "the token ids of the prompt or of the answer are not known"),
    ("derender", "no engine has rendered the request, or parsed what came of it"),
    ("too_long", "the answer fills the context, or is too long to be given to another engine"),
    ("memory", "continuations.max_bytes"),
    ("unknown_field", "the request has a field that may depend on the answer so far"),
    ("no_limit", "it is not known how many tokens the answer may still have"),
    ("none_left", "limits.continuations"),
    ("retry_budget", "no place of the retry budget came free in deadlines.retry"),
    ("engines_lost", "engines disappeared under the request, and it may be the cause"),
    ("deadline", "no data in deadlines.continuation, or in another deadline before"),
    ("no_engine", "no engine could be leased for it"),
    ("refused", "the engine that was to go on failed, or refused it"),
)
CONTINUATIONS = Description(
    "pdproxy_continuations_total",
    Kind.COUNTER,
    "Streams whose engine failed after their first data, by what became of them",
    "streams",
    (Label("result", RESULTS), Label("reason", (*CAUSES, *(one for one in REASONS if one[0] != "deadline")))),
    together=(
        *((result, cause) for result in ("continued", "finished") for cause, _ in CAUSES),
        *((result, reason) for result in ("refused", "failed") for reason, _ in REASONS),
    ),
)
CONTINUATION_SECONDS = Description(
    "pdproxy_continuation_seconds",
    Kind.HISTOGRAM,
    "Seconds without data in a stream, from the failure of its engine to the first data of the one that went on",
    "seconds",
    (),
    (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
