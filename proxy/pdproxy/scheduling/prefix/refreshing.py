"""Which requests ask their engine to report the blocks that they reuse: those whose prompt it had
although nobody knew. Pure.

Such blocks are known to the engine alone: its message about them was lost, or it published them
before anybody listened. With `vllm_xargs: {"kv_cache_report_mode": "full"}` an engine announces all
blocks again that a request found in its cache (vLLM 0.32.0, `v1/core/kv_cache_manager.py`). Older
ones ignore the field.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

MOST = 256
"""Beginnings of each engine that wait for a request."""
GAP = 0.1
"""Seconds between two such requests of one engine: each costs events for all blocks of its
prompt.
"""
REFUSALS = 3
"""So many in a row show that an engine refuses the field. One may be the fault of the client's own
request.
"""


class Refreshing:
    """`on`: whether any request asks. `asked` and `refused`: how many did, and how many of them
    were refused. Read only.
    """

    def __init__(self, *, on: bool = True) -> None:
        self._on = on
        self._wanted: dict[str, OrderedDict[int, None]] = {}
        self._last: dict[str, float] = {}
        self._refusals: dict[str, int] = {}
        """By engine, how many in a row."""
        self.asked = 0
        self.refused = 0

    def wanted(self, url: str, key: int | None) -> None:
        """Note that an engine holds a block of this key, which was not known. None: the prompt has
        no such block.
        """
        if not self._on or key is None or self._refusals.get(url, 0) >= REFUSALS:
            return
        keys = self._wanted.setdefault(url, OrderedDict())
        keys[key] = None
        if len(keys) > MOST:
            keys.popitem(last=False)

    def due(self, url: str, prompt: Iterable[Sequence[int]], now: float) -> bool:
        """Return whether a request asks the engine: a block of its prompt is wanted. Counted as
        asked then. `prompt`: keys.
        """
        wanted = self._wanted.get(url)
        if not wanted or now - self._last.get(url, float("-inf")) < GAP:
            return False
        found = [key for step in prompt for key in step if key in wanted]
        if not found:
            return False
        for key in found:
            wanted.pop(key, None)
        self._last[url] = now
        self.asked += 1
        return True

    def accepted(self, url: str) -> None:
        """Note that an engine has answered such a request."""
        self._refusals.pop(url, None)

    def refuses(self, url: str) -> None:
        """Note that an engine refuses such a request: after `REFUSALS` it gets no more until it is
        started again.
        """
        self.refused += 1
        self._refusals[url] = self._refusals.get(url, 0) + 1
        if self._refusals[url] >= REFUSALS:
            self._wanted.pop(url, None)

    def forget(self, url: str) -> None:
        """Forget an engine: it is gone, or was started again."""
        self._refusals.pop(url, None)
        self._wanted.pop(url, None)
        self._last.pop(url, None)
