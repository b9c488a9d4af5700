"""Headless Chromium by its DevTools protocol over a pipe, without a driver."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
]  # fmt: skip


class Page:
    """One tab: what it logged, what it asked the network for, and what scripts return."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._number, self._buffer = read, write, 0, b""
        self.session: str | None = None
        self.console: list[str] = []
        self.requests: list[str] = []

    def send(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
        raise AssertionError(f"no answer to {method}")

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            self._buffer += os.read(self._read, 2**20)
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        details = message.get("params", {})
        if message.get("method") == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning"):
            self.console.append(str(details["args"]))
        if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.console.append(str(details))
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])
        return message

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")


@contextlib.contextmanager
def open_page(file: Path) -> Iterator[Page]:
    """The page of a file, loaded."""
    assert CHROMIUM is not None
    to_browser, from_us = os.pipe()
    to_us, from_browser = os.pipe()
    with tempfile.TemporaryDirectory() as profile:

        def redirect() -> None:  # Chromium reads descriptor 3 and writes descriptor 4
            first, second = os.dup(to_browser), os.dup(from_browser)
            os.dup2(first, 3)
            os.dup2(second, 4)

        browser = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=redirect, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            page = Page(to_us, from_us)
            target = page.send("Target.createTarget", url="about:blank")["targetId"]
            page.session = page.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Runtime", "Log", "Network", "Page"):
                page.send(f"{domain}.enable")
            page.send("Page.navigate", url=file.resolve().as_uri())
            deadline = time.monotonic() + 30
            while page.run("document.readyState + location.protocol") != "completefile:":
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield page
        finally:
            browser.kill()
            browser.wait()
            for descriptor in (to_browser, from_us, to_us, from_browser):
                os.close(descriptor)
