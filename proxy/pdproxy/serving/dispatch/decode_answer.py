"""What the answer of a decode engine means: for the KV, for the client, and for the audit of its pair."""

from __future__ import annotations

from pdproxy.kit.errors import EngineError, EngineTimeoutError, EngineUnreachableError, OwnBodyRefusedError
from pdproxy.observe.events import DeadlinePassed
from pdproxy.serving.dispatch.attempt import Attempt
from pdproxy.serving.dispatch.failure_class import (
    error_kind,
    error_text,
    is_about_ours,
    is_clients_fault,
    is_of_kv,
    is_unknown_model,
    refused,
)
from pdproxy.serving.dispatch.recovery import AskAgain, CannotSplit, DecodeFailed, ModelRefused, PrefillFailed
from pdproxy.serving.kv.custody import End
from pdproxy.transfer.bodies import added_fields
from pdproxy.upstream.client import Answer
from pdproxy.wire import sse
from pdproxy.wire.request import Alone


def judge(attempt: Attempt, url: str, answer: Answer) -> AskAgain | CannotSplit | ModelRefused | None:
    """Decide what a whole answer means for the KV. Return why it can't go to the client, None if it can.

    Raises:
        EngineError: another engine may do better.
    """
    custody, relay = attempt.custody, attempt.relay
    if answer.status == 200:
        if sse.is_aborted(answer.body):
            raise EngineError(f"{url} gave the answer up half-way")
        if relay is not None and relay.usage is None:
            raise EngineError(f"{url} answered 200 with something that is no completion")
        if custody is not None:
            custody.end(End.LOADED)
        return None
    if not is_clients_fault(answer):
        raise refused(url, answer)
    if is_unknown_model(answer):
        return ModelRefused(url, answer)
    if answer.status == 400 and is_about_ours(answer, added_fields(attempt.request.parsed)):
        raise OwnBodyRefusedError(f"{url} refused what the client has not sent: {error_text(answer.body)}")
    if custody is None:
        return AskAgain() if answer.status == 400 and attempt.added_is_refused(url) else None
    if custody.handle.first is not None:
        # This leg is not the client's own request: only an engine that gets that can say what is wrong with it.
        return CannotSplit(Alone.PREFILL_REFUSED, exclude=custody.prefill)
    # 401 and 404 come from before the handler that releases KV.
    if answer.status == 400:
        error_type, param = error_kind(answer.body)
        if attempt.resources.transfer.contract.holder.refusal_released(error_type, param):
            custody.end(End.REFUSED)
    return None


def failed(
    attempt: Attempt, url: str, error: EngineError, *, data_came: bool, whole: bool, gave_up: bool, lost: bool
) -> DecodeFailed | PrefillFailed:
    """Decide what a failed leg means for the KV. Return its outcome.

    `data_came`: the first data, or a `whole` answer; `gave_up`: it was ended because the prefill has failed; `lost`: because the
    prefill engine was lost before its push.
    """
    custody, relay = attempt.custody, attempt.relay
    before_data, leave_out = not data_came or whole, None
    has_handle = custody is not None and custody.was_asked and before_data and not (gave_up or lost)
    if has_handle and custody is not None and is_of_kv(error, awaits_push=custody.awaits_push):
        leave_out = kv_failed(attempt, custody.prefill, url, is_counted=custody.was_unread)
    if custody is not None:
        if isinstance(error, EngineUnreachableError):
            custody.decode_answered()
        if gave_up and custody.decode_waits:
            custody.end(End.ABORTED)  # the prefill may still end: then its KV frees both sides
        elif lost:
            custody.decode_was_late(accepted=relay is not None and relay.status == 200)
        if lost:
            return PrefillFailed(custody.prefill, Alone.PREFILL_FAILED, error)
        if isinstance(error, EngineTimeoutError):
            custody.decode_was_late(accepted=relay is not None and relay.status == 200)
    if isinstance(error, EngineTimeoutError | EngineUnreachableError) and error.wait is not None and not data_came:
        attempt.resources.observers.notify(DeadlinePassed(error.wait.value, url))
    return DecodeFailed(url, error, not before_data, leave_out)


def kv_failed(attempt: Attempt, prefill: str, decode: str, *, is_counted: bool = False) -> str:
    """Count a prompt whose KV did not get from one engine to the other: once for each request, which may be the cause itself.

    `is_counted`: the engine has reported it, too. Return which of the two is left out if the prompt is tried again.
    """
    first = not attempt.request.kv_failed and not is_counted
    attempt.request.kv_failed = True
    return attempt.resources.transfers.failed(prefill, decode, first=first)


def kv_loaded(attempt: Attempt, decode: str, since: float) -> None:
    """Count a prompt whose KV was loaded, where that may be news. `since`: when it was sent."""
    custody, transfers = attempt.custody, attempt.resources.transfers
    if custody is not None and custody.how is End.LOADED and transfers.known.suspects:
        transfers.loaded(custody.prefill, decode, since)


def compare(attempt: Attempt, url: str) -> None:
    """Have the auditor compare the prompt lengths that both engines reported; of one alone, what was expected of its cache."""
    custody = attempt.custody
    usage = attempt.relay.usage if attempt.relay is not None else None
    if custody is None:
        attempt.cached(url, usage)
    elif usage is not None and not custody.promised:
        counted = custody.handle.prompt_tokens
        attempt.resources.auditor.compared(custody.prefill, url, counted, usage.prompt_tokens)
