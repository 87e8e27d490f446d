"""How long each wait may last, and how much is taken on: the sections `deadlines` and `limits`.

Owns their names, units, bounds and defaults, each with the reason for it.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pdproxy.settings.section import Count, Seconds, Section


class Deadlines(Section, frozen=True):
    """How long each wait may last, in seconds. No wait is without one."""

    connect: Seconds = 2.0
    """TCP connection to an engine, TLS handshake included. One that takes longer inside a data center is down or drowning."""

    client_head: Seconds = 30.0
    """A request's line and headers, from their first byte, or from the connection on where nothing comes at all."""

    client_body: Seconds = 60.0
    """A request's body, once its head is here. A body is sent at once; a client that drips one holds a connection."""

    read_body: Seconds = 10.0
    """Reading a large body in a reader process, the wait for one included. 64 MiB of images take a fifth of a second."""

    queue: Seconds = 30.0
    """A request's wait for a place (`limits.max_inflight`). Clients give up at about this time."""

    tokenize: Seconds = 2.0
    """Making the token ids of a prompt. Past it the engines make them, unless the connector needs them first."""

    prefill: Seconds = 120.0
    """The prefill leg, from its request to its whole answer. Long prompts behind others take a minute."""

    kv_ready: Seconds = 10.0
    """Notices that KV is ready, from the prefill's answer on. They come within milliseconds of it, or not at all."""

    first_token: Seconds = 60.0
    """From the decode leg's request to its first data: KV transfer, and waiting for a place in its batch."""

    between_tokens: Seconds = 30.0
    """Between two pieces of a stream. A batch that was preempted pauses for seconds; more is a hang."""

    client_write: Seconds = 60.0
    """A client that reads less than `limits.min_read_rate` of an answer that waits, before it is dropped: its stream
    holds KV on an engine."""

    abandoned_prefill: Seconds = 10.0
    """Grace for a prefill answer that nobody waits for any more: without it its KV can't be given back at once."""

    release: Seconds = 5.0
    """Giving KV back to a prefill engine. Past it, the engine's own lease ends the matter."""

    drain: Seconds = 60.0
    """Running requests after a request to stop. Keep it below the orchestrator's grace period."""

    total: Seconds = 3600.0
    """A whole request, whatever it waits for: the net under all others."""

    probe: Seconds = 2.0
    """One probe of an engine. A health route that answers later is not healthy."""


class Limits(Section, frozen=True):
    """How much is taken on, and how often something is tried."""

    max_inflight: Count = 1024
    """Requests being served at once. Above what a few engines batch, below what would hurt the proxy."""

    max_queue: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 1024
    """Requests waiting for a place; one more is refused with 503. 0: nobody waits."""

    max_connections: Count = 8192
    """Connections of clients at once: several for each request in service. Less where `ulimit -n` allows less. Beyond
    it, an idle one of the client that has the most is closed for a new one; where there is none, the new one gets
    503."""

    max_body_bytes: Count = 67_108_864
    """Largest request body in bytes, 64 MiB: a few images in base64, or more text than any context holds."""

    max_body_items: Annotated[int, Meta(ge=40_000, le=2**31 - 1)] = 500_000
    """Strings (names included), arrays and objects in a body; more is refused with 400. Numbers don't count. Each takes an engine
    the time of a hundred bytes of text. The longest conversations have 50,000, a `logit_bias` for a whole vocabulary 250,000."""

    max_prompts: Count = 2048
    """Prompts of one completion, or texts of one embedding, classification, score or ranking; more is refused with 400. What
    OpenAI's own server takes of texts to embed."""

    body_readers: Annotated[int, Meta(ge=1, le=64)] = 1
    """Processes that read bodies which would hold up other clients: above 512 KiB, or of very many small parts. Started
    when needed, 20 MB each and several times the body. One reads 64 MiB of images in a fifth of a second; clients take turns."""

    max_buffered_bytes: Count = 268_435_456
    """Bytes of all requests' bodies that are held at once, 256 MiB: until an engine streams, or has answered whole.
    That is room for `max_inflight` prompts of 64,000 tokens each. One more is refused with 503; a client with less than
    its share goes before others."""

    max_answer_bytes: Count = 134_217_728
    """Largest answer of an engine that is held whole, in bytes, 128 MiB: more than answers with logprobs or embeddings have."""

    max_buffered_answer_bytes: Count = 268_435_456
    """Bytes of engines' answers that are held at once, 256 MiB. One more is given up, and its client gets a 503. As much again
    may wait for clients to read it."""

    max_header_bytes: Count = 65_536
    """Largest request line with headers in bytes, 64 KiB: several times what other servers take."""

    min_read_rate: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 1024
    """Bytes per second that a client must read while bytes wait to be sent to it: a slow line has more. One that reads less for
    `deadlines.client_write` is dropped, earlier where others wait for its place. 0: it must read something."""

    attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    """Tries of one request before its first data, the first included. After data nothing is tried again."""

    engine_keepalive: Seconds = 4.0
    """Seconds an idle engine connection may be used again. vLLM closes it after 5: a second is left for the race."""

    breaker_failures: Count = 3
    """Failures of an engine in a row that shut it out. One may be chance, three are not."""

    breaker_cooldown: Seconds = 5.0
    """Seconds an engine stays shut out. Long enough for a restart to be noticed, short enough to come back soon."""
