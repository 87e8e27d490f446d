"""One prompt's token ids before an engine gets the prompt: made here in a thread, or by an engine's
`/tokenize`.

Owns the threads that tokenize, and the number of prompts that wait for them. Where ids only say
which engine has what of a prompt, its beginning may be enough to choose one: then the other ids are
made while the engine works. Ids save the engines work. If the contract does not need them, a
request continues without ids after any failure: a deadline, a full queue, a request that only an
engine understands. If the contract needs them, an engine's `/tokenize` is asked next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from pdproxy.fleet.canary import Trusted
from pdproxy.fleet.engines import EngineRegistry
from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import EngineError, EngineRefusedError, OverloadedError, Wait
from pdproxy.observe.description import Label, counter, histogram
from pdproxy.observe.events import DeadlinePassed, Observers, Tokenized
from pdproxy.serving.dispatch.tokenizer_check import TokenizerCheck
from pdproxy.settings.limits import Deadlines
from pdproxy.tokens.errors import RejectedError, UnsureError
from pdproxy.tokens.ids import BegunIds, TokenIds, from_numbers
from pdproxy.tokens.tokenize_request import tokenize_body
from pdproxy.tokens.tokenizer import LocalTokenizer, PromptText, prompt_text
from pdproxy.wire.fields import is_absent
from pdproxy.wire.request import Parsed
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Prompt

THREADS = 2
"""Number of threads. More would wait for each other: the interpreter's lock lets one at a time
render templates and write ids.
"""
WAITING = 64
"""Prompts that may wait for a thread. One more would only reach its deadline: it goes to the
engines at once, without ids.
"""
MAX_BYTES = 4 * 2**20
"""Bytes that are read here for a prompt: more would take longer than its deadline."""
MAX_ITEMS = 20_000
"""Strings, arrays and objects of a body that is read here: parsing holds the interpreter's lock and
stops the event loop.
"""
NO_ID = 2**32
"""Token ids are below this: engines keep them in 32 bits, and refuse others by themselves."""

AskEngine = Callable[[str, bytes, bytes | None], Awaitable[TokenIds]]
"""Sends an engine (its URL) a body for `/tokenize` with the client's own `Authorization`, and
returns the ids.
"""

_Result = tuple[str, TokenIds | None]
"""The `result` of the event `Tokenized`, and the prompt's ids."""
WhenMade = Callable[[TokenIds], None]
"""Gets all ids of a prompt whose beginning was enough before."""
TakeBeginning = Callable[[BegunIds], WhenMade | None]
"""Is asked whether the ids of a prompt's beginning are enough for now: who gets all of them later;
None: they are not.
"""

_LATER = "later"
"""In place of such a `result`: the ids will come later."""
_T = TypeVar("_T")


class _Begun(msgspec.Struct, frozen=True):
    """A prompt's text, and the ids of its beginning."""

    text: PromptText
    beginning: BegunIds


_ids_decoder = msgspec.json.Decoder(list[int])
RESULTS_OF_TOKENIZING = (
    ("ok", "ids were made"),
    ("off", "they are not made here for this model: its canaries differ, or are not known"),
    ("unsure", "only an engine knows the ids of this request"),
    ("rejected", "the template or the engine rejected the request"),
    ("late", "they did not come in deadlines.tokenize"),
    ("busy", "too many prompts wait for the threads"),
    ("long", "the prompt is too long to be tokenized here"),
    ("failed", "the tokenizer or the engine failed"),
)
_SOURCE = Label("source", (("here", "in this process"), ("engine", "by an engine's /tokenize")))
TOKENIZED = counter(
    "pdproxy_tokenize_total",
    "prompts",
    "Prompts whose token ids were requested before an engine gets them; a prompt counts once per "
    "source",
    _SOURCE,
    Label("result", RESULTS_OF_TOKENIZING),
    of=Tokenized,
)
TOKENIZE = histogram(
    "pdproxy_tokenize_seconds",
    "Seconds to get the token ids of a prompt, or to fail",
    _SOURCE,
    of=Tokenized,
    by="seconds",
)


