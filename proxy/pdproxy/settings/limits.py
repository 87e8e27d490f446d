"""What is accepted of clients: the sections `deadlines`, `limits`, `overload` and `media`, and
their checks.

How long each wait may last, how much is accepted at once, who is served first while requests wait
for places, and which URLs of media engines may fetch. Owns names, units, bounds and defaults, each
with the reason for it.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from pdproxy.settings.errors import Mistakes
from pdproxy.settings.section import (
    AtOnce,
    Count,
    HeaderName,
    Host,
    OffOrSeconds,
    Option,
    Seconds,
    Section,
    Switch,
)
from pdproxy.wire.media_rule import Media, Urls

AUTO: Final = "auto"
EngineRequests = Literal["auto"] | Annotated[int, Meta(ge=0, le=2**31 - 1)]

Weight = Annotated[float, Meta(ge=0.001, le=1000)]
Priorities = Literal["within", "ignore"]


class Deadlines(Section, frozen=True):
    """How long each wait may last, in seconds, above 0 and up to a week.

    After a deadline the client gets a 504 or 503, or an error event if data has already been sent.
    """

    connect: AtOnce[Seconds] = 2.0
    """TCP connection to an engine, TLS handshake included. An engine in a data center that takes
    longer is down or overloaded. Where its URL has a name, resolving that is included, and several
    addresses share the time.
    """

    client_head: AtOnce[Seconds] = 30.0
    """A request's line and headers, from their first byte, or from the start of the connection if
    nothing arrives. And a TLS handshake.
    """

    client_body: AtOnce[Seconds] = 60.0
    """A body of which less than limits.min_send_rate comes in this time gets 408: its client holds
    a connection. The whole body may take as long as a request (total).
    """

    read_body: AtOnce[Seconds] = 10.0
    """Reading a large body in a reader process, the wait for a process included. 64 MiB of images
    take 0.2 s.
    """

    queue: AtOnce[Seconds] = 30.0
    """A request's wait for a place (limits.max_inflight), and its wait for an engine where all that
    could serve it stand still. Clients give up at about this time.
    """

    tokenize: AtOnce[Seconds] = 2.0
    """Making the token ids of a prompt (pools[].tokenize). After it the engines make them, unless
    the connector needs them first.
    """

    encode: AtOnce[Seconds] = 30.0
    """Encoding a request's media at encoder engines, other engines in place of failed ones
    included. After it the engine that computes the prompt encodes what is missing.
    """

    prefill: AtOnce[Seconds] = 120.0
    """The prefill leg, from its request to its whole answer. Long prompts in a queue take a minute.
    While the engine is seen to work (health.stalled_after), the wait goes on.
    """

    kv_ready: AtOnce[Seconds] = 10.0
    """Notices that KV is ready, after the prefill's answer. They come within milliseconds of it, or
    not at all.
    """

    kv_replay: AtOnce[Seconds] = 5.0
    """The answer of an engine that is asked for KV events again (pools[].kv_events). It answers
    between two steps.
    """

    first_token: AtOnce[Seconds] = 60.0
    """From the decode leg's request to its first data: KV transfer, and the wait for a place in the
    engine's batch. While the engine is seen to work (health.stalled_after), the wait goes on; not
    if it waits for KV that a prefill engine should have pushed.
    """

    between_tokens: AtOnce[Seconds] = 30.0
    """Between two reads of a stream. Then the engine is looked at: while it is seen to work
    (health.stalled_after), the wait goes on. Parsers of tool calls send nothing for a minute.
    """

    stream_comment: AtOnce[OffOrSeconds] = 15.0
    """A stream that has sent its client nothing for so long gets a comment, within twice that time
    at most: balancers close a connection that is silent for a minute. The first comment sends the
    status: later errors are events of the stream. 0: never.
    """

    continuation: AtOnce[Seconds] = 30.0
    """From the failure of a stream's engine to the first data of the engine that goes on with it.
    Then the stream ends with an error.
    """

    client_write: AtOnce[Seconds] = 60.0
    """A client that reads a waiting answer more slowly than limits.min_read_rate for this time is
    dropped: its stream holds KV on an engine.
    """

    websocket_idle: AtOnce[Seconds] = 60.0
    """A WebSocket over which no message goes in either direction for so long is closed: its client
    holds a place (limits.max_inflight).
    """

    abandoned_prefill: AtOnce[Seconds] = 10.0
    """Grace period for a prefill answer after its client has left or its deadline has passed:
    without the answer, the KV can't be released at once.
    """

    release: AtOnce[Seconds] = 5.0
    """Releasing KV at a prefill engine. After it, the engine's own lease (30 s) frees the KV."""

    retry: AtOnce[Seconds] = 5.0
    """A request that is to be tried again, before it may (limits.retry_share). Then its client gets
    the error.
    """

    drain: AtOnce[Seconds] = 60.0
    """Running requests after SIGTERM. Keep it below the orchestrator's grace period (30 s by
    default in Kubernetes).
    """

    engine_drain: AtOnce[Seconds] = 300.0
    """Requests of an engine that is to leave. After that they end as if it had failed: requests
    without data are tried again, and other engines go on with streams where they can.
    """

    unacknowledged: AtOnce[Seconds] = 10.0
    """What was sent to an engine, or a question whether it is still there, without its machine's
    acknowledgement: its network or its power is gone. Then the connections of prompts' legs end. On
    Linux; there also those to an engine that is too busy to read the rest of a large body for so
    long.
    """

    total: AtOnce[Seconds] = 3600.0
    """A whole request, whatever it waits for."""

    detect: Seconds = 300.0
    """With connector auto: until all engines have been asked which one they run. Engines load their
    models meanwhile.
    """

    probe: AtOnce[Seconds] = 2.0
    """One probe of an engine. A health route that answers later counts as not healthy."""


