"""The page of the admin listener in Chromium: it lives, drains engines, and can be read by all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec import structs

from pdproxy.web.admin import live
from pdproxy.web.admin.shapes import EngineList, RequestList
from tests.browser.chromium import BrowserPage, Chromium, connected, program, running
from tests.fakes import answers, scripts
from tests.fakes.admin import Admin, admin
from tests.fakes.engine import Reply
from tests.fakes.scripts import WORD
from tests.fakes.world import COMPLETIONS, completion, until, world

CONTRAST = (Path(__file__).parent / "contrast.js").read_text()
EVIL = '<img src="x" onerror="window.hacked=1"><script>window.hacked=1</script>'
SCHEMES = ("light", "dark")
OVER = """
    [...document.querySelectorAll("body *")]
        .filter((at) => at.getBoundingClientRect().right > WIDTH + 1)
        .filter((at) => !at.closest(".scroll, .unseen, thead, #requests th"))
        .map((at) => at.className || at.tagName)
"""
"""What is wider than the screen. Pairs of engines can be scrolled."""
KEPT = """
    [localStorage.length, sessionStorage.length, document.cookie, location.href,
     document.documentElement.outerHTML.includes("operator-key")]
"""
MARKUP = """
    (() => {
        try { document.body.innerHTML = "<b>x</b>" } catch (error) { return error.name }
    })()
