"""A page looked at by a real browser, headless: what it says on its console, what it loads, and its picture.

The browser is any Chromium that speaks the DevTools protocol: ``$SLIME_LIKE_BROWSER``, else one on PATH, else one that
Playwright has installed. Debian has ``chromium-headless-shell``; without root, ``apt-get download`` it with
``chromium-common`` and what ``ldd`` misses, unpack them by ``dpkg -x``, and point ``$SLIME_LIKE_BROWSER`` at a script that
sets ``LD_LIBRARY_PATH`` and runs it.
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
    "--host-resolver-rules=MAP * ~NOTFOUND",  # whatever a page names, nothing is reached
)
START_S, LOOK_S, POLL_S = 30.0, 30.0, 0.05


@dataclass(frozen=True, slots=True)
class Seen:
    """What the browser saw of one page."""

    complaints: tuple[str, ...]  # errors and warnings of its console, exceptions, what its policy refused
    loaded: tuple[str, ...]  # addresses it asked for beside the page itself
    height: int  # of the whole page, in CSS pixels
    png: bytes


def find_browser() -> Path | None:
    """A browser of this machine; None where there is none. Raises ``FileNotFoundError`` where the variable names none."""
    if given := os.environ.get(VARIABLE):
        if not Path(given).is_file():
            raise FileNotFoundError(f"{VARIABLE}={given!r} is no file")
        return Path(given)
    on_path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if on_path is not None:
        return Path(on_path)
    return next((path for name in ("headless_shell", "chrome") for path in sorted(CACHE.glob(f"*/*/{name}"))), None)


def look(browser: Path, page: Path, *, width: int = 1320, height: int = 1200, at: str | None = None) -> Seen:
    """Load ``page`` and take its picture: ``height`` pixels from the top, or from the first heading that says ``at``.

    With ``at`` the third folded part of a folded part is opened: the table of a sample's tokens.
    """
    return asyncio.run(_look(browser, page, width, height, at))


async def _look(browser: Path, page: Path, width: int, height: int, at: str | None) -> Seen:
    deadline = Deadline("browser", "look", LOOK_S)
    async with _running(browser) as port, aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
            targets: list[dict[str, Any]] = await response.json()
        address = next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
        async with asyncio.timeout(deadline.limit), session.ws_connect(address, max_msg_size=0) as socket:
            return await _visit(_Tab(socket), page.resolve().as_uri(), width, height, at)


async def _visit(tab: _Tab, address: str, width: int, height: int, at: str | None) -> Seen:
    for domain in ("Page", "Runtime", "Log", "Network"):
        await tab.call(f"{domain}.enable")
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    await tab.call("Emulation.setDeviceMetricsOverride", **size)
    await tab.call("Page.navigate", url=address)
    await tab.wait_for("Page.loadEventFired")
    # Set by the protocol, not by the page: its policy lets no script of its own run.
    whole = int(await tab.evaluate("document.documentElement.scrollHeight"))
    top = 0.0
    if at is not None:
        found = f"Array.from(document.querySelectorAll('h1,h2,h3')).find(h => h.textContent.includes({json.dumps(at)}))"
        await tab.evaluate(
            "document.querySelectorAll('details details').forEach((part, index) => part.open = index === 2)"
        )
        top = float(await tab.evaluate(f"{found}.getBoundingClientRect().top + scrollY"))
    clip = {"x": 0, "y": top, "width": width, "height": min(height, whole - top), "scale": 1}
    shot = await tab.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
    loaded = tuple(url for url in tab.asked if url != address and not url.startswith("data:"))
    return Seen(tuple(tab.complaints), loaded, whole, base64.b64decode(shot["data"]))


class _Tab:
    """One page behind a DevTools socket: calls, and what happens meanwhile."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._calls = 0
        self._happened: list[str] = []
        self.complaints: list[str] = []
        self.asked: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to one call; events that come first are kept."""
        self._calls += 1
        await self._socket.send_json({"id": self._calls, "method": method, "params": parameters})
        while True:
            message = await self._receive()
            if message.get("id") == self._calls:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']['text']}")
        return found["result"].get("value")  # none where it is undefined

    async def wait_for(self, event: str) -> None:
        """Until ``event`` has happened."""
        while event not in self._happened:
            await self._receive()

    async def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = await self._socket.receive_json()
        method, given = message.get("method", ""), message.get("params", {})
        self._happened.append(method)
        if method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(part.get("value", part)) for part in given["args"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(given["exceptionDetails"]["text"])
        elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.complaints.append(given["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked.append(given["request"]["url"])
        return message


@asynccontextmanager
async def _running(browser: Path) -> AsyncGenerator[int]:
    """A browser of our own with an empty profile; yields the port of its DevTools on loopback."""
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()  # Chromium refuses root a sandbox
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
