"""Checks of what clients get: a split answer is the same as that of one engine alone, for every
form of request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdproxy.observe.events import ENCODED, LegFailed, MediaEncoded
from pdproxy_lab.conformance import requests
from pdproxy_lab.conformance.check import Check
from pdproxy_lab.conformance.pair_under_test import PairUnderTest, SplitRequest
from pdproxy_lab.conformance.requests import (
    CHAT,
    CHAT_STREAM,
    COMPLETION,
    COMPLETION_STREAM,
    MESSAGE,
    MESSAGE_STREAM,
    RESPONSE,
    RESPONSE_STREAM,
    Request,
    Shape,
)
from pdproxy_lab.conformance.results import FailedError, NotJudgedError

_TRIES = 2
"""Other kernels may decide a near-tie between two tokens differently, but hardly twice in a row."""


async def compare(
    pair: PairUnderTest, *shapes: Shape, also: Callable[[Request], Request] = lambda one: one
) -> str:
    """Compare the answers to these forms of requests, one after the other. `also` changes each
    request.
    """
    remarks: list[str] = []
    for shape in shapes:
        for tried in range(1, _TRIES + 1):
            split = await pair.split(also(pair.request(shape)))
            different, judged = await against_others(pair, split)
            if not different:
                break
            if tried == _TRIES:
                raise FailedError(
                    f"a {shape.name}: {', '.join(different)}; twice, with two prompts"
                )
            remarks.append(f"the first of two {shape.name}s differed")
    ids = "ids, " if split.answer.ids else ""
    return "; ".join([f"the same {ids}text, finish, usage and fields as {judged}", *remarks])


async def against_others(pair: PairUnderTest, split: SplitRequest) -> tuple[list[str], str]:
    """Return how a split answer differs from those of engines alone, and the names of these
    engines.

    Raises:
        NotJudgedError: no engine gave an answer that proves something.
    """
    asked, answer = split.request, split.answer
    different: list[str] = []
    others: list[str] = []
    if pair.able_alone is not None:
        url, name = pair.able_alone
        before = await pair.scraped(url)
        alone = await pair.alone(pair.at(url), asked)
        after = await pair.scraped(url)
        transferred = before is not None and after is not None and after.external > before.external
        if not transferred:
            different += answer.differences(alone, name)
            others.append(name)
    if pair.options.plain is not None:
        different += answer.differences(
            await pair.alone(pair.at(pair.options.plain), asked), "the plain engine"
        )
        others.append("the plain engine")
    if different:
        return different, " and ".join(others)
    if not others and pair.able_alone is None:
        raise NotJudgedError(
            f"no engine of {pair.contract.name} may be asked alone: name another one with --plain"
        )
    if not others:
        raise NotJudgedError(
            "D got KV of the prompt by transfer when it was asked alone, too: name an engine "
            "with --plain"
        )
    due = pair.due(answer.prompt_tokens)
    if split.asked_decode and split.arrived is not None and split.arrived.all < due:
        raise NotJudgedError(
            "the answers are the same, but D computed the prompt itself: that proves nothing"
        )
    return [], " and ".join(others)


def _check(name: str, does: str, shapes: Sequence[Shape]) -> Check:
    async def run(pair: PairUnderTest) -> str:
        return await compare(pair, *shapes)

    def whole(pair: PairUnderTest) -> str | None:
        routes = pair.contract.capabilities.routes
        left = [shape.route.path for shape in shapes if shape.route not in routes]
        return f"with {pair.contract.name} one engine serves {left[0]} whole" if left else None

    return Check(
        name,
        f"{does}, through the proxy and by one engine alone; greedy answers were compared",
        run,
        whole,
    )


async def picture(pair: PairUnderTest) -> str:
    """Encoder engines encode the picture of a chat, and the answer is right."""
    tap = pair.stand.tap
    since = tap.mark()
    same = await compare(pair, CHAT, CHAT_STREAM, also=requests.with_picture)
    found = [event.result for event in tap.events(MediaEncoded, since)]
    if not found or set(found) != {ENCODED[0][0]}:
        errors = "; ".join(event.error for event in tap.events(LegFailed, since))
        raise FailedError(
            f"the answers are right, but encoder engines have not encoded all pictures: "
            f"{', '.join(found) or 'none was asked'}{f' ({errors})' if errors else ''}"
        )
    return f"encoder engines have encoded {len(found)} pictures; {same}"


def _why_no_picture(pair: PairUnderTest) -> str | None:
    if not any(engine.encodes for engine in pair.settings.pool.nodes):
        return "there is no encoder engine"
    if not pair.contract.capabilities.media:
        return f"with {pair.contract.name} one engine serves media whole"
    return None


async def ids(pair: PairUnderTest) -> str:
    """A stream has token ids if the client asked for them, and not otherwise."""
    seen = []
    for shape in (COMPLETION_STREAM, CHAT_STREAM):
        split = await pair.split(pair.request(shape))
        answer, what = split.answer, shape.name
        if not answer.ids or not answer.prompt_ids:
            raise FailedError(
                f"a {what} with return_token_ids has {len(answer.ids)} ids, "
                f"{len(answer.prompt_ids)} of its prompt"
            )
        if (
            len(answer.ids) != answer.completion_tokens
            or len(answer.prompt_ids) != answer.prompt_tokens
        ):
            raise FailedError(
                f"a {what} has {len(answer.ids)} ids for {answer.completion_tokens} tokens and "
                f"{len(answer.prompt_ids)} for "
                f"the {answer.prompt_tokens} of its prompt"
            )
        different, _ = await against_others(pair, split)
        if different:
            raise FailedError(f"a {what}: {', '.join(different)}")
        unasked = await pair.split(pair.request(_without_ids(shape)))
        if unasked.answer.ids or unasked.answer.prompt_ids:
            raise FailedError(f"a {what} without return_token_ids has ids")
        different, _ = await against_others(pair, unasked)
        if different:
            raise FailedError(f"a {what} without return_token_ids: {', '.join(different)}")
        seen.append(f"{len(answer.ids)} ids and {len(answer.prompt_ids)} of the prompt in a {what}")
    return f"{', '.join(seen)}; none if they were not asked for"


def _without_ids(shape: Shape) -> Shape:
    return Shape(route=shape.route, stream=shape.stream, max_tokens=shape.max_tokens, ids=False)


async def wrong_handle(pair: PairUnderTest) -> str:
    """A client's own KV handle reaches no engine and changes nothing."""
    foreign = f"made-up-{pair.mark()}"
    made_up = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": foreign,
        "remote_request_id": foreign,
        "remote_host": "127.0.0.1",
        "remote_port": 9,
        "remote_block_ids": [[1, 2, 3]],
        "transfer_id": foreign,
        "first_tok": 1,
        "disagg_spec": {
            "req_id": foreign,
            "receiver_host": foreign,
            "receiver_init_port": [9],
            "receiver_alloc_port": [9],
        },
        "kvcache_load_keys": [foreign],
    }
    tap, legs = pair.stand.tap, 0
    for shape in (COMPLETION, CHAT_STREAM):
        for place in ("kv_transfer_params", "ec_transfer_params", "vllm_xargs"):
            since = tap.mark()
            split = await pair.split(
                requests.with_field(pair.request(shape), place, _in(place, made_up))
            )
            clean = requests.without_field(split.request, place)
            reached = [leg for leg in tap.legs(since) if foreign.encode() in leg.body]
            if reached:
                raise FailedError(f"a {shape.name}'s own {place} reached {reached[0].url}")
            legs += len(tap.legs(since))
            url = pair.at(pair.able_alone[0]) if pair.able_alone is not None else None
            if url is None and pair.options.plain is not None:
                url = pair.at(pair.options.plain)
            if url is None:
                continue
            different = split.answer.differences(await pair.alone(url, clean), "an engine alone")
            if different:
                raise FailedError(f"a {shape.name} with {place} of its own: {', '.join(different)}")
    return f"{legs} requests to the engines were searched: none has it, and the answers are right"