"""
NAMED = {
    "button",
    "link",
    "textbox",
    "spinbutton",
    "image",
    "table",
    "dialog",
    "group",
    "columnheader",
}
"""Roles of what a reader of a screen must be told the name of."""


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "INTERVAL", 0.2)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    if program() is None:
        pytest.skip("no Chromium on PATH, and PDPROXY_TEST_CHROMIUM names none")
    with running() as found:
        yield found


@pytest_asyncio.fixture
async def browser(address: str) -> AsyncIterator[Chromium]:
    async with connected(address) as found:
        yield found


async def opened(
    browser: Chromium, api: Admin, width: int = 1600, scheme: str = "light"
) -> BrowserPage:
    """The page, open."""
    page = await browser.page()
    await page.show(width, 900, scheme, phone=width < 600)
    await page.open(f"http://127.0.0.1:{api.port}/")
    return page


def text(selector: str) -> str:
    """An expression: what stands in an element."""
    return f"document.querySelector({selector!r})?.textContent ?? ''"


async def says(page: BrowserPage, selector: str, words: str) -> None:
    """Wait until an element says something."""
    await page.until(f"({text(selector)}).includes({words!r})")


async def _rest(reply: Reply) -> None:
    await reply.pieces(WORD, answers.end())
    await reply.finish()


async def test_it_loads_and_follows_what_happens(browser: Chromium) -> None:
    """Engines, what is wrong, a request that runs and has ended, charts; the console is silent, and
    nothing is asked of another host. While the proxy does not answer, it says so.
    """
    async with world(decode=2) as w, admin(w) as api:
        page = await opened(browser, api)
        await says(page, "#state", "ok")
        await says(page, "#news", "live")
        assert await page.evaluate("document.querySelectorAll('#engines .engine').length") == 3
        assert await page.evaluate("document.querySelector('#wrong').hidden")
        w.proxy.ledger.mark_down(w.decode[1].url, "a test says so", w.proxy.now())
        await says(page, "#wrong", "a test says so")
        await says(page, "[data-level=bad] .why", "a test says so")
        go = asyncio.Event()
        w.decode[0].script(scripts.after_word(go, _rest))
        client = await w.client()
        client.post(COMPLETIONS, completion(stream=True), [("X-Request-Id", "id-1")])
        await says(page, "#requests [data-level=runs]", "id-1")
        go.set()
        await client.answer()
        await page.until("document.querySelector('#requests [data-level=runs]') === null")
        await says(page, "#requests tbody", "id-1")
        parts = "[...document.querySelectorAll('#requests rect')].map((at) => at.dataset.phase)"
        assert {"prefill", "kv", "decode"} <= {*await page.evaluate(parts)}
        await says(page, "#pairs td[data-level=some]", "1")
        await page.until(
            "document.querySelector('.figure path.main').getAttribute('d').length > 20"
        )
        assert page.problems == []
        assert {url.split("/")[2] for url in page.asked} == {f"127.0.0.1:{api.port}"}
        await page.connected(False)
        for connection in [*api.server._listener._state.connections]:
            connection.transport.abort()
        await says(page, "#news", "does not answer")
        await page.connected(True)
        await says(page, "#news", "live")


async def test_an_engine_is_drained_with_a_key(browser: Chromium) -> None:
    """A wrong key is asked for again. The right one is kept nowhere, and opens no engine's drain at
    the first click.
    """
    auth = {"admin_keys": ("operator-key",)}
    async with world(decode=2, auth=auth) as w, admin(w) as api:
        page = await opened(browser, api)
        for key in ("wrong", "operator-key"):
            await page.until("document.querySelector('#key').open")
            await page.evaluate("document.querySelector('#key-field').focus()")
            await page.write(key)
            await page.until("document.querySelector('#key-field').value === ''")
        await says(page, "#state", "ok")
        member = w.proxy.membership.members[w.decode[0].url]
        row = f"#engines tr:has([title^='{w.decode[0].url} '])"
        await page.press(f"{row} .action button")
        await says(page, f"{row} .action", "Yes")
        assert member.drain is None
        await page.press(f"{row} .action button.main")
        await until(lambda: member.drain is not None)
        await says(page, f"{row} .action", "Undrain")
        await says(page, f"{row} .why", "drained by admin")
        await says(page, "#said", "it gets no more requests until it is undrained")
        await page.press(f"{row} .action button")
        await until(lambda: member.drain is None)
        await says(page, f"{row} .action", "Drain")
        kept = [0, 0, "", f"http://127.0.0.1:{api.port}/", False]
        assert await page.evaluate(KEPT) == kept
        assert [one for one in page.problems if "401" not in one] == []


async def test_a_key_that_may_only_read_drains_nothing(browser: Chromium, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("a:looks read-only\n")
    async with world(auth={"admin_keys_file": str(path)}) as w, admin(w) as api:
        page = await opened(browser, api)
        await page.until("document.querySelector('#key').open")
        await page.write("looks")
        await says(page, "#state", "ok")
        await page.press("#engines .action button")
        await page.press("#engines .action button.main")
        await says(page, "#said", "the key a is read-only")
        await says(page, "#engines .action", "Drain")
        assert not any(member.drain for member in w.proxy.membership.members.values())


async def test_what_strangers_say_is_text(
    browser: Chromium, monkeypatch: pytest.MonkeyPatch
) -> None:
    """URLs and errors of engines, models, and ids of requests."""
    async with world(decode=2) as w, admin(w) as api:
        engines, requests = api.feed._source.api.engines, api.feed._source.api.requests

        async def hostile(**more: Any) -> EngineList:
            listed = await engines(**more)
            evil = [
                structs.replace(one, url=f"http://{EVIL}:80", source=EVIL)
                for one in listed.engines[:1]
            ]
            return structs.replace(listed, engines=[*evil, *listed.engines[1:]])

        async def named(*wanted: Any) -> RequestList:
            found = await requests(*wanted)
            return structs.replace(
                found, requests=[structs.replace(one, id=EVIL) for one in found.requests]
            )

        monkeypatch.setattr(api.feed._source.api, "engines", hostile)
        monkeypatch.setattr(api.feed._source.api, "requests", named)
        w.proxy.ledger.mark_down(w.decode[1].url, EVIL, w.proxy.now())
        await w.ask(COMPLETIONS, {"model": EVIL, "prompt": "x"})
        await w.ask(COMPLETIONS, completion(stream=True))
        page = await opened(browser, api)
        for selector in ("#engines .engine", "#wrong li", "#requests tbody"):
            await says(page, selector, EVIL)
        assert EVIL in await page.evaluate(
            "[...document.querySelectorAll('#requests .request')].map((at) => at.title).join()"
        )
        found = "[window.hacked ?? null, document.querySelectorAll('img, main script').length]"
        assert await page.evaluate(found) == [None, 0]
        assert page.problems == []
        assert await page.evaluate(MARKUP) == "TypeError"


@pytest.mark.parametrize("width", [360, 768, 1100, 1600, 2560])
async def test_nothing_is_wider_than_the_screen(browser: Chromium, width: int) -> None:
    """Also with long names and sentences."""
    async with world(decode=3) as w, admin(w) as api:
        w.proxy.ledger.mark_down(w.decode[1].url, "x" * 900, w.proxy.now())
        await w.ask(COMPLETIONS, {"model": "m" * 200, "prompt": "x"}, [("X-Request-Id", "i" * 200)])
        await w.ask(COMPLETIONS, completion(stream=True))
        page = await opened(browser, api, width)
        await says(page, "#wrong", "xxx")
        await page.until("document.querySelectorAll('#requests tbody tr').length === 2")
        assert await page.evaluate(OVER.replace("WIDTH", str(width))) == []
        # a phone would show a wider page smaller, and innerWidth would be larger
        assert await page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [360, 1600])
async def test_it_can_be_read_by_all(browser: Chromium, width: int) -> None:
    """Contrasts of all texts, light and dark, in each state; names for readers of screens; the page
    can be used with the keyboard alone.
    """
    async with world(decode=4) as w, admin(w) as api:
        w.proxy.ledger.mark_down(w.decode[1].url, "a test says so", w.proxy.now())
        w.proxy.membership.drain(w.decode[2].url, "test")
        await w.ask(COMPLETIONS, {"model": "none", "prompt": "x"})
        go = asyncio.Event()
        for engine in (w.decode[0], w.decode[3]):
            engine.script(scripts.after_word(go, _rest))
        client = await w.client()
        client.post(COMPLETIONS, completion(stream=True))
        page = await opened(browser, api, width)
        await says(page, "#wrong", "a test says so")
        await page.until("document.querySelector('#requests [data-level=runs]') !== null")
        await page.press("#engines .action button")
        await page.evaluate("document.querySelector('#said').hidden = false")
        await page.evaluate("document.querySelector('#said').textContent = 'said'")
        for scheme in SCHEMES:
            await page.show(width, 900, scheme, phone=width < 600)
            for state in ("ok", "degraded", "not_ready"):
                found = await page.evaluate(
                    f"document.querySelector('#state').dataset.state = {state!r}; {CONTRAST}"
                )
                assert found["wrong"] == []
                assert found["looked"] > 80
        nodes = await page.accessible()
        roles = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes]
        assert [role for role, name in roles if role in NAMED and not name] == []
        names = [name for role, name in roles if role == "button"]
        assert len(set(names)) == len(names), "each button says which engine it drains"
        assert {"button", "link", "spinbutton", "image", "table", "heading"} <= {
            role for role, _ in roles
        }
        await page.evaluate("document.querySelector('#engines .action button').focus()")
        await page.write("")
        assert any(member.drain for member in w.proxy.membership.members.values())
        assert page.problems == []
        go.set()
        await client.answer()
