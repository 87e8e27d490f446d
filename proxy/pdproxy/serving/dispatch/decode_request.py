"""What the answering engine of an attempt is sent, and where its answer goes."""

from __future__ import annotations

from pdproxy.kit.errors import KvGoneError
from pdproxy.serving.dispatch.attempt import Attempt
from pdproxy.serving.kv.custody import Custody
from pdproxy.serving.stream.id_sink import IdSink, RenamedReads
from pdproxy.serving.stream.relay import Relay
from pdproxy.serving.stream.splice_sink import SpliceSink
from pdproxy.transfer.bodies import alone_body
from pdproxy.transfer.contract import Handle
from pdproxy.transfer.splice import Splice
from pdproxy.upstream.client import Answer, EngineClient
from pdproxy.upstream.connection import Leg, Message, Reads, Sink
from pdproxy.wire.request import Parsed, Prompt
from pdproxy.wire.usage import with_cache


def alone_message(attempt: Attempt, client: EngineClient, parsed: Parsed, prompt: Prompt | None) -> Message:
    """Return the request to one engine that serves the whole of it, or one of its prompts."""
    headers = attempt.request.headers
    body = alone_body(attempt.parsed_for(attempt.answering_url, parsed), prompt)
    return client.request(headers.path, headers.headers, body)


def decode_message(attempt: Attempt, client: EngineClient, parsed: Parsed, prompt: Prompt, handle: Handle) -> Message:
    """Return the request to a decode engine, with the handle that it is given."""
    leg = attempt.resources.transfer.contract.decode(parsed, prompt, handle, attempt.dispatch)
    shared, headers = attempt.shared_id, attempt.request.headers
    own = headers.headers if shared is None else headers.named(shared)
    return client.request(leg.route.path, own + leg.headers, leg.body)


def sink(attempt: Attempt, relay: Relay) -> Sink:
    """Return what gets the engine's answer: the relay, or what changes the answer on its way there.

    Raises:
        KvGoneError: the handle has ended, whose first token the answer would begin with.
    """
    custody, shared = attempt.custody, attempt.shared_id
    if custody is None or (shared is None and custody.handle.first is None):
        return relay
    request, handle = attempt.request, custody.handle
    if shared is not None:
        return IdSink(relay, shared, request.headers.shown_id)
    if not isinstance(handle, Handle):
        raise KvGoneError(f"the KV at {custody.prefill} is gone")
    return SpliceSink(relay, Splice(request.parsed, handle, request.headers.request_id))


def is_framing_kept(attempt: Attempt) -> bool:
    """Return whether the client's answer has the same lengths as the engine's, so that reads may take the fast path."""
    shared = attempt.shared_id
    return shared is None or len(shared) == len(attempt.request.headers.shown_id)


def reads_of(attempt: Attempt, leg: Leg | None) -> Reads | None:
    """Return a leg as its relay reads it. Call it before the request is dropped."""
    shared = attempt.shared_id if attempt.custody is not None else None
    if shared is None or leg is None:
        return leg
    return RenamedReads(leg, shared, attempt.request.headers.shown_id)


def new_relay(attempt: Attempt) -> Relay:
    """Make the relay for an attempt's answer. The cache counts in its usage are those of the prefill engine."""
    relay = attempt.relay = attempt.request.new_relay()
    if attempt.custody is not None:
        count_cached(relay, attempt.custody)
    return relay


def with_cached_counts(attempt: Attempt, answer: Answer) -> Answer:
    """Return a whole answer with those counts, which may have come behind it."""
    custody = attempt.custody
    assert custody is not None
    cached, created = custody.handle.cached_tokens, custody.handle.created_cache_tokens
    return Answer(answer.status, answer.headers, with_cache(answer.body, cached=cached, created=created))


def count_cached(relay: Relay, custody: Custody) -> None:
    """Have the answer's usage show what the prefill engine found in its cache, where the decode engine can't know it."""
    relay.filter.cached_tokens = custody.handle.cached_tokens
    relay.filter.created_cache_tokens = custody.handle.created_cache_tokens
