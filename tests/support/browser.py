"""A real browser that tests look through: Chromium, driven over the Chrome DevTools protocol.

One browser serves many pages. Nothing reaches the network: every host name fails to resolve.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

_SECONDS = 60
"""Longest wait for the browser to start, or to answer."""


def find_chromium() -> str | None:
    """The browser's binary; None where none is installed."""
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


class Browser:
    """A headless browser with one tab."""

    def __init__(self, home: Path) -> None:
        binary = find_chromium()
        assert binary is not None
        self._loop = asyncio.new_event_loop()
        self._ids = itertools.count(1)
        self._events: list[dict[str, Any]] = []
        self._process = subprocess.Popen(
            [
                binary, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--disable-dev-shm-usage", "--remote-debugging-port=0", "--remote-allow-origins=*",
                "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={home}", "about:blank",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "HOME": str(home)},
        )  # fmt: skip
        try:
            port = self._port(home / "DevToolsActivePort")
            self._socket = self._loop.run_until_complete(self._connect(port))
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def _port(self, file: Path) -> int:
        for _ in range(_SECONDS * 50):
            if file.exists() and "\n" in (text := file.read_text()):
                return int(text.split("\n")[0])
            if self._process.poll() is not None:
                break
            time.sleep(0.02)
        raise RuntimeError("chromium did not start")

    async def _connect(self, port: int) -> Any:
        from tornado.httpclient import AsyncHTTPClient
        from tornado.websocket import websocket_connect

        response = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{port}/json/list")
        tab = next(t for t in json.loads(response.body) if t["type"] == "page")
        return await websocket_connect(tab["webSocketDebuggerUrl"], max_message_size=2**28)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The browser's answer to a command of the protocol."""
        return self._loop.run_until_complete(asyncio.wait_for(self._call(method, parameters), _SECONDS))

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        number = next(self._ids)
        await self._socket.write_message(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(await self._socket.read_message())
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._events.append(message)

    def open(
        self, page: Path, *, width: int = 1100, height: int = 900, dark: bool = False, scripts: bool = True
    ) -> None:
        """Show a page at a width in CSS pixels, and wait until it has loaded."""
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media="screen", features=scheme)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._events.clear()
        self.call("Page.navigate", url=page.as_uri())
        self._loop.run_until_complete(asyncio.wait_for(self._loaded(), _SECONDS))

    async def _loaded(self) -> None:
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(json.loads(await self._socket.read_message()))

    def value(self, script: str) -> Any:
        """What a JavaScript expression gives in the page."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def press(self, key: str, *, times: int = 1) -> None:
        """Press a key as a person does."""
        codes = {"ArrowRight": 39, "ArrowLeft": 37, "Home": 36, "End": 35, "Tab": 9, "Enter": 13}
        for _ in range(times):
            for kind in ("rawKeyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def hover(self, x: float, y: float) -> None:
        """Move the pointer to a place of the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag with the left button from one place of the window to another."""
        self.hover(*start)
        for kind, (x, y) in (("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end)):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def screenshot(self, path: Path) -> None:
        """Save the whole page, scrolled parts included, as PNG."""
        done = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(done["data"]))

    def pdf(self, path: Path) -> None:
        """Print the page to a file."""
        done = self.call("Page.printToPDF", printBackground=False, paperWidth=8.27, paperHeight=11.69)
        path.write_bytes(base64.b64decode(done["data"]))

    def complaints(self) -> list[str]:
        """Errors and warnings of the page since it was opened."""
        self.value("1")  # events of the page come before the answer
        return [
            json.dumps(e["params"])
            for e in self._events
            if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        ]

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._loop.close()
