"""One prompt's ids: where they come from, and what a contract gets that can do nothing without
them.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from pdproxy.fleet.canary import Trusted
from pdproxy.kit.clock import Clock
from pdproxy.kit.errors import EngineRefusedError, EngineTimeoutError, Wait
from pdproxy.observe.events import DeadlinePassed, Observers, Tokenized
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, Role
from pdproxy.scheduling.policy import Ask
from pdproxy.serving.dispatch import tokenizing
from pdproxy.serving.dispatch.tokenizing import Tokenizing
from pdproxy.settings.limits import Deadlines
from pdproxy.tokens.errors import RejectedError
from pdproxy.tokens.ids import TokenIds
from pdproxy.wire.request import Parsed, parse
from pdproxy.wire.route import Route
from tests.fakes.recorder import Recorder
from tests.fakes.registry import registry
from tests.fakes.tokenizer import SimTokenizer
from tests.fakes.world import until

THEIRS = TokenIds(b"[7,8]", 2)
OURS = SimTokenizer().completion("hello", add_special_tokens=True)


class Stage(Recorder):
    """Engines that answer, and a tokenizer or none."""

    def __init__(self, threads: ThreadPoolExecutor, required: bool, deadline: float) -> None:
        super().__init__()
        self.asked: list[tuple[str, dict[str, Any], bytes | None]] = []
        self.trust: Trusted | None = Trusted(SimTokenizer(), {False: "string", True: "string"})
        self.answer: Callable[[], TokenIds] = lambda: THEIRS
        engines = [EngineSpec("http://p:1", Role.PREFILL), EngineSpec("http://d:1", Role.DECODE)]
        self.engines, self.ledger = registry(*engines)
        for engine in engines:
            self.ledger.mark_up(engine.url, Evidence(frozenset({"tiny"}), "1", 16, (), 0, 1.0))
        self.tokenizing = Tokenizing(
            self,
            self._ask,
            self.engines,
            Observers([self]),
            Clock(),
            lambda: asyncio.get_running_loop().time(),
            threads,
            threads,
            deadlines=Deadlines(tokenize=deadline),
            required=required,
        )

    def trusted(self, model: str | None, route: Route) -> Trusted | None:
        """What canaries say."""
        return self.trust

    def refuted(self, url: str, model: str | None, route: Route, why: str) -> None:
        """What proofs say."""

    async def _ask(self, url: str, body: bytes, authorization: bytes | None) -> TokenIds:
        self.asked.append((url, msgspec.json.decode(body), authorization))
        await asyncio.sleep(0)
        return self.answer()

    async def ids(self, route: Route = Route.COMPLETIONS, **fields: Any) -> TokenIds | None:
        """The ids of a request's only prompt."""
        parsed = self.parsed(route, **fields)
        return await self.tokenizing.ids(parsed, parsed.prompts[0], b"Bearer client")

    @staticmethod
    def parsed(route: Route = Route.COMPLETIONS, **fields: Any) -> Parsed:
        """A request of a short prompt, unless the fields say otherwise."""
        usual = (
            {"prompt": "hello"}
            if route is Route.COMPLETIONS
            else {"messages": [{"role": "user", "content": "x"}]}
        )
        return parse(route, msgspec.json.encode({"model": "tiny", **usual, **fields}))

    @property
    def results(self) -> list[tuple[str, str]]:
        """What was reported."""
        return [(one.source, one.result) for one in self.events if isinstance(one, Tokenized)]


@asynccontextmanager
async def stage(*, required: bool = False, deadline: float = 2.0) -> AsyncIterator[Stage]:
    """A stage with two threads."""
    with ThreadPoolExecutor(2) as threads:
        yield Stage(threads, required, deadline)


async def test_made_here() -> None:
    """Where a tokenizer is trusted, no engine is asked."""
    async with stage(required=True) as s:
        assert await s.ids() == OURS
        assert (s.results, s.asked) == ([("here", "ok")], [])


@pytest.mark.parametrize(
    ("route", "fields", "result"),
    [
        (Route.CHAT, {}, "ok"),
        (Route.CHAT, {"tools": [{"type": "function", "function": {"name": "f" * 999}}]}, "long"),
        (Route.CHAT, {"chat_template_kwargs": {"a": "x" * 999}}, "long"),
        (
            Route.CHAT,
            {"messages": [{"role": "assistant", "content": "x", "reasoning": "x" * 999}]},
            "long",
        ),
        (Route.COMPLETIONS, {"add_special_tokens": [True] * 300}, "long"),
        (Route.COMPLETIONS, {"prompt": ["hello", "x" * 999]}, "ok"),
    ],
)
async def test_everything_counts_that_is_read_for_a_prompt(
    monkeypatch: pytest.MonkeyPatch, route: Route, fields: dict[str, Any], result: str
) -> None:
    """Wherever the bytes are, to parse them holds up everybody. The other prompts of a list have
    their own turn.
    """
    monkeypatch.setattr(tokenizing, "MAX_BYTES", 500)
    async with stage() as s:
        await s.ids(route, **fields)
        assert s.results == [("here", result)]


