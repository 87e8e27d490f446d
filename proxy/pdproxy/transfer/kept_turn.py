"""Finished turns whose KV their decode engines may keep: what is known of each. Only data."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from pdproxy.transfer.turns import DecodeHandle

SCOPE_BYTES = 16


def scope_of(model: str | None, cache_salt: bytes) -> bytes:
    """Return what separates prompts whose equal token ids may have different KV: by the model's
    name (a LoRA has its own), and by the salt with which a client separates its prefix cache.
    """
    name = b"" if model is None else b"m" + model.encode("utf-8", "surrogatepass")
    return blake2b(b"%d:%b%b" % (len(name), name, cache_salt), digest_size=SCOPE_BYTES).digest()


class TurnRecord(msgspec.Struct, frozen=True, eq=False, array_like=True):
    """A turn from the moment on at which its decode engine is asked.

    `decode`, `prefill`: URLs; `*_run`: the numbers of their runs. `remote_request_id`: the prefill
    engine's id of the turn, by which notices name it. `prompt`: the scope and the ids (`ids_text`)
    of the prompt, None if they are not known: such a turn is only released.
    `authorization`: of its client, for the release. `may_stop`: the answer may end at a stop
    string; then nothing is kept of it.
    """

    decode: str
    decode_run: int
    prefill: str
    prefill_run: int
    remote_request_id: str
    model: str | None
    authorization: tuple[tuple[bytes, bytes], ...]
    prompt: bytes | None
    prompt_tokens: int
    may_stop: bool = False


class KeptTurn(msgspec.Struct, frozen=True, eq=False, array_like=True):
    """A finished turn. `key`: the scope and the ids (`ids_text`); `known`: of how many of them
    there is KV. `received`: when its handle came, in monotonic seconds.
    """

    record: TurnRecord
    handle: DecodeHandle
    key: bytes
    known: int
    received: float

    @property
    def size(self) -> int:
        """Bytes that are held for it."""
        return len(self.key) + len(self.handle.params)