class Trust(Protocol):
    """Knows which tokenizer makes a model's ids: `fleet.canary.Canaries`."""

    def trusted(self, model: str | None, route: Route) -> Trusted | None:
        """Return the tokenizer, None if there is none."""

    def refuted(self, url: str, model: str | None, route: Route, why: str) -> None:
        """Stop using the tokenizer: an engine serves other ids."""


class Tokenizing:
    """Makes prompts' ids. `required`: the contract needs them. `deadlines`: has the deadline of one
    prompt in all.
    """

    def __init__(
        self,
        trust: Trust,
        ask: AskEngine,
        engines: EngineRegistry,
        observers: Observers,
        clock: Clock,
        now: Callable[[], float],
        threads: ThreadPoolExecutor,
        behind: Executor,
        *,
        deadlines: Deadlines,
        required: bool,
    ) -> None:
        self.check = TokenizerCheck(engines, trust)
        self._trust = trust
        self._ask = ask
        self._engines = engines
        self._observers = observers
        self._clock = clock
        self._now = now
        self._threads = threads
        self._behind = behind
        """Makes the ids that no request waits for."""
        self._deadlines = deadlines
        self._required = required
        self._waiting = 0
        self._abandoned: set[Future[Any]] = set()
        """Prompts that threads still work on, although no request waits for them."""

    def __repr__(self) -> str:
        return f"<Tokenizing {self._waiting} waiting>"

    async def ids(
        self,
        parsed: Parsed,
        prompt: Prompt,
        authorization: bytes | None = None,
        take: TakeBeginning | None = None,
    ) -> TokenIds | None:
        """Return a prompt's ids, None if there are none: then a request whose contract needs them
        can't be split.

        `authorization` is the client's own header, for engines that check keys themselves. `take`:
        what may do with the ids of the beginning; None as well then.
        """
        # the client sent ids, and the engines get them with the request
        if prompt.tokens is not None:
            return self._given(parsed, prompt) if self._required else None
        source, started = "here", self._now()
        # Where ids are required, half of the time is kept for asking an engine.
        seconds = self._deadlines.tokenize / 2 if self._required else self._deadlines.tokenize
        made = partial(self._report, source, started)
        result, ids = await self._in_time(seconds, self._here(parsed, prompt, take, made))
        if result == _LATER:
            return None
        made(result, ids)
        if ids is None and self._required and result != "rejected":
            source, started = "engine", self._now()
            result, ids = await self._in_time(seconds, self._engine(parsed, prompt, authorization))
            self._report(source, started, result, ids)
        return ids

    async def _in_time(self, seconds: float, work: Awaitable[_Result]) -> _Result:
        try:
            with self._clock.within(seconds):
                return await work
        except TimeoutError:
            self._observers.notify(DeadlinePassed(Wait.TOKENIZE.value))
            return "late", None

    def _report(self, source: str, started: float, result: str, ids: TokenIds | None) -> None:
        seconds = self._now() - started
        self._observers.notify(
            Tokenized(source, result, seconds, ids.count if ids is not None else 0)
        )

    @staticmethod
    def _given(parsed: Parsed, prompt: Prompt) -> TokenIds | None:
        if prompt.raw is None or not is_absent(parsed.fields, "truncate_prompt_tokens"):
            return None
        if memoryview(prompt.raw).nbytes > MAX_BYTES:
            return None  # parsing them would stop the event loop
        try:
            ids = _ids_decoder.decode(prompt.raw)
        except msgspec.MsgspecError:
            return None
        return from_numbers(ids) if min(ids, default=-1) >= 0 and max(ids) < NO_ID else None

    async def _here(
        self,
        parsed: Parsed,
        prompt: Prompt,
        take: TakeBeginning | None,
        report: Callable[[str, TokenIds | None], None],
    ) -> _Result:
        trusted = self._trust.trusted(parsed.model, parsed.route)
        if trusted is None:
            return "off", None
        if _is_long(parsed, prompt):
            return "long", None
        if self._waiting >= WAITING or len(self._abandoned) >= THREADS:
            return "busy", None
        begins = take is not None
        made = await self._awaited(
            self._thread(self._threads, _made, trusted, parsed, prompt, begins)
        )
        if not isinstance(made, _Begun):
            return made
        assert take is not None
        if (later := take(made.beginning)) is None:
            work = self._thread(self._threads, _all_of, trusted.tokenizer, made.text)
            return await self._awaited(work)

        def over(work: Future[_Result]) -> None:
            result, ids = work.result()
            report(result, ids)
            if ids is not None:
                later(ids)

        self._thread(self._behind, _all_of, trusted.tokenizer, made.text, over=over)
        return _LATER, None

    def _thread(
        self,
        threads: Executor,
        work: Callable[..., _T],
        *given: object,
        over: Callable[[Future[_T]], None] = lambda _: None,
    ) -> Future[_T]:
        """Have a thread work. `over` is called behind that, in the event loop."""
        loop = asyncio.get_running_loop()

        def in_loop() -> None:
            self._waiting -= 1
            self._abandoned.discard(future)
            if not future.cancelled():
                over(future)

        def done(_: Future[_T]) -> None:  # in its thread
            with suppress(RuntimeError):  # the loop has ended before
                loop.call_soon_threadsafe(in_loop)

        future = threads.submit(work, *given)
        self._waiting += 1
        future.add_done_callback(done)
        return future

    async def _awaited(self, work: Future[_T]) -> _T:
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            if not work.cancel() and not work.done():
                self._abandoned.add(work)
            raise

    async def _engine(self, parsed: Parsed, prompt: Prompt, authorization: bytes | None) -> _Result:
        if parsed.route is Route.CHAT and _is_long(parsed, prompt):
            return "long", None  # parts of it would be parsed to ask
        try:
            body = tokenize_body(parsed, prompt)
        except UnsureError:
            return "unsure", None
        now = self._now()
        engines = [engine.in_ledger for engine in self._engines.values()]
        able = [
            ledger_engine
            for ledger_engine in engines
            if ledger_engine.usable(now)
            and (parsed.model is None or ledger_engine.serves(parsed.model))
        ]
        if not able:
            return "failed", None
        ledger_engine = min(able, key=lambda one: one.requests)
        try:
            return "ok", await self._ask(ledger_engine.url, body, authorization)
        except EngineRefusedError as error:
            return "rejected" if error.status == 400 else "failed", None
        except (EngineError, OverloadedError):
            return "failed", None


