"""The page of a service whose GPU idles says so, and how to mend it; else it says nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")
pytest.importorskip("playwright", reason="needs playwright")

from playwright.sync_api import expect

from tests.conftest import Pair
from tests.support.browsing import browser, open_page
from tests.support.other_machine import NODES, ORIN_NANO, machine
from tests.support.serving import serving
from tests.support.tiny import tiny_artifact

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow
assert browser
assert open_page  # fixtures


def test_the_page_shows_what_mends_an_idle_gpu(
    tmp_path: Path, open_page: Callable[..., Page]
) -> None:
    artifact = tiny_artifact(tmp_path / "contrib", dialect="contrib").path
    orin = machine(tmp_path / "orin", NODES["Orin"], tree=ORIN_NANO)
    with serving(artifact, None, **orin) as service:
        page = open_page(service)
        notice = page.locator("#misfits")
        expect(notice).to_be_visible()
        expect(notice).to_contain_text("runs on the CPU, although this machine has a GPU")
        command = "pilotfish export model MODEL --board orin-nano --out DIR"
        expect(notice.locator("code")).to_contain_text([command])  # hidden backticks around it
        page.wait_for_timeout(2500)  # it stays as it is when the status is read again
        expect(notice.locator("li")).to_have_count(1)


def test_the_page_has_no_notice_without_a_misfit(
    tmp_path: Path, pair: Pair, open_page: Callable[..., Page]
) -> None:
    none = machine(tmp_path / "none", memory_kib=1 << 20)
    with serving(pair.draft, None, **none) as service:
        page = open_page(service)
        expect(page.locator("#pill-text")).to_have_text("no edge")
        expect(page.locator("#misfits")).to_be_hidden()
