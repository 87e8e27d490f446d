"""A headless Chromium, driven over its DevTools protocol. Owns the browser's process."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

PATIENCE = 60.0
"""Seconds for the browser to start, and for each answer of it."""
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-component-update",
    "--disable-background-networking",
    "--disable-sync",
    "--no-first-run",
    "--no-proxy-server",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
)


_NAMES = ("chromium", "chromium-browser", "google-chrome")


def program() -> str | None:
    """The browser's path: PDPROXY_TEST_CHROMIUM, or the first on PATH; None: there is none."""
    named = os.environ.get("PDPROXY_TEST_CHROMIUM")
    return named or next(filter(None, map(shutil.which, _NAMES)), None)


class BrowserPage:
    """One page. `problems`: what its console has said in warning, and what has failed in it;
    `asked`: the URLs that it has asked for.
    """

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser = browser
        self._session = session
        self.problems: list[str] = []
        self.asked: list[str] = []

    async def send(self, method: str, **params: Any) -> Any:
        """Ask the browser something about this page."""
        return await self._browser.send(method, self._session, **params)

    def heard(self, method: str, params: dict[str, Any]) -> None:
        """Note what the browser tells."""
        match method:
            case "Runtime.exceptionThrown":
                detail = params["exceptionDetails"]
                self.problems.append(detail.get("exception", {}).get("description", detail["text"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(str([arg.get("value") for arg in params["args"]]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                entry = params["entry"]
                self.problems.append(f"{entry['text']} {entry.get('url', '')}")
            case "Network.requestWillBeSent":
                self.asked.append(params["request"]["url"])

    async def open(self, url: str) -> None:
        """Go to a URL, and wait until it is loaded."""
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = await self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait until an expression is true; return its value."""
        async with asyncio.timeout(PATIENCE):
            while not (found := await self.evaluate(script)):
                await asyncio.sleep(0.05)
            return found

    async def show(self, width: int, height: int, scheme: str, *, phone: bool = False) -> None:
        """Have a screen of this size, and a colour scheme."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        await self.send(
            "Emulation.setEmulatedMedia",
            features=[
                {"name": "prefers-color-scheme", "value": scheme},
                {"name": "prefers-reduced-motion", "value": "reduce"},
            ],
        )

    async def connected(self, yes: bool) -> None:
        """Have a network, or none."""
        unbounded = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        await self.send("Network.emulateNetworkConditions", offline=not yes, **unbounded)

    async def press(self, selector: str) -> None:
        """Click the middle of an element, as a mouse does."""
        x, y = await self.evaluate(
            f"(() => {{ const at = document.querySelector({json.dumps(selector)});"
            "at.scrollIntoView({block: 'center'}); const box = at.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2] })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.send(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )

    async def write(self, text: str) -> None:
        """Type a text where the focus is, and the return key."""
        await self.send("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            await self.send(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter",
                windowsVirtualKeyCode=13, text="\r" if kind == "keyDown" else "",
            )  # fmt: skip

    async def accessible(self) -> list[dict[str, Any]]:
        """The accessibility tree: its nodes, without those that it leaves out."""
        nodes = (await self.send("Accessibility.getFullAXTree"))["nodes"]
        return [node for node in nodes if not node["ignored"]]

    async def picture(self) -> bytes:
        """A PNG of what the screen shows."""
        found = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=False)
        return base64.b64decode(found["data"])


class Chromium:
    """A browser that runs. Ask `connected` for one."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._pages: dict[str, BrowserPage] = {}
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for text in self._connection:
            message = json.loads(text)
            waits = self._waiting.pop(message.get("id", 0), None)
            if waits is None:
                page = self._pages.get(message.get("sessionId", ""))
                if page is not None:
                    page.heard(message["method"], message["params"])
            elif "error" in message:
                waits.set_exception(AssertionError(message["error"]))
            else:
                waits.set_result(message["result"])

    async def send(self, method: str, session: str | None = None, **params: Any) -> Any:
        """Ask the browser something, and wait for the answer."""
        number = next(self._numbers)
        waits = self._waiting[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        await self._connection.send(
            json.dumps(message if session is None else message | {"sessionId": session})
        )
        async with asyncio.timeout(PATIENCE):
            return await waits

    async def page(self) -> BrowserPage:
        """A new, empty page, with nothing of others' in its memory."""
        context = (await self.send("Target.createBrowserContext"))["browserContextId"]
        target = await self.send("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.send(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        session = attached["sessionId"]
        page = self._pages[session] = BrowserPage(self, session)
        for part in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            await page.send(f"{part}.enable")
        return page

    async def close(self) -> None:
        """End the connection to it."""
        self._reading.cancel()
        await self._connection.close()


@contextmanager
def running() -> Iterator[str]:
    """Run a browser. Yields the address at which it answers."""
    path = program()
    assert path, "no Chromium here: apt-get install chromium, or name it in PDPROXY_TEST_CHROMIUM"
    with tempfile.TemporaryDirectory(prefix="chromium-") as folder:
        process = subprocess.Popen(
            [path, *_FLAGS, f"--user-data-dir={folder}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": folder},
        )
        try:
            yield _address(process, Path(folder, "DevToolsActivePort"))
        finally:
            process.kill()
            process.wait()
            for _ in range(50):  # its own children still write there
                if not os.listdir(folder):
                    break
                shutil.rmtree(folder, ignore_errors=True)
                os.makedirs(folder, exist_ok=True)
                time.sleep(0.1)


def _address(process: subprocess.Popen[bytes], written: Path) -> str:
    """Wait for the file in which the browser says its port and its path, a line each."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        assert process.poll() is None, "Chromium has ended at its start"
        with contextlib.suppress(FileNotFoundError):
            if len(said := written.read_text().split()) == 2:
                return f"ws://127.0.0.1:{said[0]}{said[1]}"
        time.sleep(0.05)
    raise AssertionError(f"Chromium has not started within {PATIENCE:.0f} s")


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Chromium]:
    """Talk to the browser that answers at an address."""
    browser = Chromium(await connect(address, max_size=None, compression=None))
    try:
        yield browser
    finally:
        await browser.close()
