"""Pictures of the chat page, by a real service on the default pair: ``python -m`` this module.

Each scene is taken wide (1280 px) and narrow (390 px), in light and in dark. The emulator cuts the
link. A machine without the default pair exports it first (a download of 92 MB).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playwright.sync_api import expect

from pilotfish import EdgeServer
from pilotfish.cli.default_models import DEFAULT, drafter_folder, target_folder
from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.wire import keys
from tests.support.browsing import PATIENT_MS, chromium, finished, say
from tests.support.serving import serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

SIZES = {"1280": {"width": 1280, "height": 800}, "390": {"width": 390, "height": 844}}
SCHEMES = ("light", "dark")
API_KEY = "0123456789abcdef0123"
QUESTION = "Write a Python function that adds two numbers, with an example."


class Camera:
    """Takes one scene in all sizes and schemes."""

    def __init__(self, page: Page, folder: Path) -> None:
        self._page, self._folder = page, folder

    def take(self, scene: str) -> None:
        for width, size in SIZES.items():
            self._page.set_viewport_size(size)  # type: ignore[arg-type]  # one of SIZES, or of the schemes
            self._page.evaluate("scrollTo(0, 0)")
            for scheme in SCHEMES:
                self._page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]  # one of SIZES, or of the schemes
                self._page.screenshot(path=self._folder / f"{scene}-{width}-{scheme}.png")
            overflow = self._page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert overflow <= 0, f"{scene} scrolls sideways by {overflow} px at {width} px"
        self._page.set_viewport_size(SIZES["1280"])  # type: ignore[arg-type]  # one of SIZES, or of the schemes

    def take_panel(self, scene: str) -> None:
        """Take the narrow page whole, with the panel that lies below the chat."""
        self._page.set_viewport_size(SIZES["390"])  # type: ignore[arg-type]  # one of SIZES, or of the schemes
        self._page.screenshot(path=self._folder / f"{scene}-390-whole.png", full_page=True)
        self._page.set_viewport_size(SIZES["1280"])  # type: ignore[arg-type]  # one of SIZES, or of the schemes


@contextmanager
def opened(browser: Any, url: str, folder: Path) -> Iterator[tuple[Page, Camera]]:
    page = browser.new_page(viewport=SIZES["1280"])
    page.set_default_timeout(PATIENT_MS)
    page.goto(url)
    try:
        yield page, Camera(page, folder)
    finally:
        page.close()


def until(page: Page, tokens: int) -> None:
    """Wait until the running answer has so many tokens."""
    page.wait_for_function(
        "n => document.querySelectorAll('article:last-of-type .token').length >= n", arg=tokens
    )


def chat_scenes(browser: Any, folder: Path) -> None:
    """Take a chat: idle, streaming, cut off, connected again, and after a reload."""
    flags = ("--on-link-loss", "local")
    with (
        EdgeServer(target_folder(Path(DEFAULT)), threads=1) as edge,
        Emulator(edge.endpoint, Conditions(rtt_s=0.03)) as link,
        serving(drafter_folder(Path(DEFAULT)), link.endpoint, *flags) as service,
        opened(browser, service.url, folder) as (page, camera),
    ):
        up = page.locator("#pill[data-state=up]")
        expect(up).to_be_visible()
        camera.take("idle")
        page.click("#options summary")
        page.select_option("#protocol-choice", "coupled")
        page.fill("#seed", "7")
        page.fill("#temperature", "0.3")
        camera.take("options")
        page.select_option("#protocol-choice", "auto")
        page.click("#options summary")
        say(page, QUESTION, tokens=220)
        until(page, 60)
        page.wait_for_timeout(1500)  # the panel follows each second
        camera.take("streaming")
        finished(page)
        page.locator(".why summary").last.click()
        camera.take("answered")
        page.locator(".why summary").last.click()
        say(page, "Tell me a story about a pilot fish.", tokens=400)
        until(page, 40)
        link.cut(3600.0, silent=True)
        expect(page.locator("#outage")).to_be_visible()
        expect(page.locator("article [data-origin=local]").first).to_be_visible()
        page.wait_for_timeout(1500)
        camera.take("link-down")
        link.cut(0.0, silent=True)
        expect(up).to_be_visible()
        finished(page)
        camera.take("link-back")
        camera.take_panel("link-back")
        page.reload()
        expect(up).to_be_visible()
        page.wait_for_timeout(1500)
        camera.take("reloaded")


def refused_scene(browser: Any, folder: Path) -> None:
    """Take a page whose device the edge does not allow."""
    with tempfile.TemporaryDirectory() as named:
        here = Path(named)
        keys.create(here, keys.EDGE)
        keys.create(here, keys.DEVICE)
        keys.allow(here, keys.create(here / "another", keys.DEVICE))
        flags = ("--keys", here, "--on-link-loss", "local")
        with (
            EdgeServer(target_folder(Path(DEFAULT)), keys=here, threads=1) as edge,
            serving(drafter_folder(Path(DEFAULT)), edge.endpoint, *flags) as service,
            opened(browser, service.url, folder) as (page, camera),
        ):
            expect(page.locator("#outage-title")).to_contain_text("refused: key")
            camera.take("key-refused-by-edge")


def api_key_scene(browser: Any, folder: Path) -> None:
    """Take a page whose user enters a wrong API key."""
    with tempfile.TemporaryDirectory() as named:
        listed = Path(named) / "api-keys"
        listed.write_text(f"alice:{API_KEY}\n")
        listed.chmod(0o600)
        flags = ("--protocol", "local", "--api-keys", listed)
        with (
            serving(drafter_folder(Path(DEFAULT)), None, *flags) as service,
            opened(browser, service.url, folder) as (page, camera),
        ):
            page.fill("#key", "a key that is wrong")
            page.press("#key", "Enter")
            expect(page.locator("#key-text")).to_contain_text("refused")
            camera.take("api-key-refused")


SCENES: dict[str, Callable[[Any, Path], None]] = {
    "chat": chat_scenes,
    "refused": refused_scene,
    "api-key": api_key_scene,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the PNG files")
    parser.add_argument("--scenes", nargs="*", choices=SCENES, default=list(SCENES))
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=PATIENT_MS)
    with chromium() as browser:
        for name in chosen.scenes:
            began_s = time.monotonic()
            SCENES[name](browser, chosen.out)
            print(f"{name}: {time.monotonic() - began_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
