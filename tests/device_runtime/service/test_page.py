"""The page in a real browser: a link that is cut, a hostile model, keys, a service that dies.

A real device service and a real edge, the product's own link emulator between them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")
pytest.importorskip("prometheus_client", reason="needs the extra `serve`")
pytest.importorskip("playwright", reason="needs playwright")

from playwright.sync_api import expect

from pilotfish import EdgeServer
from pilotfish.emulation.emulator import Conditions, Emulator
from tests.conftest import Pair
from tests.device_runtime.test_metrics import accept_by_promtool
from tests.support.browsing import (
    SCRIPT,
    Sight,
    answer,
    browser,
    contrast,
    finished,
    hostile_pair,
    open_page,
    say,
)
from tests.support.serving import Serving, eventually, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow

ORIGINS = ("drafted", "forced", "corrected", "bonus", "target", "local")
FLAGS = ("--protocol", "coupled", "--window", "4", "--seed", "7", "--temperature", "1")
assert browser
assert open_page  # fixtures


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return hostile_pair(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(scope="module")
def link(models: Pair) -> Iterator[Emulator]:
    """A link of 50 ms to an edge: an answer takes its time."""
    with (
        EdgeServer(models.target, threads=1) as edge,
        Emulator(edge.endpoint, Conditions(rtt_s=0.05)) as emulator,
    ):
        yield emulator


@pytest.fixture(scope="module")
def service(models: Pair, link: Emulator) -> Iterator[Serving]:
    with serving(models.draft, link.endpoint, "--on-link-loss", "wait", *FLAGS) as started:
        yield started


@pytest.fixture
def page(open_page: Callable[..., Page], service: Serving, link: Emulator) -> Iterator[Page]:
    opened = open_page(service)
    expect(opened.locator("#pill")).to_have_attribute("data-state", "up")
    yield opened
    link.cut(0.0, silent=True)
    link.cut(0.0)


def test_a_chat_turn_streams_in_the_colours_of_its_origins(page: Page, service: Serving) -> None:
    page.evaluate(
        """() => {
          window.lengths = new Set();
          new MutationObserver(() => {
            const text = document.querySelector("article[data-role=assistant] .text");
            if (text) window.lengths.add(text.textContent.length);
          }).observe(document.getElementById("log"), { childList: true, subtree: true });
        }"""
    )
    say(page, "hello", tokens=100)
    finished(page)
    assert page.evaluate("window.lengths.size") >= 5  # it grew step by step
    spans = page.locator("article .token")
    names = set(spans.evaluate_all("found => found.map(span => span.dataset.origin)"))
    assert {"drafted", "corrected"} <= names <= set(ORIGINS)
    expect(page.locator("article .note").last).to_contain_text("100 tokens")
    expect(page.locator("article .note").last).to_contain_text("coupled, window 4")
    # what the panel knows by then
    expect(page.locator("#protocol")).to_contain_text("coupled")
    expect(page.locator("#acceptance")).to_contain_text("%")
    expect(page.locator("#rtt")).to_contain_text("ms")
    expect(page.locator("#stage-uplink")).to_contain_text("ms")
    expect(page.locator("#speed")).to_contain_text("tokens/s")
    assert page.locator("#stages-bar [data-stage=uplink]").bounding_box()["width"] > 10


def test_key_tokens_are_bold(models: Pair, link: Emulator, open_page: Callable[..., Page]) -> None:
    relaxed = ("--protocol", "adaptive", "--temperature", "1", "--lambdas", "0,0,1")
    with serving(models.draft, link.endpoint, *relaxed, "--window", "4", "--seed", "7") as service:
        page = open_page(service)
        say(page, "hello", tokens=100)
        finished(page)
        spans = page.locator("article .token")
        weights: dict[bool, set[str]] = {True: set(), False: set()}
        for key, weight in spans.evaluate_all(
            "spans => spans.map(e => [e.dataset.key !== undefined, getComputedStyle(e).fontWeight])"
        ):
            weights[key].add(weight)
        assert weights == {True: {"600"}, False: {"400"}}  # bonus tokens are no drafts
        last = service.get("/status").json()["last"]
        expect(page.locator("article .note").last).to_contain_text(f"{last['key']} key")
        page.close()  # before its service ends


def test_a_conversation_has_turns_until_it_is_begun_anew(
    open_page: Callable[..., Page], service: Serving, browser: Browser
) -> None:
    page = open_page(service)
    sent = Sight(page, service.url).posted
    for text in ("one", "two"):
        say(page, text, tokens=8)
        finished(page)
    roles = [message["role"] for message in json.loads(sent[-1])["messages"]]
    assert roles == ["user", "assistant", "user"]
    first = page.locator("article[data-role=assistant] .text").first.text_content()
    assert json.loads(sent[-1])["messages"][1]["content"] == first
    page.click("#new-chat")
    expect(page.locator("article")).to_have_count(0)
    expect(page.locator("#prompt")).to_be_focused()
    say(page, "three", tokens=8)
    finished(page)
    assert len(json.loads(sent[-1])["messages"]) == 1


def test_a_cut_link_shows_and_heals_and_the_answer_goes_on(page: Page, link: Emulator) -> None:
    """Nothing crosses and nothing is told, as when the radio is out of reach."""
    say(page, "hello", tokens=400)
    expect(page.locator("article .token")).not_to_have_count(0)
    link.cut(3600.0, silent=True)
    cut_s = time.monotonic()
    expect(page.locator("#pill")).to_have_attribute("data-state", "down")
    assert time.monotonic() - cut_s < 15  # 1.2 s of missed heartbeats, and a busy machine
    expect(page.locator("#pill-text")).to_contain_text(
        re.compile(r"link (quiet|lost|no route|no handshake) for \d+ s")
    )
    expect(page.locator("#link-problem")).to_be_visible()
    expect(page.locator("article .note").last).to_contain_text("the link is down")
    before = settled(page)
    page.wait_for_timeout(500)
    assert answer(page) == before
    link.cut(0.0, silent=True)
    expect(page.locator("#pill")).to_have_attribute("data-state", "up")
    finished(page)
    assert answer(page).startswith(before)
    expect(page.locator("article .note").last).to_contain_text("400 tokens")
    expect(page.locator("article .note").last).to_contain_text("link lost 1 ×")
    expect(page.locator("#recoveries")).to_contain_text("×")
    expect(page.locator("article .failure")).to_have_count(0)


def settled(page: Page) -> str:
    """Wait until what has arrived is painted; return the answer's text."""
    seen = [""]

    def stays() -> bool:
        seen.append(answer(page))
        page.wait_for_timeout(300)
        return answer(page) == seen[-1]

    eventually(stays)
    return seen[-1]


