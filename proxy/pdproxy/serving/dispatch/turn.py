"""Turns of conversations from an attempt's side: which prompt it is, KV for its prefill, and what
its answer leaves behind.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import structs

from pdproxy.fleet.engine import Engine
from pdproxy.scheduling.leases import Lease
from pdproxy.scheduling.scheduler import Scheduler
from pdproxy.scheduling.turn_before import FoundTurn, TurnEnd
from pdproxy.serving.dispatch.attempt import Attempt
from pdproxy.serving.dispatch.prompt_request import PromptRequest
from pdproxy.serving.dispatch.tokenizing import MAX_BYTES
from pdproxy.serving.kv.custody import Custody
from pdproxy.serving.kv.open_turns import OpenTurn, OpenTurns
from pdproxy.serving.stream.relay import Relay
from pdproxy.tokens.ids import TokenIds
from pdproxy.transfer.contract import Dispatch, Handle
from pdproxy.transfer.kept_turn import SCOPE_BYTES, TurnRecord, scope_of
from pdproxy.transfer.turns import ids_text, shown_in_streams
from pdproxy.upstream.client import Answer
from pdproxy.wire import tokens
from pdproxy.wire.fields import has_value, is_absent
from pdproxy.wire.request import Parsed
from pdproxy.wire.route_form import Prompt

_FAILED = 500
"""The first status that is an engine's failure."""


def key_of(parsed: Parsed, prompt: Prompt, ids: TokenIds | None) -> bytes | None:
    """Return what a prompt's turn is found by: its scope and its ids. None if the ids are not known
    before the prefill.

    Prompts that are not only text have none: equal ids would not mean equal KV.
    """
    listed: bytes | None = None
    if ids is not None:
        listed = ids.json
    elif (
        prompt.tokens is not None
        and prompt.raw is not None
        and is_absent(parsed.fields, "truncate_prompt_tokens")
    ):
        listed = bytes(prompt.raw) if memoryview(prompt.raw).nbytes <= MAX_BYTES else None
    text = None if listed is None else ids_text(listed)
    return None if text is None else _scope(parsed) + text


def _scope(parsed: Parsed) -> bytes:
    salt = parsed.fields.get("cache_salt")
    return scope_of(parsed.model, b"" if salt is None else bytes(salt))