class Limits(Section, frozen=True):
    """How much is accepted, and how often something is tried."""

    max_inflight: Annotated[
        AtOnce[Count],
        Option("requests that are served at once; more requests wait", "N", "--max-inflight"),
    ] = 1024
    """Requests served at once. More than a few engines batch, less than what would overload the
    proxy.
    """

    max_queue: AtOnce[Annotated[int, Meta(ge=0, le=2**31 - 1)]] = 1024
    """Requests in the queue for a place; one more is refused with 503. 0: no queue."""

    max_inflight_tokens: AtOnce[Annotated[int, Meta(ge=0, le=2**53)]] = 0
    """Tokens of the requests served at once, prompts and expected answers together: one per 4 bytes
    of a text, and for an answer as many as others had lately. A request that alone exceeds it is
    served alone. 0: no bound.
    """

    engine_requests: Switch[EngineRequests] = 0
    """Requests that each engine that answers clients may have on average, all of them together.
    auto: as many as it runs without a queue, by the waiting requests, KV usage and refusals that it
    reports (pdproxy_capacity). 0: no bound but max_inflight.
    """

    engine_tokens: Switch[Annotated[int, Meta(ge=0, le=2**53)]] = 0
    """As max_inflight_tokens, for each engine that answers clients, on average, so that the bound
    follows engines that come and go: about what one's KV cache holds. 0: no bound but
    max_inflight_tokens.
    """

    max_connections: AtOnce[Count] = 8192
    """Connections of clients at once: several for each request in service; fewer if `ulimit -n`
    allows fewer. Beyond it, an idle connection of the client that has the most is closed for a new
    one; if there is none, the new one gets 503.
    """

    max_body_bytes: AtOnce[Count] = 67_108_864
    """Largest request body in bytes, 64 MiB: a few images in base64, or more text than any context
    window holds.
    """

    max_body_items: AtOnce[Annotated[int, Meta(ge=40_000, le=2**31 - 1)]] = 500_000
    """Most strings (names included), arrays and objects in a body; more is refused with 400. The
    setting is at least 40,000. Numbers don't count. Each item takes an engine as long as a hundred
    bytes of text. The longest conversations have 50,000, a logit_bias for a whole vocabulary
    250,000.
    """

    max_prompts: AtOnce[Count] = 2048
    """Prompts of one completion, chats of one batch, or texts or conversations of one embedding,
    classification, score or ranking; more is refused with 400. The default is OpenAI's own limit
    for texts to embed.
    """

    body_readers: AtOnce[Annotated[int, Meta(ge=1, le=64)]] = 1
    """Processes, 1 to 64, that read bodies which would block other clients: above 512 KiB, or of
    very many small parts. They start when needed and take 20 MB each plus several times the body.
    One reads 64 MiB of images in 0.2 s; clients take turns.
    """

    max_buffered_bytes: AtOnce[Count] = 268_435_456
    """Bytes of all requests' bodies that are held at once, 256 MiB: until an engine streams, or has
    answered whole. That is enough for max_inflight prompts of 64,000 tokens each. One more is
    refused with 503; a client below its share goes first.
    """

    max_answer_bytes: AtOnce[Count] = 134_217_728
    """Largest answer of an engine that is held whole, in bytes, 128 MiB: more than answers with
    logprobs or embeddings have. A larger one is abandoned: 502, and no other engine is tried.
    """

    max_buffered_answer_bytes: AtOnce[Count] = 268_435_456
    """Bytes of engines' answers held at once, 256 MiB: whole answers, incomplete events, streams
    before their first data. One more is abandoned, and its client gets a 503. The same amount again
    may wait for clients to read it.
    """

    max_header_bytes: AtOnce[Count] = 65_536
    """Largest request line with headers in bytes, 64 KiB: several times what other servers take."""

    min_send_rate: AtOnce[Annotated[int, Meta(ge=0, le=2**31 - 1)]] = 1024
    """Bytes per second of a request's body that must come on average, over each
    deadlines.client_body: a slow network carries more. A body that comes more slowly gets 408. 0:
    at least something must come.
    """

    min_read_rate: AtOnce[Annotated[int, Meta(ge=0, le=2**31 - 1)]] = 1024
    """Bytes per second that a client must read while bytes wait to be sent to it: a slow network
    reaches more. A client that reads less for deadlines.client_write is dropped, earlier if others
    wait for its place. 0: it must read at least something.
    """

    attempts: AtOnce[Annotated[int, Meta(ge=1, le=100)]] = 3
    """Tries of one request before its first data, 1 to 100, the first try included. As many again
    where another engine goes on with a stream. A request under which two engines have disappeared,
    or that two engines answer with 5xx, gets no third one.
    """

    continuations: Switch[Annotated[int, Meta(ge=0, le=100)]] = 1
    """How often other engines may go on with one stream whose engine fails after its first data, 0
    to 100. 0: never, and then nothing is kept of streams for it.
    """

    retry_share: AtOnce[Annotated[float, Meta(gt=0, le=1)]] = 0.2
    """Of the requests being served: the share that may be tried again at the same time. The others
    wait for their turn: if one of two engines dies, half of all requests would come to the other
    one once more, all at once.
    """

    min_retries: AtOnce[Count] = 10
    """Requests that may be tried again at the same time in any case."""

    engine_keepalive: AtOnce[Seconds] = 4.0
    """Seconds for which an idle engine connection may be used again. vLLM closes it after 5 s; 1 s
    is the safety margin.
    """

    breaker_failures: AtOnce[Count] = 3
    """Consecutive failures after which an engine is excluded. One may be chance, three are not. A
    5xx before any data counts once another engine has answered the request, or if there is no other
    one.
    """

    breaker_cooldown: AtOnce[Seconds] = 5.0
    """Seconds for which it stays excluded. Long enough to notice a restart, short enough to use the
    engine again soon. Then it gets one request at a time, until one is good.
    """


