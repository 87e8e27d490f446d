"""Books about KV handles: each one that the proxy becomes responsible for ends, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdproxy.serving.kv.custodian import Custodian
from pdproxy.serving.kv.custody import Custody, End
from tests.chaos.finding import Finding, shortened


class KvBooks:
    """Watches a custodian: what it takes, and what ends. Keeps no handle alive."""

    def __init__(self, custodian: Custodian) -> None:
        self._live: dict[int, str] = {}
        self._wrong: list[str] = []
        self.made = 0
        self.ended = 0
        self._closed: list[str] = []
        """The ids of handles that decode engines had, which were given up behind the prefill's
        answer: their requests were closed.
        """
        for name in ("take", "promise"):
            setattr(custodian, name, self._making(getattr(custodian, name)))
        ended = custodian.ended

        def note(custody: Custody, how: Any) -> None:
            self.ended += 1
            if how in (End.ABORTED, End.LOST) and custody.was_asked and not custody.promised:
                self._closed.append(custody.handle.remote_request_id)
            if self._live.pop(id(custody), None) is None:
                self._wrong.append(
                    f"{custody.handle.remote_request_id} ended ({how.label}), and was not held"
                )
            ended(custody, how)

        setattr(custodian, "ended", note)  # noqa: B010 - a method of one object

    def _making(self, make: Callable[..., Custody]) -> Callable[..., Custody]:
        def made(*args: Any) -> Custody:
            custody = make(*args)
            if custody.state is not None:
                self.made += 1
                if (other := self._live.get(id(custody))) is not None:
                    self._wrong.append(f"{other} was forgotten")
                self._live[id(custody)] = custody.handle.remote_request_id
            return custody

        return made

    def was_closed(self, request: str) -> bool:
        """Return whether a decode engine's request, by the engine's own id, was closed between the
        prefill's answer and the push of its KV, as far as the proxy knows.
        """
        return any(ident in request for ident in self._closed)

    def findings(self) -> list[Finding]:
        """Return what is wrong once nothing may be held any more."""
        wrong = [*self._wrong, *(f"{name} has not ended" for name in self._live.values())]
        return shortened([Finding("each handle ends once", text) for text in wrong])
