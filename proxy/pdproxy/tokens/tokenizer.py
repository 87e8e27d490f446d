"""One model's tokenizer and chat template: from a request's prompt to the ids that its engines
would make of it.

Owns the tokenizer, and the cache of segments. `transformers` is imported when the first one is
loaded, so that a proxy that doesn't tokenize doesn't pay for it. A model's own code is never run.
`pdproxy.tokens.chat` does what an engine's renderer does besides the template (vLLM 0.32.0
`renderers/hf.py`).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from pdproxy.kit.regular_file import UnusableFileError, check_regular
from pdproxy.tokens.chat import (
    Chat,
    ContentFormat,
    conversation,
    flag,
    read_chat,
    refuse_unknown,
    text_of,
)
from pdproxy.tokens.errors import (
    NotInstalledError,
    RejectedError,
    UnsureError,
    UnusableError,
)
from pdproxy.tokens.ids import BegunIds, TokenIds
from pdproxy.tokens.segment_cache import SegmentBoundaries, SegmentCache
from pdproxy.wire.request import Parsed
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Prompt

CACHE_BYTES = 64 * 2**20
"""Bytes of segments that a tokenizer keeps: about a thousand conversations of 20 KB each with its
ids.
"""
MAX_FILE = 256 * 2**20
"""Bytes of one file of a tokenizer: the largest that are known have 35 MB."""
FRESH = 2048
"""Characters of a prompt that are encoded before its engine is chosen, besides what the cache of
segments has: some 500 tokens, a quarter of a millisecond.
"""
_READ = frozenset({".json", ".jinja", ".model", ".txt"})
"""What the names of such files end with."""
_ARGUMENTS = frozenset({"documents", "add_generation_prompt", "continue_final_message"})
"""Arguments that are passed to a template even if it doesn't name them: the renderer uses them."""


class LocalTokenizer(Protocol):
    """Makes token ids in this process. Several threads may call it at once."""

    def completion(self, text: str, *, add_special_tokens: bool, scope: bytes = b"") -> TokenIds:
        """Return the ids of a text. What is kept of it is used for other texts of that scope only,
        also for their times.
        """

    def beginning(self, text: PromptText) -> BegunIds | None:
        """Return the ids of a text's beginning, and as much more as is known already. None: only
        the ids of all of it can be made.
        """

    def rendered(self, chat: Chat, form: ContentFormat) -> str:
        """Return the text of a chat; raise UnsureError or RejectedError if that is not possible."""


class PromptText(msgspec.Struct, frozen=True):
    """The text of a prompt, rendered, and how it is encoded: see `LocalTokenizer.completion`."""

    text: str
    add_special_tokens: bool
    scope: bytes = b""

    def ids(self, tokenizer: LocalTokenizer) -> TokenIds:
        """Return its ids."""
        special = self.add_special_tokens
        return tokenizer.completion(self.text, add_special_tokens=special, scope=self.scope)


def ids_of(
    tokenizer: LocalTokenizer, parsed: Parsed, prompt: Prompt, forms: Mapping[bool, ContentFormat]
) -> TokenIds:
    """Return the ids of one prompt of a request. Parameters and errors: see `prompt_text`."""
    return prompt_text(tokenizer, parsed, prompt, forms).ids(tokenizer)


def prompt_text(
    tokenizer: LocalTokenizer, parsed: Parsed, prompt: Prompt, forms: Mapping[bool, ContentFormat]
) -> PromptText:
    """Return the text of one prompt of a request. `forms`: the content's form without tools and
    with tools.

    Raises:
        UnsureError, RejectedError: it is not known.
    """
    scope = bytes(parsed.fields.get("cache_salt", b""))
    if parsed.route is Route.CHAT:
        chat = read_chat(parsed.fields)
        text = tokenizer.rendered(chat, forms[chat.tools is not None])
        return PromptText(text, chat.add_special_tokens, scope)
    refuse_unknown(parsed.fields)
    if (
        prompt.raw is None
        or prompt.tokens is not None
        or bytes(parsed.fields.get("suffix", b"null")) != b"null"
    ):
        raise UnsureError("suffix" if "suffix" in parsed.fields else "prompt")
    return PromptText(
        text_of(bytes(prompt.raw)), flag(parsed.fields, "add_special_tokens", True), scope
    )