def _is_long(parsed: Parsed, prompt: Prompt) -> bool:
    """Return whether it would take long to parse what a prompt's ids are made of."""
    return _bytes_to_read(parsed, prompt) > MAX_BYTES or (
        parsed.route is Route.CHAT and parsed.items > MAX_ITEMS
    )


def _bytes_to_read(parsed: Parsed, prompt: Prompt) -> int:
    """Return how many bytes are parsed for a prompt's ids: all of a chat's; of a list of prompts,
    the others don't count.
    """
    if parsed.route is Route.CHAT:
        return parsed.body_bytes
    return parsed.body_bytes - memoryview(parsed.fields["prompt"]).nbytes + prompt.text_bytes


def _made(trusted: Trusted, parsed: Parsed, prompt: Prompt, begins: bool) -> _Result | _Begun:
    """Tokenize a prompt; with `begins` only its beginning, if there is much more of it. Runs in a
    thread. Raises nothing: exceptions may quote the prompt, and would be logged.
    """
    tokenizer = trusted.tokenizer
    try:
        text = prompt_text(tokenizer, parsed, prompt, trusted.forms)
        begun = tokenizer.beginning(text) if begins else None
        if begun is not None and not begun.is_whole:
            return _Begun(text, begun)
        return "ok", text.ids(tokenizer) if begun is None else begun.ids
    except UnsureError:
        return "unsure", None
    except RejectedError:
        return "rejected", None
    except Exception:
        return "failed", None


def _all_of(tokenizer: LocalTokenizer, text: PromptText) -> _Result:
    """Tokenize a text. As `_made`."""
    try:
        return "ok", text.ids(tokenizer)
    except Exception:
        return "failed", None