async def test_threads_that_nobody_waits_for() -> None:
    """They go on: until one is done, a prompt would only wait for its deadline."""
    async with stage(deadline=60) as s:
        tokenizer = SimTokenizer()
        tokenizer.gate.clear()
        s.trust = Trusted(tokenizer, {False: "string", True: "string"})
        first = [asyncio.ensure_future(s.ids()) for _ in range(2)]
        await until(lambda: tokenizer.waiting == 2)
        queued = asyncio.ensure_future(s.ids())
        await asyncio.sleep(0)
        for one in (queued, *first):
            one.cancel()
        await asyncio.gather(queued, *first, return_exceptions=True)
        await until(lambda: repr(s.tokenizing) == "<Tokenizing 2 waiting>")
        assert await s.ids() is None
        assert s.results == [("here", "busy")]
        tokenizer.gate.set()
        await until(lambda: repr(s.tokenizing) == "<Tokenizing 0 waiting>")
        assert await s.ids() == OURS


async def test_nothing_is_asked_for_ids_that_only_spare_work() -> None:
    """An engine that tokenized for P would have the work that P is to be spared."""
    async with stage() as s:
        s.trust = None
        assert await s.ids() is None
        assert (s.results, s.asked) == ([("here", "off")], [])


async def test_an_engine_is_asked_for_ids_that_are_needed() -> None:
    """The least loaded one that serves the model, with the client's own header and all fields that
    change the prompt.
    """
    async with stage(required=True) as s:
        s.trust = None
        lease = s.ledger.assign_alone(Ask("tiny", 1, 0.0))
        assert lease is not None
        assert lease.engine.url == "http://d:1"
        assert await s.ids(add_special_tokens=False) == THEIRS
        body = {"model": "tiny", "prompt": "hello", "add_special_tokens": False}
        assert s.asked == [("http://p:1", body, b"Bearer client")]
        assert s.results == [("here", "off"), ("engine", "ok")]
        assert await s.ids(model="of nobody") is None
        assert s.results[2:] == [("here", "off"), ("engine", "failed")]


async def test_a_chat_with_all_its_fields() -> None:
    """The engine's route knows fewer: the others go where the engine would put them, thoughts by
    their newer name.
    """
    async with stage(required=True) as s:
        s.trust = None
        said = {"role": "assistant", "content": "x", "reasoning_content": "why"}
        tools = [{"type": "function", "function": {"name": "f"}}]
        sent = {
            "tools": tools,
            "add_generation_prompt": False,
            "add_special_tokens": True,
            "continue_final_message": True,
        }
        await s.ids(
            Route.CHAT,
            messages=[said],
            chat_template_kwargs={"a": 1},
            documents=[{"t": "d"}],
            reasoning_effort="none",
            temperature=0,
            max_tokens=5,
            **sent,
        )
        given = {
            "a": 1,
            "documents": [{"t": "d"}],
            "reasoning_effort": "none",
            "enable_thinking": False,
        }
        messages = [{"role": "assistant", "content": "x", "reasoning": "why"}]
        assert s.asked[0][1] == {
            "model": "tiny",
            "messages": messages,
            "chat_template_kwargs": given,
            **sent,
        }


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (Route.COMPLETIONS, {"truncate_prompt_tokens": 5}),
        (Route.COMPLETIONS, {"suffix": "s"}),
        (Route.CHAT, {"chat_template": "{{ messages }}"}),
        (Route.CHAT, {"chat_template_kwargs": [1]}),
        (Route.CHAT, {"chat_template_kwargs": "abc"}),
        (Route.CHAT, {"chat_template_kwargs": 5}),
        (
            Route.CHAT,
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        ),
    ],
)
async def test_what_nobody_can_tell_beforehand(route: Route, fields: dict[str, Any]) -> None:
    """No ids: neither here nor by a route that has no field for it."""
    async with stage(required=True) as s:
        assert await s.ids(route, **fields) is None
        assert s.results == [("here", "unsure"), ("engine", "unsure")]
        assert s.asked == []


@pytest.mark.parametrize(
    "said",
    [
        b'"chat_template_kwargs":{"x":1e999}',
        b'"messages":[{"role":"assistant","content":"x","reasoning_content":"y","z":1e999}]',
    ],
)
async def test_what_can_not_be_written_anew(said: bytes) -> None:
    """A value that engines may take and nobody could ask them about: no ids, and no error of
    ours.
    """
    async with stage(required=True) as s:
        s.trust = None
        parsed = parse(
            Route.CHAT, b'{"model":"tiny","messages":[{"role":"user","content":"x"}],%b}' % said
        )
        (prompt,) = parsed.prompts
        assert await s.tokenizing.ids(parsed, prompt) is None
        assert s.results == [("here", "off"), ("engine", "unsure")]


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (EngineRefusedError("no", status=400, body=b""), "rejected"),
        (EngineRefusedError("no", status=404, body=b""), "failed"),
        (EngineTimeoutError("late", wait=Wait.TOKENIZE), "failed"),
    ],
)
async def test_an_engine_that_gives_none(error: Exception, result: str) -> None:
    """It refuses the prompt, has no such route, or is late: no ids, and no error of ours."""

    def fail() -> TokenIds:
        raise error

    async with stage(required=True) as s:
        s.trust, s.answer = None, fail
        assert await s.ids() is None
        assert s.results[1] == ("engine", result)