class Tokenizer:
    """A tokenizer of the `tokenizers` library with its chat template. Make it with `load`."""

    def __init__(self, model: Any, *, capacity: int = CACHE_BYTES) -> None:
        self._model = model
        backend = self._backend = model.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(getattr(model, "split_special_tokens", False))
        # In these cases added tokens are not searched for, or words are merged at random: a text is
        # not the sum of its segments.
        uncut = backend.encode_special_tokens or bool(getattr(backend.model, "dropout", None))
        added = () if uncut else backend.get_added_tokens_decoder().values()
        self._segments = SegmentCache(
            SegmentBoundaries(added), self._encode, 0 if uncut else capacity
        )
        self._around = self._specials()
        self._names: dict[str, frozenset[str]] = {}

    def __repr__(self) -> str:
        return f"<Tokenizer {self._model.name_or_path} {self._segments!r}>"

    def completion(self, text: str, *, add_special_tokens: bool, scope: bytes = b"") -> TokenIds:
        """Return the ids of a text, with the special tokens that the model's tokenizer puts around
        it, or without.
        """
        if add_special_tokens and self._around is None:
            (ids,) = [
                one.ids for one in self._backend.encode_batch_fast([text], add_special_tokens=True)
            ]
            return TokenIds(msgspec.json.encode(ids), len(ids))
        json, count, _ = self._segments.encode(text, scope)
        before, after = self._added(add_special_tokens=add_special_tokens)
        return _with_added(before, json, count, after)

    def beginning(self, text: PromptText) -> BegunIds | None:
        """See `LocalTokenizer`."""
        if not self._segments.capacity or (text.add_special_tokens and self._around is None):
            return None
        json, count, read, read_ids = self._segments.beginning(text.text, FRESH, text.scope)
        before, after = self._added(add_special_tokens=text.add_special_tokens)
        if read == len(text.text):
            ids = _with_added(before, json, count, after)
            return BegunIds(ids, ids.count, is_whole=True)
        tokens = len(before) + round(read_ids * len(text.text) / read) + len(after)
        return BegunIds(_with_added(before, json, count, ()), tokens, is_whole=False)

    def _added(self, *, add_special_tokens: bool) -> tuple[Sequence[int], Sequence[int]]:
        """Return the ids that are added around a text."""
        return self._around if add_special_tokens and self._around is not None else ((), ())

    def rendered(self, chat: Chat, form: ContentFormat) -> str:
        """Return the text of a chat.

        Raises:
            UnsureError: the template prints what only the engine knows (its clock), or there is
                none.
            RejectedError: the template takes no such conversation.
        """
        try:
            template = self._model.get_chat_template(None, tools=chat.tools)
        except ValueError:
            raise UnsureError("the model has no chat template") from None
        if "strftime_now" in template:
            raise UnsureError("the chat template prints the date")
        known = '"developer"' in template or "'developer'" in template
        messages = conversation(chat.messages, form, developer=known)
        try:
            names = self._variables(template) | _ARGUMENTS
            text: str = self._model.apply_chat_template(
                messages,
                tools=chat.tools,
                chat_template=template,
                tokenize=False,
                **{name: value for name, value in chat.arguments.items() if name in names},
            )
        except Exception as error:
            # Whatever a template raises, its message may quote the client: it stays out of the log.
            raise RejectedError(type(error).__name__) from None
        return text

    def _variables(self, template: str) -> frozenset[str]:
        """Return the variables that a template reads and doesn't set: others are not passed to
        it.
        """
        names = self._names.get(template)
        if names is None:
            meta = importlib.import_module("jinja2.meta")
            rendering = importlib.import_module("transformers.utils.chat_template_utils")
            # The same environment that renders it: with the tags and filters of transformers, and
            # its cache.
            tree = rendering._compile_jinja_template(template).environment.parse(template)  # noqa: SLF001
            names = self._names[template] = frozenset(meta.find_undeclared_variables(tree))
        return names

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [
            one.ids
            for one in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def _specials(self) -> tuple[list[int], list[int]] | None:
        """Return the ids that the tokenizer adds before and behind any text, None if they are not
        the same for all.
        """
        around: list[tuple[list[int], list[int]]] = []
        for text in ("a", "b c\nd"):
            bare, full = (
                self._backend.encode(text, add_special_tokens=special).ids
                for special in (False, True)
            )
            added = len(full) - len(bare)
            places = (
                [at for at in range(added + 1) if full[at : at + len(bare)] == bare] if bare else []
            )
            if len(places) != 1:
                return None
            around.append((full[: places[0]], full[places[0] + len(bare) :]))
        return around[0] if around[0] == around[1] else None


def check_installed() -> None:
    """Raise NotInstalledError, in one line, if there is no library that tokenizes: the image has it
    only as a variant.
    """
    if importlib.util.find_spec("transformers") is None:
        raise NotInstalledError(
            "needs transformers, which is not installed: take the image that is built with "
            "--target tokenizer, or pip install transformers"
        )


def _with_added(before: Sequence[int], json: bytes, count: int, after: Sequence[int]) -> TokenIds:
    """Return `count` ids, JSON with commas between them, and the ids that are added around them."""
    parts = [
        *(b"%d" % one for one in before),
        *([json] if count else []),
        *(b"%d" % one for one in after),
    ]
    return TokenIds(b"[%b]" % b",".join(parts), len(before) + count + len(after))


def load(path: str, *, capacity: int = CACHE_BYTES) -> Tokenizer:
    """Load the tokenizer of a model's folder. Never from the network.

    Raises:
        UnusableError: in one line.
    """
    if not Path(path).is_dir():
        raise UnusableError("is not a folder")
    return _loaded(path, capacity)


def _check_files(folder: Path) -> None:
    """Refuse a folder with a file that would hold up the library, or that is larger than any
    tokenizer's.

    Raises:
        UnusableError: it names the file.
    """
    for file in sorted(folder.iterdir()):
        if file.suffix in _READ:
            try:
                check_regular(file, MAX_FILE)
            except UnusableFileError as error:
                raise UnusableError(f"{file.name} {error}") from None


def find(name: str, *, capacity: int = CACHE_BYTES) -> Tokenizer:
    """Load the tokenizer of a model by its `root` in an engine's list: a folder, or a name in the
    local cache of the hub.

    Raises:
        UnusableError: in one line.
    """
    return _loaded(name, capacity)


def _loaded(name: str, capacity: int) -> Tokenizer:
    check_installed()
    # A thread encodes one prompt at a time: the library's own threads would only be another pool.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        transformers = importlib.import_module("transformers")  # seconds, and 60 MB
    except ImportError as error:
        raise UnusableError(f"transformers can't be imported: {_line(error)}") from None
    # Its log lines go where all others go: its own handler writes to standard error, which may
    # block.
    library = logging.getLogger("transformers")
    library.handlers.clear()
    library.propagate = True
    try:
        if (folder := Path(name)).is_dir():
            _check_files(folder)
        model = transformers.AutoTokenizer.from_pretrained(
            name, local_files_only=True, trust_remote_code=False
        )
    except UnusableError:
        raise
    except Exception as error:
        raise UnusableError(f"has no tokenizer that can be loaded: {_line(error)}") from None
    if not getattr(model, "is_fast", False) or not hasattr(model, "backend_tokenizer"):
        raise UnusableError(
            "has a tokenizer that is written in Python: only those of the tokenizers library are "
            "exact here"
        )
    return Tokenizer(model, capacity=capacity)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
