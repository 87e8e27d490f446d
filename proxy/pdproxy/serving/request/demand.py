"""What a request asks for, as far as that is known before an engine works on it: tokens,
priority.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec

from pdproxy.scheduling.admission import BYTES_PER_TOKEN, MOST_TOKENS, RequestDemand
from pdproxy.wire.fields import lenient_integer
from pdproxy.wire.passthrough_body import NO_PAIRS, Pairs
from pdproxy.wire.request import Parsed, limit_of
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Prompt

MOST_ANSWERS = 2**14
"""To one prompt: engines refuse more (vLLM's `VLLM_MAX_N_SEQUENCES`), so that nobody may wait or
pay for them.
"""
PRIORITY = b"x-vllm-priority"
Lines = tuple[tuple[bytes, bytes], ...]
_SMALLEST, _LARGEST = -(2**63), 2**63 - 1
_integer: msgspec.json.Decoder[int] = msgspec.json.Decoder(int)


def demand_of(parsed: Parsed) -> RequestDemand:
    """Return what a generating request asks for."""
    prompts, fields = parsed.prompts, parsed.fields
    answers = 1
    if len(prompts) == 1:  # as in most requests
        tokens = tokens_of(prompts[0])
    elif prompts:
        tokens = sum(map(tokens_of, prompts))
        answers = len(prompts)
    else:
        tokens = parsed.body_bytes // BYTES_PER_TOKEN
        answers = parsed.unread
    n = best_of = 1
    asked = parsed.route.form.asked(fields)
    if "n" in asked:
        n = min(max(lenient_integer(asked["n"]) or 1, 1), MOST_ANSWERS)
        answers *= n
    priority = (_number(fields["priority"]) or 0) if "priority" in fields else 0
    if "best_of" in asked:
        best_of = -(-min(max(lenient_integer(asked["best_of"]) or 1, n), MOST_ANSWERS) // n)
    limit = limit_of(parsed) if prompts else _unread_limit(parsed)
    longest = parsed.body_bytes + MOST_TOKENS * (len(prompts) or parsed.unread)
    return RequestDemand(_bounded(tokens), answers, limit, priority, best_of, longest)


def _unread_limit(parsed: Parsed) -> int | None:
    """Return the most tokens of an answer to a request that only an engine reads, None if that may
    be any number.

    An engine may read an invocation as a chat or as a completion, of which only `max_tokens`
    counts.
    """
    if parsed.route is not Route.INVOCATIONS:
        limit = limit_of(parsed)
    elif (
        "max_tokens" in parsed.fields
        and (limit := lenient_integer(parsed.fields["max_tokens"])) is not None
    ):
        limit = max(limit, limit_of(parsed) or 0)
    else:
        return None
    return limit if limit and limit > 0 else None


def tokens_of(prompt: Prompt) -> int:
    """Return how many tokens a prompt is likely to have."""
    return prompt.text_bytes // BYTES_PER_TOKEN if prompt.tokens is None else prompt.tokens


def is_priority_known(parsed: Parsed) -> bool:
    """Return whether a body's priority was read. vLLM reads more than integers of 64 bits: "-5",
    -5.0 and longer ones.
    """
    raw = parsed.fields.get("priority")
    return raw is None or _number(raw) is not None


def _bounded(tokens: int) -> int:
    return tokens if 0 < tokens <= MOST_TOKENS else min(max(tokens, 1), MOST_TOKENS)


def prioritized(
    demand: RequestDemand, forward: Lines, allowed: tuple[int, int] | None, *, is_known: bool = True
) -> tuple[RequestDemand, Lines]:
    """Return the demand with the priority that counts, and the header lines that give engines this
    priority.

    `forward`: the client's lines that go on to engines. The header goes before the body's field,
    and is not read if it is no integer, as in vLLM 0.32. `allowed`: the least and the greatest that
    the request may have; `is_known`: whether the body's field was read.
    """
    if allowed is None and not forward:
        return demand, forward
    value = next((value for name, value in forward if name == PRIORITY), None)
    asked = None
    if value is not None:
        with suppress(ValueError):
            asked = int(value.decode("latin-1"))  # as vLLM reads it
    is_sent = asked is not None or is_known
    asked = demand.priority if asked is None else asked
    counts = asked if allowed is None else min(max(asked, allowed[0]), allowed[1])
    if counts != asked or (allowed is not None and not is_sent):
        forward = (*[line for line in forward if line[0] != PRIORITY], (PRIORITY, b"%d" % counts))
    counts = min(max(counts, _SMALLEST), _LARGEST)
    return (
        demand if counts == demand.priority else msgspec.structs.replace(demand, priority=counts)
    ), forward


def prioritized_in_body(
    demand: RequestDemand, parsed: Parsed, allowed: tuple[int, int] | None
) -> RequestDemand:
    """Return the demand with the priority that counts where engines read the body's alone; put that
    into the body if it is another one. `allowed`: as in `prioritized`.
    """
    if allowed is None:
        return demand
    counts = min(max(demand.priority, allowed[0]), allowed[1])
    if counts != demand.priority or not is_priority_known(parsed):
        parsed.fields["priority"] = msgspec.Raw(b"%d" % counts)
    return msgspec.structs.replace(demand, priority=counts)


def passed_demand(
    size: int, limit: int | None, pairs: Pairs = NO_PAIRS, *, generates: bool
) -> RequestDemand:
    """Return what a request asks for that one engine gets whole. `size`: bytes of its body;
    `limit`: as in `RequestDemand`.
    """
    times = max(pairs.times, 1)
    size += (times - 1) * pairs.size
    prompt = min(max(size // BYTES_PER_TOKEN, 1), MOST_TOKENS * times)
    return RequestDemand(
        prompt=prompt, answers=int(generates), limit=limit, longest=size + MOST_TOKENS * times
    )


def _number(raw: msgspec.Raw) -> int | None:
    """Return an integer of 64 bits, None for anything else."""
    if memoryview(raw).nbytes > 20:
        return None
    try:
        found = _integer.decode(raw)
    except msgspec.DecodeError:
        return None
    return found if _SMALLEST <= found <= _LARGEST else None