async def test_what_a_template_rejects_is_not_asked_again() -> None:
    """The engine's would reject it, too: its own error goes to the client."""

    class Rejecting(SimTokenizer):
        def rendered(self, chat: Any, form: Any) -> str:
            raise RejectedError("TemplateError")

    async with stage(required=True) as s:
        s.trust = Trusted(Rejecting(), {False: "string", True: "string"})
        assert await s.ids(Route.CHAT) is None
        assert (s.results, s.asked) == ([("here", "rejected")], [])


async def test_a_tokenizer_that_breaks() -> None:
    """Whatever it raises ends there: it may quote the prompt."""

    class Broken(SimTokenizer):
        def completion(
            self, text: str, *, add_special_tokens: bool, scope: bytes = b""
        ) -> TokenIds:
            raise RuntimeError(text)

    async with stage() as s:
        s.trust = Trusted(Broken(), {False: "string", True: "string"})
        assert await s.ids() is None
        assert s.results == [("here", "failed")]


async def test_ids_of_the_client() -> None:
    """Are taken as they are where ids are needed, if they are ids, and all of them count."""
    async with stage(required=True) as s:
        assert await s.ids(prompt=[1, 2, 3]) == TokenIds(b"[1,2,3]", 3)
        assert await s.ids(prompt=[0, 2**32 - 1]) == TokenIds(b"[0,4294967295]", 2)
        for odd in ([1, 2.5], [1, -2], [1, 2**32], [1, 10**30]):
            assert await s.ids(prompt=odd) is None
        assert await s.ids(prompt=[1, 2, 3], truncate_prompt_tokens=2) is None
        assert s.events == []
    async with stage() as s:
        assert await s.ids(prompt=[1, 2, 3]) is None


@pytest.mark.parametrize("required", [False, True])
async def test_a_thread_that_is_late(required: bool) -> None:
    """No ids in time; where they are needed, the second half of the deadline is an engine's."""
    async with stage(required=required, deadline=0.2) as s:
        tokenizer = SimTokenizer()
        tokenizer.gate.clear()
        s.trust = Trusted(tokenizer, {False: "string", True: "string"})
        assert await s.ids() == (THEIRS if required else None)
        tokenizer.gate.set()
        assert s.results == [("here", "late"), ("engine", "ok")][: 2 if required else 1]
        assert [one for one in s.events if isinstance(one, DeadlinePassed)] == [
            DeadlinePassed("tokenize")
        ]


async def test_too_many_and_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would only be late is not begun: prompts behind a full queue, and those that take too
    long by themselves.
    """
    monkeypatch.setattr(tokenizing, "WAITING", 2)
    monkeypatch.setattr(tokenizing, "MAX_BYTES", 50)
    async with stage() as s:
        tokenizer = SimTokenizer()
        tokenizer.gate.clear()
        s.trust = Trusted(tokenizer, {False: "string", True: "string"})
        assert await s.ids(prompt="x" * 60) is None
        waiting = [asyncio.ensure_future(s.ids()) for _ in range(2)]
        await asyncio.sleep(0)
        assert await s.ids() is None
        tokenizer.gate.set()
        assert await asyncio.gather(*waiting) == [OURS, OURS]
        assert s.results == [("here", "long"), ("here", "busy"), ("here", "ok"), ("here", "ok")]
        assert await s.ids() == OURS


async def test_a_chat_of_very_many_parts_is_left_to_the_engines() -> None:
    """Its JSON would be read in a thread, which holds up the event loop all the same; nor is an
    engine's question made of it.
    """
    for required in (False, True):
        async with stage(required=required) as s:
            parsed = msgspec.structs.replace(s.parsed(Route.CHAT), items=tokenizing.MAX_ITEMS + 1)
            assert await s.tokenizing.ids(parsed, parsed.prompts[0]) is None
            assert not s.asked
            assert {event.result for event in s.events if isinstance(event, Tokenized)} == {"long"}


async def test_very_many_ids_of_a_client_are_not_made_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a contract would compute with them: such a prompt is served by one engine."""
    monkeypatch.setattr(tokenizing, "MAX_BYTES", 20)
    async with stage(required=True) as s:
        assert await s.ids(prompt=[1, 2, 3]) is not None
        assert await s.ids(prompt=[11111, 22222, 33333, 44444]) is None
