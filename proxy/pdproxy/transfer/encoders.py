"""What an encoder engine is sent, what it answers, and what the consumer of its outputs is told of
them: one `EncoderContract` for each EC connector of vLLM.

An encoder engine computes the embeddings of media, and nothing else. The consumer, which computes
the prompt, gets the client's media, too: it encodes a medium whose output is missing, unless its
connector can't. Source: vLLM 0.32.0 `distributed/ec_transfer/ec_connector`,
`v1/core/sched/scheduler.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from pdproxy.wire.engine import UNREADABLE
from pdproxy.wire.fields import Fields
from pdproxy.wire.request import Parsed
from pdproxy.wire.route_form import Medium

PARAMS = "ec_transfer_params"
_KWARGS = ("mm_processor_kwargs", "media_io_kwargs")
"""Fields that change what media become, and so must be the same at both engines."""
_OUTPUTS = 2
"""Outputs of one medium at most: a video's, and that of its sound."""
_MAX_HASH = 256
"""Characters of a hash. vLLM's have 64, and those of a medium with a name of its own have more."""


class Output(msgspec.Struct, frozen=True):
    """What an encoder engine says of an output. `mm_hash`: its name among engines; `params`: JSON,
    as the engine wrote it; `host`: where other engines can read it, None where it names none.
    """

    mm_hash: str
    params: msgspec.Raw
    host: str | None = None


class EncodedMedia(msgspec.Struct, frozen=True):
    """What has become of a prompt's media. `outputs`: in the order of their media; `ids`: of all
    media, where the contract has some; `missing`: how many media have no output.

    Of all attempts so far, `seconds`: that engines were asked for, and `encoders`: those that have
    answered, each with its seconds.
    """

    outputs: tuple[Output, ...]
    ids: tuple[str, ...]
    missing: int
    seconds: float
    encoders: tuple[tuple[str, float], ...]


Asks = Callable[[Sequence[str], str], bytes | None]
"""Returns what an encoder engine is told besides its media, None: nothing. It gets an id for each
medium, and the address at which the consumer receives outputs.
"""
Tells = Callable[[Sequence[Output], Sequence[str]], bytes | None]
"""Returns what the consumer is told, None: nothing. It gets the outputs that were made, and the ids
of their media.
"""


@dataclass(frozen=True, slots=True)
class EncoderContract:
    """How the engines of one EC connector work together.

    `asks`, `tells`: `ec_transfer_params`, JSON.
    `pushes`: an encoder engine writes its outputs to the address of one consumer, which waits for
    them, and never encodes a medium itself. Otherwise the consumer looks for outputs, and encodes
    what it does not find.
    `compares_versions`: a consumer takes no output of an engine with another version of vLLM.
    """

    name: str
    asks: Asks = lambda _ids, _address: None
    tells: Tells = lambda _outputs, _ids: None
    pushes: bool = False
    compares_versions: bool = False


def body(parsed: Parsed, media: Sequence[Medium], params: bytes | None) -> bytes:
    """Return the body for an encoder engine: a chat of media alone. The limit matters to an engine
    that could also generate (`ec_both`).
    """
    fields: Fields = {name: parsed.fields[name] for name in _KWARGS if name in parsed.fields}
    if params is not None:
        fields[PARAMS] = msgspec.Raw(params)
    model = b"null" if parsed.model is None else msgspec.json.encode(parsed.model)
    head = b'{"model":%b,"max_tokens":1,"stream":false,"messages":[{"role":"user","content":['
    pieces: list[msgspec.Raw | bytes] = [head % model]
    for at, medium in enumerate(media):
        if at:
            pieces.append(b",")
        pieces += [medium.head, medium.value, medium.tail]
    pieces.append(b"]}]")
    for name, value in fields.items():
        pieces += [b',"', name.encode(), b'":', value]
    pieces.append(b"}")
    return b"".join(pieces)


class _Item(msgspec.Struct):
    item_indices: list[int]
    peer_host: str | None = None


class _Answer(msgspec.Struct):
    ec_transfer_params: dict[str, msgspec.Raw] | None = None


_answers = msgspec.json.Decoder(_Answer)
_items = msgspec.json.Decoder(_Item)


def outputs_in(answer: bytes, count: int) -> list[Output] | str:
    """Return what an encoder engine says of its outputs for `count` media, in the order of these;
    or why its answer can't be used.

    For a video with sound there are two. The time is as the answer's length: a few milliseconds for
    256 KiB, whatever it holds.
    """
    try:
        params = _answers.decode(answer).ec_transfer_params
        if params is None:
            return (
                "the answer has no ec_transfer_params: is the engine started with an "
                "--ec-transfer-config of ec_role ec_producer?"
            )
        most, places = _OUTPUTS * count, 0
        if len(params) > most:
            return f"ec_transfer_params have {len(params)} outputs for {count} media"
        found: dict[int, Output] = {}
        for mm_hash, raw in params.items():
            item = _items.decode(raw)
            if len(mm_hash) > _MAX_HASH:
                return f"ec_transfer_params have a hash of more than {_MAX_HASH} characters"
            places += len(item.item_indices)
            if places > most:
                return f"ec_transfer_params have {places} places for {count} media"
            found |= dict.fromkeys(item.item_indices, Output(mm_hash, raw, item.peer_host))
    except UNREADABLE as error:
        return f"ec_transfer_params are incomplete: {error}"
    outputs = [found[at] for at in sorted(found)]
    if len(outputs) < count:
        return f"ec_transfer_params have {len(outputs)} outputs for {count} media"
    return outputs


def _tells_params(outputs: Sequence[Output], _ids: Sequence[str]) -> bytes | None:
    """Return the outputs as the encoder engines have named them: which of them can be read, and
    where.
    """
    named = {one.mm_hash: one.params for one in outputs if one.host is not None}
    return msgspec.json.encode(named) if named else None


def _asks_push(ids: Sequence[str], address: str) -> bytes:
    items = [{"transfer_id": one} for one in ids]
    return msgspec.json.encode({"consumer_zmq": f"tcp://{address}", "ec_items": items})


def _tells_push(outputs: Sequence[Output], ids: Sequence[str]) -> bytes:
    items = [
        {"mm_hash": output.mm_hash, "transfer_id": one}
        for output, one in zip(outputs, ids, strict=True)
    ]
    return msgspec.json.encode({"ec_items": items})


CONTRACTS = {
    one.name: one
    for one in (
        EncoderContract("example"),
        EncoderContract("cpu", tells=_tells_params, compares_versions=True),
        EncoderContract("mooncake", asks=_asks_push, tells=_tells_push, pushes=True),
    )
}
"""By their names in the settings (`pools[].ec_connector`)."""