def test_a_link_shows_without_requests(page: Page, link: Emulator) -> None:
    link.cut(3600.0)
    expect(page.locator("#pill")).to_have_attribute("data-state", "down")
    link.cut(0.0)
    expect(page.locator("#pill")).to_have_attribute("data-state", "up")
    assert page.locator("article").count() == 0


def test_what_a_model_says_is_text_and_nothing_else(
    open_page: Callable[..., Page], service: Serving
) -> None:
    page = open_page(service, faults_may="TrustedHTML")
    say(page, "hello", tokens=200)
    finished(page)
    reply = answer(page)
    assert SCRIPT in reply
    assert "&lt;b&gt;" in reply  # as it was said, neither read as markup nor escaped again
    assert page.title() == "Pilotfish"
    assert page.locator("#log script, #log img, #log b").count() == 0
    inside = page.locator("article .text").last.evaluate("e => [...e.children].map(c => c.tagName)")
    assert set(inside) == {"SPAN"}
    page.locator("article .token", has_text="<script>").first.hover()
    expect(page.locator("#bubble .head")).to_contain_text(SCRIPT)
    assert page.locator("#bubble script, #bubble img, #bubble b").count() == 0
    # and if it ever were markup, the browser would not take it
    taken = page.evaluate(
        "() => { try { document.body.innerHTML = '<b>'; return true } catch { return false } }"
    )
    assert not taken


def test_an_answer_can_be_stopped(page: Page, service: Serving) -> None:
    say(page, "hello", tokens=10_000)
    expect(page.locator("article .token")).not_to_have_count(0)
    page.keyboard.press("Escape")
    finished(page)
    expect(page.locator("article .stopped")).to_have_text("Stopped.")
    eventually(lambda: service.get("/status").json()["lanes"]["running"] == 0)
    say(page, "again", tokens=8)
    finished(page)
    expect(page.locator("article .note").last).to_contain_text("8 tokens")
    say(page, "and again", tokens=10_000)
    page.click("#stop")
    finished(page)


def test_shift_enter_makes_a_new_line(page: Page) -> None:
    page.fill("#prompt", "one")
    page.press("#prompt", "Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#prompt") == "one\ntwo"
    expect(page.locator("article")).to_have_count(0)


def test_a_refused_request_says_why_and_can_be_sent_again(
    open_page: Callable[..., Page], service: Serving
) -> None:
    page = open_page(service, faults_may="400")
    say(page, "hello", tokens=10)
    finished(page)
    page.click("#options summary")
    page.fill("#temperature", "-1")
    page.click("#options summary")
    say(page, "and then?", tokens=10)
    expect(page.locator("#temperature")).to_be_visible()  # it is at fault; nothing is sent
    expect(page.locator("article")).to_have_count(2)
    page.evaluate("document.getElementById('ask').noValidate = true")
    page.press("#prompt", "Enter")
    finished(page)
    expect(page.locator("article .failure")).to_contain_text("temperature")
    page.fill("#temperature", "")
    page.click("article .failure button")
    finished(page)
    expect(page.locator("article .failure")).to_have_count(0)
    expect(page.locator("article .note").last).to_contain_text("10 tokens")


