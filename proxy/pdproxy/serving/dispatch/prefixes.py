"""What is known of engines' prefix caches, for requests: what a prompt is known by, what was
expected, what engines say.

Owns the thread that makes the keys of long prompts, and the number of prompts that wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
from msgspec import structs

from pdproxy.scheduling.prefix.keys import PromptKeys
from pdproxy.scheduling.prefix.knowledge import Knowledge
from pdproxy.scheduling.prefix.prompts import QUICK_KEYS, PromptBeginning, beginning_of
from pdproxy.tokens.ids import BegunIds, TokenIds
from pdproxy.wire.engine import UNREADABLE
from pdproxy.wire.fields import has_value, is_absent
from pdproxy.wire.request import Parsed
from pdproxy.wire.route_form import Prompt

WAITING = 64
"""Long prompts that may wait for the thread. Nothing is known of one more."""
MAX_XARGS = 64 << 10
"""Bytes of a client's `vllm_xargs` to which a field is added."""
_XARGS, _MODE = "vllm_xargs", "kv_cache_report_mode"

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


class PrefixQuestions:
    """Asks `knowledge` for requests. `now`: monotonic seconds. `skipped`: long prompts too many.
    Read only.
    """

    def __init__(self, knowledge: Knowledge, now: Callable[[], float]) -> None:
        self.knowledge = knowledge
        self._now = now
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="prefix keys")
        self._waiting = 0
        self.skipped = 0
        self.takes_beginnings = False
        """Whether the ids of a prompt's beginning may be enough: nothing else needs its ids, and
        engines are chosen in this process. Set once, before the first request.
        """

    def __repr__(self) -> str:
        return f"<Prefixes {self._waiting} waiting>"

    async def known_by(
        self, parsed: Parsed, prompt: Prompt | None, ids: TokenIds | None
    ) -> PromptBeginning | None:
        """Return what a prompt is known by, None if nothing is. Long ones' keys are made in a
        thread. `ids`: if known.

        `prompt` is None if the request itself says that one engine must serve it: that engine may
        read another prompt, several ones, or look into no cache.
        """
        if prompt is None:
            return None
        beginning = self._beginning(parsed, prompt, ids)
        if beginning is not None and beginning.is_long:
            if self._waiting >= WAITING:
                self.skipped += 1
                return None
            if not await asyncio.shield(self._in_thread(beginning.keys)):
                return None
        return beginning

    def _beginning(
        self, parsed: Parsed, prompt: Prompt, ids: TokenIds | None
    ) -> PromptBeginning | None:
        knowledge = self.knowledge
        return beginning_of(
            parsed,
            prompt,
            ids,
            knowledge.unit,
            is_adapter=parsed.model is not None and parsed.model in knowledge.adapters(),
            text_per_token=knowledge.text_per_token,
        )

    def _in_thread(self, keys: PromptKeys) -> asyncio.Future[bool]:
        self._waiting += 1
        work = asyncio.get_running_loop().run_in_executor(self._threads, _made, keys)
        work.add_done_callback(self._over)
        return work

    def known_by_first(
        self, parsed: Parsed, prompt: Prompt, begun: BegunIds
    ) -> PromptBeginning | None:
        """Return what a prompt is known by if its first ids are enough: no engine has more of it.
        None: all of its ids are needed.
        """
        knowledge = self.knowledge
        if begun.ids.count > QUICK_KEYS * knowledge.unit:
            return None
        beginning = self._beginning(parsed, prompt, begun.ids)
        if beginning is None:
            return None
        beginning.begin(begun.tokens)
        more = knowledge.may_hold_more(beginning, begun.ids.count, self._now())
        return None if more else beginning

    def complete(self, beginning: PromptBeginning, ids: TokenIds) -> None:
        """Take all ids of such a prompt, which was sent to engines meanwhile."""
        if self._waiting >= WAITING:
            return
        # The request may choose engines meanwhile: it sees no keys that are being made.
        keys = beginning.keys_of(ids)

        def made(work: asyncio.Future[bool]) -> None:
            if not work.cancelled() and work.result():
                beginning.complete(keys, ids.count)
                self.knowledge.completed(beginning, self._now())

        self._in_thread(keys).add_done_callback(made)

    def _over(self, _: asyncio.Future[bool]) -> None:
        self._waiting -= 1

    def stop(self) -> None:
        """End the thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def reporting(parsed: Parsed) -> Parsed:
    """Return a request that asks its engine to report the blocks that it reuses. A client's own
    choice stays.
    """
    fields, added = parsed.fields, b'"%s":"full"' % _MODE.encode()
    if is_absent(fields, _XARGS) or has_value(fields, _XARGS, b"{}"):
        xargs = b"{%b}" % added
    else:
        own = memoryview(fields[_XARGS])
        try:
            if own.nbytes > MAX_XARGS or _MODE in _object.decode(own):
                return parsed
        except UNREADABLE:
            return parsed  # the engine will refuse it
        text = bytes(own)
        end = text.rindex(b"}")
        xargs = b"%b%b%b}" % (text[:end], b"," if _object.decode(own) else b"", added)
    return structs.replace(parsed, fields=fields | {_XARGS: msgspec.Raw(xargs)})


def _made(keys: PromptKeys) -> bool:
    """Make a prompt's keys. Runs in a thread. Raises nothing: exceptions may quote the prompt, and
    would be logged.
    """
    try:
        for _ in keys:
            pass
    except Exception:
        return False
    return True
