"""`kv_transfer_params` of engines whose KV lies in a store under keys that the proxy chooses (vLLM
PR 12957).

Owns that object's shape and the keys. Such an engine has no handles: P stores a prompt's KV under
keys that the request names, and D loads it by the same keys. A request has flat lists: one prompt's
ids and keys. An engine that works on several requests at once has lists of such lists, with None
for a request without any. The number of keys does not depend on the number of ids: a store may keep
whole prompts or blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from struct import error as pack_error
from struct import pack
from typing import Any

import msgspec

Ids = list[int]
Keys = list[str]

_DIGEST_BYTES = 16
"""Of a key. The probability that any two of a billion prompts share one is less than 10^-20."""
_PERSON = b"pdproxy kv keys"


class KVParamsError(ValueError):
    """The object is not what an engine would take. The text names the field, if one field is
    wrong.
    """


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """What a request sends to such an engine. All three are flat lists, or lists of one list (or
    None) per request.

    The JSON has all fields, null for those without a value. Making one raises KVParamsError if a
    field has a wrong type.
    """

    prefix_prompt_ids: Ids | list[Ids | None] | None = None
    """The tokens whose KV is stored or loaded. With prefill and decode apart, the whole prompt."""

    kvcache_load_keys: Keys | list[Keys | None] | None = None
    """Names under which D finds the KV. None: nothing is loaded."""

    kvcache_store_keys: Keys | list[Keys | None] | None = None
    """Names under which P stores it. None: nothing is stored."""

    def __post_init__(self) -> None:
        _check("prefix_prompt_ids", self.prefix_prompt_ids, int)
        _check("kvcache_load_keys", self.kvcache_load_keys, str)
        _check("kvcache_store_keys", self.kvcache_store_keys, str)

    @property
    def is_flat(self) -> bool:
        """Whether this belongs to one request."""
        return not any(_is_nested(value) for value in self.as_dict().values())

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, as a request has them."""
        return {name: getattr(self, name) for name in FIELDS}

    def as_json(self) -> bytes:
        """Return the fields as a JSON object."""
        return msgspec.json.encode(self)


FIELDS: tuple[str, ...] = KVTransferParams.__struct_fields__


def read(value: Mapping[str, object] | str | bytes | None) -> KVTransferParams | None:
    """Read what a request has: an object, the JSON text of one, or None for none.

    Raises:
        KVParamsError: it is something else, or has an unknown field, or one whose value is not a
            flat list of its type.
    """
    params = read_batch(value)
    if params is not None:
        for name, given in params.as_dict().items():
            if _is_nested(given):
                raise KVParamsError(f"{name}: expected {_flat(name)}, got a list of lists or nulls")
    return params


def read_batch(value: Mapping[str, object] | str | bytes | None) -> KVTransferParams | None:
    """Read as `read` does, but accept the lists of several requests side by side as well.

    Raises:
        KVParamsError: as `read`.
    """
    given: dict[str, Any]
    match value:
        case None:
            return None
        case str() | bytes():
            given = _object(value)
        case Mapping():
            given = {str(name): item for name, item in value.items()}
        case _:
            raise KVParamsError(
                f"kv_transfer_params: expected an object or its JSON text, got {_kind(value)}"
            )
    if unknown := [name for name in given if name not in FIELDS]:
        raise KVParamsError(f"{unknown[0][:80]}: unknown field: expected {', '.join(FIELDS)}")
    return KVTransferParams(**given)


def store_keys(token_ids: Iterable[int], scope: str = "") -> Keys:
    """Return the names of a prompt's KV: one, for the whole prompt, the same in every process.

    `scope` separates KV that may not be shared although its ids are the same: that of two models in
    one store. Python's own `hash`, which the pull request's proxy used, differs between processes
    and restarts.

    Raises:
        KVParamsError: an id that no tokenizer has: negative, or beyond 32 bits.
    """
    ids, name = tuple(token_ids), scope.encode("utf-8", "surrogatepass")
    try:
        packed = pack(f"<{len(ids)}I", *ids)
    except pack_error:
        raise KVParamsError("prefix_prompt_ids: expected token ids of 0 to 4294967295") from None
    # The scope's length goes first, so that no two pairs of scope and ids have the same bytes.
    digest = blake2b(
        len(name).to_bytes(8, "little") + name + packed, digest_size=_DIGEST_BYTES, person=_PERSON
    )
    return [digest.hexdigest()]


def _object(text: str | bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise KVParamsError("kv_transfer_params: not JSON") from None
    if not isinstance(value, dict):
        raise KVParamsError(f"kv_transfer_params: expected a JSON object, got {_kind(value)}")
    return value


def _check(name: str, value: object, kind: type) -> None:
    if value is None or (
        isinstance(value, list) and (_all_of(value, kind) or _batch_of(value, kind))
    ):
        return
    got = f"got {_kind(value)}" if not isinstance(value, list) else "got a list of something else"
    raise KVParamsError(
        f"{name}: expected {_flat(name)}, or one such list or null per request, {got}"
    )


def _all_of(values: list[object], kind: type) -> bool:
    # `True` is an int in Python, but not a token id.
    return all(isinstance(one, kind) and not isinstance(one, bool) for one in values)


def _batch_of(values: list[object], kind: type) -> bool:
    return all(one is None or (isinstance(one, list) and _all_of(one, kind)) for one in values)


def _is_nested(value: object) -> bool:
    return isinstance(value, list) and any(one is None or isinstance(one, list) for one in value)


def _flat(name: str) -> str:
    return "a list of token ids" if name == "prefix_prompt_ids" else "a list of texts"


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
