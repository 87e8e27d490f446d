"""How long each wait may last, and how much is accepted at once: the sections `deadlines` and `limits`.

Owns their names, units, bounds and defaults, each with the reason for it.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from pdproxy.settings.section import AtOnce, Count, OffOrSeconds, Option, Seconds, Section, Switch

AUTO: Final = "auto"
EngineRequests = Literal["auto"] | Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Deadlines(Section, frozen=True):
    """How long each wait may last, in seconds. Every wait has a limit."""

    connect: AtOnce[Seconds] = 2.0
    """TCP connection to an engine, TLS handshake included. If it takes longer, the engine is down or overloaded. Where its URL
    has a name, resolving that is included, and several addresses share the time."""

    client_head: AtOnce[Seconds] = 30.0
    """A request's line and headers, from their first byte, or from the connection on if nothing comes at all."""

    client_body: AtOnce[Seconds] = 60.0
    """A body of which less than `limits.min_send_rate` comes in this time is refused: it holds a connection. As a whole, a body
    may take as long as a request (`total`)."""

    read_body: AtOnce[Seconds] = 10.0
    """Reading a large body in a reader process, the wait for one included. 64 MiB of images take a fifth of a second."""

    queue: AtOnce[Seconds] = 30.0
    """A request's wait for a place (`limits.max_inflight`), and its wait for an engine where all that could serve it stand
    still. Clients time out at about this time."""

    tokenize: AtOnce[Seconds] = 2.0
    """Making the token ids of a prompt. After that the engines make them, unless the connector needs them before."""

    prefill: AtOnce[Seconds] = 120.0
    """The prefill leg, from its request to its whole answer. Long prompts in an engine's queue take a minute. While the engine is
    seen to work (`health.stalled_after`), the wait goes on."""

    kv_ready: AtOnce[Seconds] = 10.0
    """Notices that KV is ready, from the prefill's answer on. They come within milliseconds, or not at all."""

    kv_replay: AtOnce[Seconds] = 5.0
    """The answer of an engine that is asked for KV events again. It answers between two steps."""

    first_token: AtOnce[Seconds] = 60.0
    """From the decode leg's request to its first data: KV transfer, and waiting for a place in its batch. While the engine is
    seen to work (`health.stalled_after`), the wait goes on; not if it waits for KV that a prefill engine should have pushed."""

    between_tokens: AtOnce[Seconds] = 30.0
    """Between two pieces of a stream. Behind it the engine is looked at: while it is seen to work (`health.stalled_after`), the
    wait goes on. Parsers of tool calls send nothing for a minute."""

    stream_comment: AtOnce[OffOrSeconds] = 15.0
    """A stream that has sent its client nothing, before it gets a comment, within twice that time at most: balancers close a
    connection that is silent for a minute. The first comment sends the status: what fails behind it is an event of the stream.
    0: no comments."""

    continuation: AtOnce[Seconds] = 30.0
    """From the failure of a stream's engine to the first data of the one that goes on. To a client, more is a failure, too."""

    client_write: AtOnce[Seconds] = 60.0
    """A client that reads less than `limits.min_read_rate` while data waits for it, before it is dropped: its stream holds KV
    on an engine."""

    abandoned_prefill: AtOnce[Seconds] = 10.0
    """A prefill's answer after its client has left: only the answer names the KV that has to be released."""

    release: AtOnce[Seconds] = 5.0
    """Releasing KV at a prefill engine. After that, the engine's own lease frees it."""

    retry: AtOnce[Seconds] = 5.0
    """A request that is to be tried again, before it may (`limits.retry_share`). Then its client gets a 503."""

    drain: AtOnce[Seconds] = 60.0
    """Running requests, after the proxy was asked to stop. Keep it below the orchestrator's grace period."""

    engine_drain: AtOnce[Seconds] = 300.0
    """Requests of an engine that is to leave. After that they end as if it had failed: requests without data are tried again, and
    other engines go on with streams where they can."""

    unacknowledged: AtOnce[Seconds] = 10.0
    """What was sent to an engine, or a question whether it is still there, without its machine's acknowledgement: its network or
    its power is gone. For connections of prompts' legs, where the system can do it (Linux). There it also ends a connection whose
    engine is too busy to read the rest of a large body for so long."""

    total: AtOnce[Seconds] = 3600.0
    """A whole request, whatever it waits for."""

    detect: Seconds = 300.0
    """With connector `auto`: until all engines have been asked which one they run. They load their models meanwhile."""

    probe: AtOnce[Seconds] = 2.0
    """One probe of an engine. A health route that answers later is not healthy."""


