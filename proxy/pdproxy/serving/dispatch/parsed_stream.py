"""The client's end of a chat's stream that another engine goes on with as a completion, while
engines parse its token ids.

One call is under way at a time. What comes meanwhile is put into the next one, so a slow parser
makes fewer and larger events, and never a queue of calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pdproxy.kit.errors import EngineError, UnparsedError
from pdproxy.serving.stream.begun_writer import BegunWriter
from pdproxy.serving.stream.response_writer import ResponseWriter
from pdproxy.transfer.chat_chunks import NotACompletionError
from pdproxy.transfer.parsed_events import ParsedEvents, TooManyTokensError

Derender = Callable[[bytes, int], Awaitable[bytes | None]]
"""Returns an engine's answer of at most so many bytes to a call, None if it can't be had."""


class ParsedStream(BegunWriter):
    """Writes what engines make of the events of a continuation. Its owner calls `end` or `close`,
    once.
    """

    def __init__(self, output: ResponseWriter, events: ParsedEvents, derender: Derender) -> None:
        super().__init__(output)
        self._events = events
        self._derender = derender
        self._calls: asyncio.Task[None] | None = None
        self._why_broken: str | None = None
        self._is_engines = False
        """Whether the engine that makes the answer has broken it, not an engine that parses it."""

    @property
    def is_broken(self) -> bool:
        """Whether something was not written."""
        return self._why_broken is not None

    def write(self, data: bytes) -> None:
        """Have whole events parsed, and send what becomes of them.

        Raises:
            EngineError: they are none of a completion.
            UnparsedError: those before could not be parsed, or they are too many.
        """
        if self._why_broken is None:
            try:
                self._events.take(data)
            except NotACompletionError as error:
                self._why_broken, self._is_engines = (
                    f"the engine sent an invalid completion event: {error}",
                    True,
                )
            except TooManyTokensError as error:
                self._why_broken = str(error)
        self._check()
        if self._calls is None:
            self._calls = asyncio.get_running_loop().create_task(self._call(), name="derender")

    def _check(self) -> None:
        if self._why_broken is not None:
            raise (EngineError if self._is_engines else UnparsedError)(self._why_broken)

    async def _call(self) -> None:
        """Ask until there is nothing more to ask for."""
        events = self._events
        try:
            while (body := events.call()) is not None:
                answer = await self._derender(body, events.max_answer)
                if answer is None:
                    self._why_broken = "no engine has parsed the answer"
                    return
                if shown := events.answered(answer):
                    self._output.write(shown)
        except NotACompletionError as error:
            self._why_broken = f"an engine has parsed the answer to something else: {error}"
            return
        except BaseException:
            # what the client has not got must not be left out
            self._why_broken = "the answer was not parsed"
            raise
        finally:
            self._calls = None
        if rest := events.rest():
            self._output.write(rest)

    async def end(self) -> None:
        """Wait until all has been sent. Each call has a deadline.

        Raises:
            UnparsedError: something could not be parsed.
        """
        if self._calls is not None:
            await self._calls
        self._check()

    def close(self) -> None:
        """End the call that is under way: nobody waits for the stream any more."""
        if self._calls is not None:
            self._calls.cancel()
