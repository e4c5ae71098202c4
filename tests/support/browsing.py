"""Headless Chromium, and models that only answer with attacks on the page."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pilotfish.export.model import export_model
from tests.conftest import Pair
from tests.support.tiny import RandomSource, tiny_config

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

    from tests.support.serving import Serving

PATIENT_MS = 60_000
VOCAB = 64
SCRIPT = "<script>document.title='owned'</script>"
# Tokens of the hostile pair, in the alphabet of byte-level BPE, where Ġ is a space.
HOSTILE = [SCRIPT, "<img/src=x/onerror=document.title='owned'>", "&lt;b&gt;", "</div>", "Ġ", "Ġ"]


class HostileSource(RandomSource):
    """Random weights; a tenth of the tokens is markup, and answers never end."""

    def __init__(self, sharpness: float) -> None:
        config = tiny_config(vocab_size=VOCAB, context=32768)
        super().__init__(config, seed=1, sharpness=sharpness)
        self.change_vocabulary(eos_ids=[])
        payload = json.loads(self.vocabulary.tokenizer_json)
        vocabulary = {id: token for token, id in payload["model"]["vocab"].items()}
        last = VOCAB - 2  # the end token is the last one
        for offset, token in enumerate(dict.fromkeys(HOSTILE)):
            vocabulary[last - offset] = token
        payload["model"]["vocab"] = {token: id for id, token in vocabulary.items()}
        self.change_vocabulary(tokenizer_json=json.dumps(payload))


def hostile_pair(folder: Path) -> Pair:
    """Make a drafter and a target that accepts about half of the drafts."""
    for name, sharpness in (("draft", 0.9), ("target", 0.7)):
        export_model(HostileSource(sharpness), folder / name, precision="fp32")
    return Pair(folder / "draft", folder / "target")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a headless browser; skips the test without Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with playwright.sync_playwright() as driver:
        executable_path = driver.chromium.executable_path
        result = shutil.which("chromium") or shutil.which("chromium-browser")
        if result is None and not Path(executable_path).exists():
            pytest.skip("there is no Chromium (Debian: chromium)")
        browser = driver.chromium.launch(executable_path=result, args=["--no-sandbox"])
        yield browser
        browser.close()


class Sight:
    """Collects a page's errors and its requests."""

    def __init__(self, page: Page, origin: str) -> None:
        self.faults: list[str] = []
        self.abroad: list[str] = []
        self.posted: list[str] = []
        self._origin = origin
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("request", self._request)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(message.text)

    def _request(self, request: Request) -> None:
        url, data = request.url, request.post_data
        if not url.startswith(self._origin + "/"):
            self.abroad.append(url)
        if data:
            self.posted.append(data)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens the page of a service; at the end nothing has gone wrong in it."""
    from playwright.sync_api import expect

    expect.set_options(timeout=PATIENT_MS)
    opened = []

    def open_it(service: Serving, *, faults_may: str = "", **options: object) -> Page:
        page = browser.new_page(**options)
        page.set_default_timeout(PATIENT_MS)
        opened.append((page, Sight(page, service.url), faults_may))
        page.goto(service.url)
        return page

    yield open_it
    for page, sight, faults_may in opened:
        page.close()
        unexpected = [f for f in sight.faults if not (faults_may and re.search(faults_may, f))]
        assert (unexpected, sight.abroad) == ([], [])


def say(page: Page, text: str, tokens: int = 60) -> None:
    """Send a message, to be answered with so many tokens at most."""
    page.evaluate("n => { document.getElementById('max-tokens').value = n }", tokens)
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def answer(page: Page) -> str:
    """Return the text of the last turn."""
    return page.locator("article .text").last.text_content() or ""


def finished(page: Page) -> None:
    """Wait until the answer is complete."""
    from playwright.sync_api import expect

    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".coming")).to_have_count(0)


def contrast(color: str, other: str) -> float:
    """Compute WCAG's contrast ratio of two opaque colours, as ``rgb(1, 2, 3)``."""

    def luminance(colour: str) -> float:
        shares = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
        linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(color), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