class TurnBefore:
    """KV of the turn before in one prefill leg, if there is any; and how long the leg takes
    without.
    """

    __slots__ = ("_answered", "_found", "_lease", "_now", "_scheduler", "_since")

    def __init__(
        self,
        scheduler: Scheduler,
        lease: Lease,
        found: FoundTurn | None,
        now: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._lease = lease
        self._found = found
        self._now = now
        self._since = now()
        self._answered = False

    def __repr__(self) -> str:
        return f"<TurnBefore {self._found.tokens if self._found is not None else 'no'} tokens>"

    def spend(self) -> bytes | None:
        """Give the KV to the prefill leg whose request is written in this step. Return what its
        engine is sent, None for nothing.

        It may have gone while the engine was connected to: then the prompt is prefilled without.
        """
        found = self._found
        if found is not None and not found.is_there():
            self._found = None
            found.end(TurnEnd.UNUSED)
            return None
        return None if found is None else found.params

    def has_failed(self, status: int) -> bool:
        """Take the status of the engine's answer. Return whether the prompt must be asked again
        without the KV: the KV may be gone, and the prompt is sound.
        """
        self._answered = True
        if self._found is None or status < _FAILED:
            return False
        self._found.end(TurnEnd.REFUSED)
        self._found = None
        return True

    def prefilled(self, handle: Handle) -> None:
        """The leg has brought a handle of the prompt."""
        found, self._found = self._found, None
        if found is not None:
            found.end(TurnEnd.USED)
        else:
            created = handle.created_cache_tokens
            tokens = handle.prompt_tokens if created is None else created
            self._scheduler.prefilled(self._lease, tokens, self._now() - self._since)

    def hung(self) -> str | None:
        """The leg has reached its deadline. Return the decode engine whose KV it was given, None if
        it was given none.

        Nobody knows which of the two does not answer the other.
        """
        found, self._found = self._found, None
        if found is None:
            return None
        found.end(TurnEnd.HUNG)
        return found.decode

    def over(self, *, asked: bool) -> None:
        """The leg is over. `asked`: the engine has been sent the prompt, and may still pull if it
        has not answered.
        """
        found, self._found = self._found, None
        if found is not None:
            found.end(TurnEnd.UNUSED if self._answered or not asked else TurnEnd.LEFT)


def turn_before(
    request: PromptRequest, attempt: Attempt, lease: Lease, sent: TokenIds | None
) -> TurnBefore:
    """Return the KV of the turn before for the attempt's prefill leg, if there is any. `lease`: of
    the prefill engine.

    `sent`: the ids that the engine is sent. It compares nothing: what it tokenizes itself might not
    be what the KV is of.
    """
    found, prompt = attempt.assignment.turn, request.prompt
    exact = sent is not None or (prompt is not None and prompt.tokens is not None)
    if found is not None and not (exact and found.take()):
        found = None
    return TurnBefore(request.resources.scheduler, lease, found, request.resources.now)


def with_turn(dispatch: Dispatch, params: bytes | None) -> Dispatch:
    """Return a dispatch that has the prefill engine pull the KV of the turn before; with None, as
    it was before.
    """
    return dispatch if params is dispatch.turn else structs.replace(dispatch, turn=params)


def opened(
    request: PromptRequest,
    attempt: Attempt,
    turns: OpenTurns,
    custody: Custody,
    handle: Handle,
    engine: Engine,
) -> OpenTurn | None:
    """Begin the turn whose decode engine is asked now with `handle`, None if it will keep no KV of
    it.
    """
    if not handle.params:
        return None
    record = TurnRecord(
        decode=engine.url,
        decode_run=engine.in_ledger.run_number,
        prefill=custody.prefill,
        prefill_run=custody.prefill_run or 0,
        remote_request_id=handle.remote_request_id,
        model=request.parsed.model,
        authorization=request.headers.authorization,
        prompt=_served(request, handle),
        prompt_tokens=handle.prompt_tokens,
        may_stop=not is_absent(request.parsed.fields, "stop"),
    )
    evidence = engine.in_ledger.evidence
    in_answer = not request.parsed.stream or (
        evidence is not None and shown_in_streams(evidence.version)
    )
    turn = turns.open(record, in_answer=in_answer)
    if turn is not None and not request.parsed.stream and request.parsed.route.form.returns_ids:
        attempt.dispatch = structs.replace(attempt.dispatch, answer_ids=True)
    return turn


def _served(request: PromptRequest, handle: Handle) -> bytes | None:
    """Return the key of the prompt on which the engines have worked, None if it is not known or
    can't be compared.
    """
    served = handle.token_ids
    key, prompt, ids = request.key, request.prompt, request.ids
    if key is None or served is None or prompt is None:
        return None
    count = prompt.tokens if ids is None else ids.count
    if ids is not None and ids.json != served:
        text = ids_text(served)  # the prefill engine's own
        if text is None:
            return None
        key, count = key[:SCOPE_BYTES] + text, text.count(b",")
    return key if count == handle.prompt_tokens else None


def streamed(turn: OpenTurn, relay: Relay) -> None:
    """Take a stream that has come to its end."""
    _take_handle(turn, relay)
    turn.answered(
        relay.fast_path.ids, None if relay.usage is None else relay.usage.completion_tokens
    )


def whole(turn: OpenTurn | None, answer: Answer, parsed: Parsed, relay: Relay) -> Answer:
    """Take a whole answer, and return it as a client gets it: without ids that it has not asked
    for.
    """
    if turn is None:
        return answer
    body = answer.body
    if not parsed.route.form.returns_ids or has_value(parsed.fields, "return_token_ids", b"true"):
        _, listed = tokens.taken(body)
    else:
        body, listed = tokens.taken(tokens.without_prompt(body))
    ids = tokens.new()
    if listed:
        tokens.keep(b",".join(listed), ids)
    _take_handle(turn, relay)
    turn.answered(ids, None if relay.usage is None else relay.usage.completion_tokens)
    return answer if body is answer.body else structs.replace(answer, body=body)


def over(turn: OpenTurn, relay: Relay | None) -> None:
    """The leg of a turn is over. An answer that is not complete may have brought a handle: then its
    KV is released.
    """
    if relay is not None:
        _take_handle(turn, relay)
    turn.close()


def _take_handle(turn: OpenTurn, relay: Relay) -> None:
    """Give the turn the handle that its answer has brought, once."""
    params, relay.filter.handle = relay.filter.handle, None
    if params is not None:
        turn.keeps(params)