def _in(place: str, handle: dict[str, object]) -> dict[str, object]:
    return {"kv_transfer_params": handle} if place == "vllm_xargs" else handle


CHECKS = (
    _check("completion", "a completion", [COMPLETION]),
    _check("completion_stream", "a streamed completion", [COMPLETION_STREAM]),
    _check("chat", "a chat", [CHAT]),
    _check("chat_stream", "a streamed chat", [CHAT_STREAM]),
    _check("response", "a response", [RESPONSE]),
    _check("response_stream", "a streamed response", [RESPONSE_STREAM]),
    _check("message", "a message", [MESSAGE]),
    _check("message_stream", "a streamed message", [MESSAGE_STREAM]),
    Check(
        "picture",
        "a chat with a picture, streamed and not, through the proxy and by one engine alone; what "
        "the encoder engines did was read in the proxy",
        picture,
        _why_no_picture,
    ),
    _check(
        "one_token",
        "a completion and a streamed chat with max_tokens 1",
        [Shape(max_tokens=1), Shape(route=CHAT.route, stream=True, max_tokens=1)],
    ),
    Check(
        "ids_in_stream",
        "streams with return_token_ids and without, through the proxy and by D alone",
        ids,
    ),
    Check(
        "wrong_handle",
        "requests with kv_transfer_params, ec_transfer_params and vllm_xargs made up by the "
        "client; every body that the"
        " proxy sent to the engines was searched for them",
        wrong_handle,
    ),
)