def test_a_service_that_dies_shows_and_the_page_heals_by_itself(
    open_page: Callable[..., Page], models: Pair
) -> None:
    flags = ("--protocol", "local")
    with serving(models.draft, None, *flags) as first:
        page = open_page(first, faults_may="ERR_|network")
        expect(page.locator("#pill-text")).to_have_text("no edge")
        say(page, "hello", tokens=30_000)
        expect(page.locator("article [data-origin=local]")).not_to_have_count(0)
        first.tell(signal.SIGKILL)
        expect(page.locator("#unreachable")).to_be_visible()
        expect(page.locator("#pill")).to_have_attribute("data-state", "gone")
        expect(page.locator("article .failure")).to_be_visible()
        port = first.port
    with serving(models.draft, None, *flags, "--listen", f"127.0.0.1:{port}"):
        expect(page.locator("#unreachable")).to_be_hidden()
        sent = Sight(page, first.url).posted
        say(page, "hello", tokens=8)
        finished(page)
        assert len(json.loads(sent[-1])["messages"]) == 1  # what failed was not said
        expect(page.locator("article .note").last).to_contain_text("8 tokens")


def test_a_key_is_asked_for_until_it_is_right(
    open_page: Callable[..., Page], models: Pair, tmp_path_factory: pytest.TempPathFactory
) -> None:
    keys = tmp_path_factory.mktemp("api") / "api-keys"
    keys.write_text("alice:0123456789abcdef0123\n")
    os.chmod(keys, 0o600)
    with serving(models.draft, None, "--protocol", "local", "--api-keys", keys) as service:
        page = open_page(service, faults_may="401")
        dialog = page.locator("#key-dialog")
        expect(dialog).to_be_visible()
        page.keyboard.press("Escape")
        expect(dialog).to_be_visible()
        page.fill("#key", "ключ, which no header can hold")
        page.press("#key", "Enter")
        expect(dialog).to_be_visible()
        page.fill("#key", "a key that is wrong altogether")
        page.press("#key", "Enter")
        expect(page.locator("#key-text")).to_contain_text("refused")
        page.fill("#key", "0123456789abcdef0123")
        page.press("#key", "Enter")
        expect(dialog).to_be_hidden()
        expect(page.locator("#drafter")).not_to_have_text("–")
        say(page, "hello", tokens=8)
        finished(page)
        page.reload()  # the key stays with the tab
        expect(page.locator("#drafter")).not_to_have_text("–")
        expect(dialog).to_be_hidden()
        assert page.evaluate("localStorage.length") == 0


# Looks


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_origins_differ_by_colour_and_underline_and_can_be_read(
    open_page: Callable[..., Page], service: Serving, scheme: str
) -> None:
    page = open_page(service, color_scheme=scheme)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    looks = {
        origin: page.locator(f"#legend [data-origin={origin}]").evaluate(
            "e => { const s = getComputedStyle(e);"
            " return [s.color, s.textDecorationLine + s.textDecorationStyle] }"
        )
        for origin in ORIGINS
    }
    assert len({colour for colour, _ in looks.values()}) == len(ORIGINS)
    assert len({underline for _, underline in looks.values()}) == len(ORIGINS)
    for origin, (colour, _) in looks.items():
        assert contrast(colour, ground) >= 4.5, origin
    quiet = page.locator("#hint").evaluate("e => getComputedStyle(e).color")
    assert contrast(quiet, ground) >= 4.5


def test_it_fits_a_phone(open_page: Callable[..., Page], service: Serving) -> None:
    page = open_page(service, viewport={"width": 360, "height": 640})
    say(page, "hello", tokens=60)
    finished(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    box = page.locator("#send").bounding_box()
    assert box["y"] + box["height"] <= 640  # the prompt is in sight


def test_every_control_has_a_name(page: Page) -> None:
    nameless = page.evaluate(
        "() => [...document.querySelectorAll('button, input, textarea, meter')]"
        ".filter(e => !(e.labels?.length || e.ariaLabel || e.textContent.trim()))"
        ".map(e => e.outerHTML)"
    )
    assert nameless == []


def test_the_files_come_with_a_strict_policy(service: Serving) -> None:
    for path in ("/", "/page/page.js", "/page/page.css", "/page/icon.svg"):
        response = service.get(path)
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        tag = response.headers["etag"]
        assert service.get(path, headers={"if-none-match": tag}).status_code == 304
    html = service.get("/").text
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! type=\"module\" src=\"page/)", html)
    for path in ("/page/../page.py", "/page/%2e%2e/page.py", "/page/page.py", "/page/"):
        assert service.get(path).status_code == 404


def test_promtool_accepts_what_such_a_service_shows(page: Page, service: Serving) -> None:
    say(page, "hello", tokens=20)
    finished(page)
    assert service.get("/nothing").status_code == 404
    accept_by_promtool(service.get("/metrics").content)
    assert service.metric("pilotfish_link_up ") == 1
    assert service.metric("pilotfish_spec_decode_num_drafts_total{") > 0
    assert service.metric('pilotfish_generation_tokens_total{origin="drafted"') > 0
    assert service.metric('pilotfish_stage_seconds_count{protocol="coupled",stage="uplink"') > 0
    assert service.metric("pilotfish_link_rtt_seconds ") > 0.04
    assert service.metric('pilotfish_http_requests_total{route="/v1/chat/completions"') > 0
    assert service.metric('pilotfish_http_requests_total{route="other",status="404"') >= 1