class Limits(Section, frozen=True):
    """How much is accepted at once, and how often something is tried."""

    max_inflight: Annotated[
        AtOnce[Count], Option("requests that are served at once; more requests wait", "N", "--max-inflight")
    ] = 1024
    """Requests that are served at once. More than a few engines batch, less than would overload the proxy."""

    max_queue: AtOnce[Annotated[int, Meta(ge=0, le=2**31 - 1)]] = 1024
    """Requests that wait for a place; one more is refused with 503. 0: none waits."""

    max_inflight_tokens: AtOnce[Annotated[int, Meta(ge=0, le=2**53)]] = 0
    """Tokens of the requests that are served at once, prompts and expected answers together: a text has one token per 4 bytes,
    an answer as many as others had lately. A request that alone exceeds it is served alone. 0: no bound."""

    engine_requests: Switch[EngineRequests] = 0
    """Requests that each engine that answers clients may have on average, all of them together. `auto`: as many as it runs
    without a queue, by what it reports. Engines with fewer are preferred. 0: no bound but `max_inflight`."""

    engine_tokens: Switch[Annotated[int, Meta(ge=0, le=2**53)]] = 0
    """As `max_inflight_tokens`, for each engine that answers clients, on average: as many as its KV cache holds, so that it
    follows engines that come and go. 0: no bound but `max_inflight_tokens`."""

    max_connections: AtOnce[Count] = 8192
    """Connections of clients at once: several for each request that is served. Fewer if `ulimit -n` allows fewer. If there are
    more, an idle one of the client that has the most is closed for a new one; if there is none, the new one gets 503."""

    max_body_bytes: AtOnce[Count] = 67_108_864
    """Largest request body in bytes, 64 MiB: a few images in base64, or more text than any context can hold."""

    max_body_items: AtOnce[Annotated[int, Meta(ge=40_000, le=2**31 - 1)]] = 500_000
    """Strings (names included), arrays and objects in a body; more are refused with 400. Numbers are not counted. Each takes an
    engine as much time as a hundred bytes of text. The longest conversations have 50,000, a `logit_bias` for a whole vocabulary
    250,000."""

    max_prompts: AtOnce[Count] = 2048
    """Prompts of one completion, chats of one batch, or texts of one embedding, classification, score or ranking; more get a 400.
    OpenAI's own server accepts as many texts to embed."""

    body_readers: AtOnce[Annotated[int, Meta(ge=1, le=64)]] = 1
    """Processes that read bodies which would delay other clients: larger than 512 KiB, or of very many small parts. Started when
    needed. Each takes 20 MB and several times the body. One reads 64 MiB of images in a fifth of a second; clients take turns."""

    max_buffered_bytes: AtOnce[Count] = 268_435_456
    """Bytes of all requests' bodies that are held at once, 256 MiB: until an engine streams, or has sent its whole answer.
    That is enough for `max_inflight` prompts of 64,000 tokens each. What exceeds it is refused with 503; a client with less than
    its share is served before others."""

    max_answer_bytes: AtOnce[Count] = 134_217_728
    """Largest answer of an engine that is held whole, in bytes, 128 MiB: answers with logprobs or embeddings are smaller."""

    max_buffered_answer_bytes: AtOnce[Count] = 268_435_456
    """Bytes of engines' answers that are held at once, 256 MiB. An answer that exceeds it is dropped, and its client gets a 503.
    The same number again may wait for clients to read it, whatever pdproxy has written."""

    max_header_bytes: AtOnce[Count] = 65_536
    """Largest request line with headers in bytes, 64 KiB: several times what other servers accept."""

    min_send_rate: AtOnce[Annotated[int, Meta(ge=0, le=2**31 - 1)]] = 1024
    """Bytes of a body per second that must come, over `deadlines.client_body`. A slow network carries more. 0: something must
    come."""

    min_read_rate: AtOnce[Annotated[int, Meta(ge=0, le=2**31 - 1)]] = 1024
    """Bytes per second that a client must read while bytes wait for it: slow connections have more. A client that reads less for
    `deadlines.client_write` is dropped, or earlier if others wait for its place. 0: it must read something."""

    attempts: AtOnce[Annotated[int, Meta(ge=1, le=100)]] = 3
    """Tries of one request before its first data, the first try included; as many again to go on with a stream. If engines
    disappear under it, it ends at the second one."""

    continuations: Switch[Annotated[int, Meta(ge=0, le=100)]] = 1
    """How often other engines may go on with one stream whose engine fails. 0: never; then nothing is kept for it."""

    retry_share: AtOnce[Annotated[float, Meta(gt=0, le=1)]] = 0.2
    """Of the requests that are served: the share that may be tried again at the same time, before its data. The others wait for
    their turn: if one of two engines dies, half of all requests would come to the other one once more, all at once."""

    min_retries: AtOnce[Count] = 10
    """Requests that may be tried again at the same time in any case."""

    engine_keepalive: AtOnce[Seconds] = 4.0
    """Seconds for which an idle connection to an engine may be used again. vLLM closes it after 5; the margin is one second."""

    breaker_failures: AtOnce[Count] = 3
    """Failures of an engine in a row after which it is excluded. One may be chance, three are not."""

    breaker_cooldown: AtOnce[Seconds] = 5.0
    """Seconds for which an engine stays excluded: long enough to notice a restart, short enough to use it again soon. Then it
    gets one request at a time, until one is good (`health.slow_start`)."""


def least_buffered_bytes(limits: Limits) -> int:
    """Return how many bytes `max_buffered_bytes` must be for the largest body: an eighth of it is kept for small bodies."""
    return limits.max_body_bytes + -(-limits.max_body_bytes // 7)
