"""Headless browser: console messages, requests and screenshot of a page.

The browser is any Chromium with the DevTools protocol: ``$SLIME_LIKE_BROWSER``, else one on PATH, else Playwright's.
Debian has ``chromium-headless-shell``; without root, ``apt-get download`` it with ``chromium-common`` and the libraries
that ``ldd`` misses, unpack them with ``dpkg -x``, and point ``$SLIME_LIKE_BROWSER`` at a script that sets
``LD_LIBRARY_PATH`` and runs it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from slime_like.util.deadline import Deadline

VARIABLE = "SLIME_LIKE_BROWSER"
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CACHE = Path.home() / ".cache" / "ms-playwright"
FLAGS = (
    "--headless",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-component-update",
    "--remote-debugging-port=0",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no host is reachable
)
START_S, LOOK_S, POLL_S = 30.0, 30.0, 0.05


@dataclass(frozen=True, slots=True)
class PageVisit:
    """Result of one page load."""

    complaints: tuple[str, ...]  # console errors and warnings, exceptions, violations of the page's policy
    loaded_urls: tuple[str, ...]  # URLs requested besides the page itself
    height: int  # height of the full page, in CSS pixels
    png: bytes


def find_browser() -> Path | None:
    """Return a browser of this machine, None without one. Raises ``FileNotFoundError`` if the variable names no file."""
    if command := os.environ.get(VARIABLE):
        if not Path(command).is_file():
            raise FileNotFoundError(f"{VARIABLE}={command!r} is not a file: set it to a browser, or unset {VARIABLE}")
        return Path(command)
    on_path = next((path for name in NAMES if (path := shutil.which(name))), None)
    if on_path is not None:
        return Path(on_path)
    return next((path for name in ("headless_shell", "chrome") for path in sorted(CACHE.glob(f"*/*/{name}"))), None)


def look(browser: Path, page: Path, *, width: int = 1320, height: int = 1200, at: str | None = None) -> PageVisit:
    """Load ``page`` and capture ``height`` pixels from the top, or from the first heading that contains ``at``.

    With ``at``, the third nested ``details`` element is opened: the token table of a sample.
    """
    return asyncio.run(_look(browser, page, width, height, at))


async def _look(browser: Path, page: Path, width: int, height: int, at: str | None) -> PageVisit:
    deadline = Deadline("browser", "look", LOOK_S)
    async with _running(browser) as port, aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
            targets: list[dict[str, Any]] = await response.json()
        address = next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
        async with asyncio.timeout(deadline.limit), session.ws_connect(address, max_msg_size=0) as socket:
            return await _visit(_Tab(socket), page.resolve().as_uri(), width, height, at)


async def _visit(tab: _Tab, address: str, width: int, height: int, at: str | None) -> PageVisit:
    for domain in ("Page", "Runtime", "Log", "Network"):
        await tab.call(f"{domain}.enable")
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    await tab.call("Emulation.setDeviceMetricsOverride", **size)
    await tab.call("Page.navigate", url=address)
    await tab.wait_for("Page.loadEventFired")
    # Evaluated through the protocol: the page's policy forbids scripts.
    page_height = int(await tab.evaluate("document.documentElement.scrollHeight"))
    top = 0.0
    if at is not None:
        heading = (
            f"Array.from(document.querySelectorAll('h1,h2,h3')).find(h => h.textContent.includes({json.dumps(at)}))"
        )
        await tab.evaluate(
            "document.querySelectorAll('details details').forEach((part, index) => part.open = index === 2)"
        )
        top = float(await tab.evaluate(f"{heading}.getBoundingClientRect().top + scrollY"))
    clip = {"x": 0, "y": top, "width": width, "height": min(height, page_height - top), "scale": 1}
    shot = await tab.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
    loaded_urls = tuple(url for url in tab.requested if url != address and not url.startswith("data:"))
    return PageVisit(tuple(tab.complaints), loaded_urls, page_height, base64.b64decode(shot["data"]))


class _Tab:
    """Page behind a DevTools socket: calls and events."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._calls = 0
        self._events: list[str] = []
        self.complaints: list[str] = []
        self.requested: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of one call; events that arrive before it are recorded."""
        self._calls += 1
        await self._socket.send_json({"id": self._calls, "method": method, "params": parameters})
        while True:
            message = await self._receive()
            if message.get("id") == self._calls:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]

    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']['text']}")
        return answer["result"].get("value")  # None if undefined

    async def wait_for(self, event: str) -> None:
        """Wait until ``event`` was received."""
        while event not in self._events:
            await self._receive()

    async def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = await self._socket.receive_json()
        method, params = message.get("method", ""), message.get("params", {})
        self._events.append(method)
        if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(part.get("value", part)) for part in params["args"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"]["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        return message


@asynccontextmanager
async def _running(browser: Path) -> AsyncGenerator[int]:
    """Start a browser with an empty profile and yield the loopback port of its DevTools."""
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()  # Chromium has no sandbox for root
        command = [str(browser), *FLAGS, *sandbox, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            deadline = Deadline("browser", "start", START_S)
            file = Path(profile) / "DevToolsActivePort"
            while not (file.is_file() and file.read_text().count("\n")):
                if process.poll() is not None:
                    raise RuntimeError(f"{browser} ended with code {process.returncode}: run it by hand to see why")
                await asyncio.sleep(min(POLL_S, deadline.remaining(str(browser))))
            yield int(file.read_text().split("\n")[0])
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