class Overload(Section, frozen=True):
    """Who is served first while requests wait for places (limits.max_inflight)."""

    tenant_header: AtOnce[HeaderName | None] = None
    """The header that names the tenant of a request, up to 64 characters. It is read only of
    clients with a valid key, and behind listen.trusted_proxies: whoever names a tenant uses its
    part. null: each name of keys, key or address is a tenant.
    """

    weights: AtOnce[dict[str, Weight]] = {}  # noqa: RUF012 - a struct copies its defaults
    """Parts of the places by tenant, where several wait, from 0.001 to 1000: names of
    tenant_header, or of keys (a key's own line goes first). 1 for all others.
    """

    output_weight: AtOnce[Annotated[float, Meta(ge=0, le=1000)]] = 2.0
    """What a token of an answer counts, in tokens of prompts: an engine computes many tokens of a
    prompt at once, and those of an answer one by one.
    """

    priority: AtOnce[Priorities] = "within"
    """What a request's `priority` (or X-Vllm-Priority) does here. within: of one tenant's requests
    that wait, the smallest is served first. ignore: nothing. Engines get it in either case.
    """


class MediaSettings(Section, frozen=True):
    """Images, audio and video in requests, on all routes. A data: URL holds the medium itself, and
    always passes.
    """

    urls: AtOnce[Urls] = "off"
    """Which other URLs pass. Engines fetch what passes: from wherever they can reach, and also
    where a redirect leads (VLLM_MEDIA_URL_ALLOW_REDIRECTS of vLLM). Others get 400.
      off    none
      hosts  http and https URLs of the hosts below
      any    all, file:// included, which vLLM reads only below its --allowed-local-media-path
    """

    hosts: AtOnce[tuple[Host, ...]] = ()
    """Names in full, without a port, such as [images.example.com]."""

    embeds: AtOnce[bool] = False
    """Whether clients may send embeddings in the place of media (`image_embeds` and the like).
    Without --enable-mm-embeds an engine refuses them; but a decode engine takes them without that
    flag, and one without a tensor ends it. So they get 400, unless this is true.
    """

    @property
    def rule(self) -> Media:
        """What bodies are checked by."""
        return Media(self.urls, tuple(host.lower() for host in self.hosts), self.embeds)


