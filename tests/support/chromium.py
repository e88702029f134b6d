"""A headless Chromium that opens pages and tells their text, driven by its own DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp

from support.patience import patient
from support.services import end_group, wait_until

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MISSING = "needs Chromium: `make browser` installs Debian's, or set GRPOX_CHROMIUM"
SECONDS = 120.0
"""Seconds that a page may take on a quiet machine, where MLflow's takes a few."""
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--remote-debugging-port=0", "--window-size=1600,1000",
)  # fmt: skip


def executable() -> str | None:
    """GRPOX_CHROMIUM, else the first that is on PATH; None where there is none."""
    return os.environ.get("GRPOX_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """As a context, one page of a browser of its own, which ends with it.

    Args:
        profile: an empty folder for the browser's own files.
    """

    def __init__(self, profile: Path) -> None:
        self._profile = profile

    def __enter__(self) -> Browser:
        found = executable()
        assert found is not None, MISSING
        command = [found, *_FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
        )
        self._loop = asyncio.new_event_loop()
        self._number = 0
        self.complaints: list[str] = []
        try:
            self._loop.run_until_complete(self._connect(self._page()))
            for domain in ("Runtime", "Log"):
                self._call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # Its renderers and helpers too: one that outlives the browser goes on writing to the profile.
        end_group(self._process.pid)
        self._process.wait(patient(30))
        if session := getattr(self, "_session", None):
            self._loop.run_until_complete(session.close())
        self._loop.close()

    def open(self, address: str) -> None:
        """Go to a page; a change of what stands behind ``#`` alone loads it anew, too."""
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=address)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        told = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        return told["result"].get("value")

    @property
    def text(self) -> str:
        """Text that a reader of the page sees."""
        return str(self.value("document.body ? document.body.innerText : ''"))

    def wait_for(self, *texts: str) -> str:
        """The page's text, once it holds all of `texts`."""
        self.wait(lambda: all(text in self.text for text in texts), f"the page does not show {texts}")
        return self.text

    def wait(self, true: Any, failure: str) -> None:
        """Until `true()` is."""
        deadline = time.monotonic() + patient(SECONDS)
        while not true():
            assert time.monotonic() < deadline, f"{failure}:\n{self.text[:4000]}"
            time.sleep(0.05)

    def resize(self, width: int, height: int, scheme: str = "light") -> None:
        """Set the size of the page in pixels, and what the reader prefers: light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def mouse(self, kind: str, x: float, y: float, clicks: int = 0) -> None:
        """Let the mouse do something at a place: mouseMoved, mousePressed or mouseReleased."""
        button = "none" if kind == "mouseMoved" and not clicks else "left"
        pressed = {"button": button, "clickCount": clicks, "buttons": int(bool(clicks))}
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **pressed)

    def picture(self, path: Path) -> None:
        """A PNG file of what is seen."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _page(self) -> str:
        """The address at which the page takes commands."""
        port_file = self._profile / "DevToolsActivePort"

        def has_port() -> bool:
            return port_file.exists() and "\n" in port_file.read_text()

        wait_until(has_port, "Chromium starts", SECONDS, self._process)
        port = port_file.read_text().splitlines()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=patient(30)) as answer:
            pages = [each for each in json.load(answer) if each["type"] == "page"]
        return str(pages[0]["webSocketDebuggerUrl"])

    async def _connect(self, address: str) -> None:
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(address, max_msg_size=0)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._loop.run_until_complete(
            asyncio.wait_for(self._answer(method, parameters), patient(SECONDS))
        )

    def _note(self, told: dict[str, Any]) -> None:
        """Keep what the page's console shows as an error, and errors that no script has caught."""
        parameters = told.get("params", {})
        if told.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"]))
        elif told.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.complaints.append(parameters["entry"]["text"])
        elif told.get("method") == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert"):
            self.complaints.append(json.dumps(parameters["args"]))

    async def _answer(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            told = await self._socket.receive_json()
            self._note(told)
            if told.get("id") == self._number:
                assert "error" not in told, told
                result: dict[str, Any] = told["result"]
                return result
