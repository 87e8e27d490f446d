"""Checks of what clients see: a split answer is the one that an engine gives by itself, in every form of asking."""

from __future__ import annotations

from collections.abc import Sequence

from pdproxy.lab.conformance import questions
from pdproxy.lab.conformance.bench import Bench, Split
from pdproxy.lab.conformance.check import Check
from pdproxy.lab.conformance.questions import CHAT, CHAT_STREAM, COMPLETION, COMPLETION_STREAM, Shape
from pdproxy.lab.conformance.results import FailedError, NotJudgedError

_TRIES = 2
"""A near-tie between two tokens may be broken differently by other kernels; not twice in a row."""


async def compare(bench: Bench, *shapes: Shape) -> str:
    """Compare answers of these forms, one after the other."""
    remarks: list[str] = []
    for shape in shapes:
        for tried in range(1, _TRIES + 1):
            split = await bench.split(bench.question(shape))
            different, judged = await against_others(bench, split)
            if not different:
                break
            if tried == _TRIES:
                raise FailedError(f"a {shape.words}: {', '.join(different)}; twice, with two prompts")
            remarks.append(f"the first of two {shape.words}s differed")
    return "; ".join([f"the same ids, text, finish and usage as {judged}", *remarks])


async def against_others(bench: Bench, split: Split) -> tuple[list[str], str]:
    """Return how a split answer differs from what others say by themselves, and who they are.

    Raises:
        NotJudgedError: nobody says anything that proves something.
    """
    asked, said = split.question, split.said
    different: list[str] = []
    others: list[str] = []
    before = await bench.scraped(bench.decode.url)
    alone = await bench.alone(bench.at(bench.decode.url), asked)
    after = await bench.scraped(bench.decode.url)
    helped = before is not None and after is not None and after.external > before.external
    if not helped:
        different += said.differences(alone, "D alone")
        others.append("D alone")
    if bench.options.plain is not None:
        different += said.differences(await bench.alone(bench.at(bench.options.plain), asked), "the plain engine")
        others.append("the plain engine")
    if different:
        return different, " and ".join(others)
    if not others:
        raise NotJudgedError(
            "D had KV of the prompt by transfer when it was asked by itself, too: give --plain an engine"
        )
    due = bench.due(said.prompt_tokens)
    if split.asked_decode and split.arrived is not None and split.arrived.all < due:
        raise NotJudgedError("the answers are the same, but D computed the prompt itself: that proves nothing")
    return [], " and ".join(others)


def _check(name: str, does: str, shapes: Sequence[Shape]) -> Check:
    async def run(bench: Bench) -> str:
        return await compare(bench, *shapes)

    return Check(name, f"{does}, through the proxy and by one engine alone; greedy ids were compared", run)


async def ids(bench: Bench) -> str:
    """Token ids are in a stream for those who asked for them, and for nobody else."""
    seen = []
    for shape in (COMPLETION_STREAM, CHAT_STREAM):
        split = await bench.split(bench.question(shape))
        said, what = split.said, shape.words
        if not said.ids or not said.prompt_ids:
            raise FailedError(
                f"a {what} with return_token_ids brought {len(said.ids)} ids, {len(said.prompt_ids)} of its prompt"
            )
        if len(said.ids) != said.completion_tokens or len(said.prompt_ids) != said.prompt_tokens:
            raise FailedError(
                f"a {what} brought {len(said.ids)} ids for {said.completion_tokens} tokens and {len(said.prompt_ids)} for "
                f"the {said.prompt_tokens} of its prompt"
            )
        different, _ = await against_others(bench, split)
        if different:
            raise FailedError(f"a {what}: {', '.join(different)}")
        unasked = await bench.split(bench.question(_without_ids(shape)))
        if unasked.said.ids or unasked.said.prompt_ids:
            raise FailedError(f"a {what} without return_token_ids brought ids")
        different, _ = await against_others(bench, unasked)
        if different:
            raise FailedError(f"a {what} without return_token_ids: {', '.join(different)}")
        seen.append(f"{len(said.ids)} ids and {len(said.prompt_ids)} of the prompt in a {what}")
    return f"{', '.join(seen)}; none where they were not asked for"


def _without_ids(shape: Shape) -> Shape:
    return Shape(route=shape.route, stream=shape.stream, max_tokens=shape.max_tokens, ids=False)


async def wrong_handle(bench: Bench) -> str:
    """A client's own KV handle reaches no engine, and changes nothing."""
    evil = f"made-up-{bench.mark()}"
    made_up = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": evil,
        "remote_request_id": evil,
        "remote_host": "127.0.0.1",
        "remote_port": 9,
        "remote_block_ids": [[1, 2, 3]],
        "transfer_id": evil,
        "first_tok": 1,
        "disagg_spec": {"req_id": evil, "receiver_host": evil, "receiver_init_port": [9], "receiver_alloc_port": [9]},
        "kvcache_load_keys": [evil],
    }
    tap, legs = bench.stand.tap, 0
    for shape in (COMPLETION, CHAT_STREAM):
        for place in ("kv_transfer_params", "ec_transfer_params", "vllm_xargs"):
            since = tap.mark()
            split = await bench.split(questions.adding(bench.question(shape), place, _in(place, made_up)))
            clean = questions.without(split.question, place)
            reached = [leg for leg in tap.legs(since) if evil.encode() in leg.body]
            if reached:
                raise FailedError(f"a {shape.words}'s own {place} reached {reached[0].url}")
            legs += len(tap.legs(since))
            different = split.said.differences(await bench.alone(bench.at(bench.decode.url), clean), "D alone")
            if different:
                raise FailedError(f"a {shape.words} with {place} of its own: {', '.join(different)}")
    return f"{legs} requests to the engines looked through: no trace of it, and the answers are right"


def _in(place: str, handle: dict[str, object]) -> dict[str, object]:
    return {"kv_transfer_params": handle} if place == "vllm_xargs" else handle


CHECKS = (
    _check("completion", "a completion", [COMPLETION]),
    _check("completion_stream", "a streamed completion", [COMPLETION_STREAM]),
    _check("chat", "a chat", [CHAT]),
    _check("chat_stream", "a streamed chat", [CHAT_STREAM]),
    _check(
        "one_token",
        "a completion and a streamed chat with max_tokens 1",
        [Shape(max_tokens=1), Shape(route=CHAT.route, stream=True, max_tokens=1)],
    ),
    Check("ids_in_stream", "streams with return_token_ids and without, through the proxy and by D alone", ids),
    Check(
        "wrong_handle",
        "requests with kv_transfer_params, ec_transfer_params and vllm_xargs of the client's own making; every body that the"
        " proxy sent to the engines was searched for them",
        wrong_handle,
    ),
)