def least_buffered_bytes(limits: Limits) -> int:
    """Return how many bytes `max_buffered_bytes` must be for the largest body: an eighth of it is
    kept for small bodies.
    """
    return limits.max_body_bytes + -(-limits.max_body_bytes // 7)


def check_limits(limits: Limits, found: Mistakes) -> None:
    """Check that the largest body, and the largest answer, has space."""
    minimum = least_buffered_bytes(limits)
    if limits.max_buffered_bytes < minimum:
        text = (
            f"limits.max_buffered_bytes = {limits.max_buffered_bytes} has no space for a body of "
            f"limits.max_body_bytes = "
            f"{limits.max_body_bytes}: expected at least {minimum}"
        )
        found.add(("limits",), text + _one_source(found, "max_buffered_bytes", "max_body_bytes"))
    if limits.max_buffered_answer_bytes < limits.max_answer_bytes:
        text = (
            f"limits.max_buffered_answer_bytes = {limits.max_buffered_answer_bytes} has no space "
            f"for an answer of "
            f"limits.max_answer_bytes = {limits.max_answer_bytes}"
        )
        found.add(
            ("limits",), text + _one_source(found, "max_buffered_answer_bytes", "max_answer_bytes")
        )


def _one_source(found: Mistakes, *names: str) -> str:
    """Return where the first of these limits that is not a default was read."""
    return next(filter(None, (found.source(("limits", name)) for name in names)), "")


def check_media_settings(media: MediaSettings, found: Mistakes) -> None:
    """Check that hosts are named if, and only if, they are asked for."""
    key = ("media", "hosts")
    if media.hosts and media.urls != "hosts":
        found.add(key, f"media.hosts: has no effect without media.urls: hosts{found.source(key)}")
    if media.urls == "hosts" and not media.hosts:
        found.add(
            key,
            f"media.hosts: expected at least one, for media.urls: "
            f"hosts{found.source(('media', 'urls'))}",
        )


def of_each(limits: Limits, workers: int) -> Limits:
    """Return the limits of one of several workers: what is not shared among them is divided.

    Places, tokens in flight, the queue and retries stay whole: they are shared. Each worker has
    space for one of the largest bodies and answers, so that many workers may hold more than what
    was set.
    """
    if workers == 1:
        return limits
    return msgspec.structs.replace(
        limits,
        max_connections=-(-limits.max_connections // workers),
        max_buffered_bytes=max(limits.max_buffered_bytes // workers, least_buffered_bytes(limits)),
        max_buffered_answer_bytes=max(
            limits.max_buffered_answer_bytes // workers, limits.max_answer_bytes
        ),
        body_readers=max(1, limits.body_readers // workers),
    )
