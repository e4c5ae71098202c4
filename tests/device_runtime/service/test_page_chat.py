"""The page's conversation: its options, its reasons, its figures, and what survives a reload."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")
pytest.importorskip("prometheus_client", reason="needs the extra `serve`")
pytest.importorskip("playwright", reason="needs playwright")

from playwright.sync_api import expect

from pilotfish import EdgeServer
from pilotfish.emulation.emulator import Conditions, Emulator
from tests.conftest import Pair
from tests.support.browsing import (
    Sight,
    answer,
    browser,
    contrast,
    finished,
    hostile_pair,
    open_page,
    say,
)
from tests.support.serving import Serving, serving
from tests.support.writing import calling_pair

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow
assert browser
assert open_page  # fixtures

FLAGS = ("--protocol", "coupled", "--window", "4", "--temperature", "1")
KEY = "0123456789abcdef0123"
QUESTION = """it's "quoted" $HOME `id` \\ !1
second line"""
BEFORE_THE_KEYS = '{"version": 1, "cut": false, "turns": []}'  # a stored conversation
_LOOKS = "spans => spans.map(e => [e.dataset.origin, getComputedStyle(e).color])"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Models whose answers never end, with markup in them."""
    return hostile_pair(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(scope="module")
def link(models: Pair) -> Iterator[Emulator]:
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


def options(page: Page, **values: object) -> None:
    """Fill options, by the ids of their fields; `None` leaves the protocol to the service."""
    page.evaluate("document.getElementById('options').open = true")
    for name, value in values.items():
        field = page.locator(f"#{name.replace('_', '-')}")
        if name == "protocol_choice":
            field.select_option("" if value is None else str(value))
        else:
            field.fill(str(value))
    page.evaluate("document.getElementById('options').open = false")


def sent(sight: Sight) -> dict[str, Any]:
    """The body of the last request."""
    body: dict[str, Any] = json.loads(sight.posted[-1])
    return body


def reason(page: Page) -> str:
    """Unfold the last answer's reason, and read it."""
    fold = page.locator(".why").last
    fold.locator("summary").click()
    expect(fold.locator("p")).to_be_visible()
    return fold.locator("p").text_content() or ""


# Options and reasons


def test_protocol_window_and_seed_can_be_chosen(page: Page, service: Serving) -> None:
    sight = Sight(page, service.url)
    options(page, protocol_choice="coupled", window=3, seed=11)
    expect(page.locator("#options-name")).to_have_text("Options: coupled, window 3, seed 11")
    texts = []
    for _ in range(2):
        say(page, "hello", tokens=30)
        finished(page)
        texts.append(answer(page))
        page.click("#new-chat")
    body = sent(sight)
    assert (body["pilotfish"], body["seed"]) == ({"protocol": "coupled", "window": 3}, 11)
    assert texts[0] == texts[1]
    options(page, seed=12)
    say(page, "hello", tokens=30)
    finished(page)
    assert answer(page) != texts[0]
    expect(page.locator("article .note").last).to_contain_text("coupled, window 3")
    assert reason(page) == "You chose it in the options."
    page.reload()  # no choice stays that the title does not show
    expect(page.locator("#options-name")).to_have_text("Options")
    expect(page.locator("#seed")).to_have_value("")


def test_the_reason_for_the_services_and_for_autos_choice(page: Page, service: Serving) -> None:
    sight = Sight(page, service.url)
    say(page, "hello", tokens=10)
    finished(page)
    assert "pilotfish" not in sent(sight)
    assert reason(page) == "It is the service’s own setting."
    options(page, protocol_choice="auto")
    say(page, "and now?", tokens=10)
    finished(page)
    assert reason(page) == service.get("/status").json()["protocol"]["reason"] != ""
    assert "predicted" in reason_of(page)


def reason_of(page: Page) -> str:
    return page.locator(".why p").last.text_content() or ""


def test_only_windows_that_have_an_effect_can_be_set(page: Page, service: Serving) -> None:
    offered = [each["name"] for each in service.get("/status").json()["protocols"]]
    assert {"auto", "coupled", "ahead", "stream", "local"} <= {*offered}
    assert page.locator("#protocol-choice option").count() == len(offered) + 1
    lossy = page.locator("#protocol-choice option", has_text="(lossy)").all_text_contents()
    assert "adaptive (lossy)" in lossy
    assert not any("coupled" in each for each in lossy)
    options(page, window=5, protocol_choice="stream")
    assert page.locator("#window").is_disabled()
    sight = Sight(page, service.url)
    say(page, "hello", tokens=5)
    finished(page)
    assert sent(sight)["pilotfish"] == {"protocol": "stream"}


# Figures and the link


def test_figures_are_those_of_now(page: Page, link: Emulator) -> None:
    say(page, "hello", tokens=10_000)
    expect(page.locator("article .note").last).to_contain_text("a second now")
    expect(page.locator("article .note").last).to_contain_text("accepted")
    expect(page.locator("#speed")).to_contain_text("now")
    expect(page.locator("#protocol")).to_contain_text("coupled, window 4")
    page.keyboard.press("Escape")
    finished(page)
    say(page, "again", tokens=5)
    finished(page)
    expect(page.locator("#speed")).to_contain_text("last answer")
    for picture, unit in (("acceptance", "%"), ("rtt", "ms")):
        drawing = page.locator(f"#{picture}-picture svg")
        label = re.compile(rf"In the last 5 min from .*{unit} to .*{unit}, last .*{unit}\.")
        expect(drawing).to_have_attribute("aria-label", label)
        assert drawing.locator("path").count() >= 1


def test_an_edge_that_is_away_is_told_with_reason_and_remedy(page: Page, link: Emulator) -> None:
    expect(page.locator("#outage")).to_be_hidden()
    link.cut(3600.0, silent=True)
    expect(page.locator("#outage")).to_be_visible()
    expect(page.locator("#outage-title")).to_contain_text(re.compile("not available: [a-z]+"))
    expect(page.locator("#outage-since")).to_contain_text(re.compile(r"Away since .+, for \d+ s"))
    expect(page.locator("#link-problem")).to_contain_text(link.endpoint)
    expect(page.locator("#link-remedy code").first).to_be_visible()
    expect(page.locator("#outage-meanwhile")).to_contain_text("wait")
    link.cut(0.0, silent=True)
    expect(page.locator("#outage")).to_be_hidden()
    expect(page.locator("#rtt-picture .remark")).to_have_text(re.compile("the edge was away"))


def test_code_in_a_message_has_a_code_face_and_no_tokens(page: Page) -> None:
    say(page, "What does `ls` do?", tokens=5)
    finished(page)
    message = page.locator("article[data-role=user] .text")
    expect(message).to_have_text("What does `ls` do?")
    expect(message.locator("code")).to_be_visible()
    assert message.locator(".token").count() == 0


# What survives


def test_a_chat_survives_a_reload(page: Page, service: Serving) -> None:
    for text in ("one", "two"):
        say(page, text, tokens=20)
        finished(page)
    texts = page.locator("article .text").all_text_contents()
    notes = page.locator("article .note").all_text_contents()
    looks = page.locator("article .token").evaluate_all(_LOOKS)
    page.reload()
    expect(page.locator("article")).to_have_count(4)
    assert page.locator("article .text").all_text_contents() == texts
    assert page.locator("article .note").all_text_contents() == notes
    assert {tuple(look) for look in looks} == {
        tuple(look) for look in page.locator("article .token").evaluate_all(_LOOKS)
    }
    sight = Sight(page, service.url)
    say(page, "three", tokens=5)
    finished(page)
    messages = [(each["role"], each["content"]) for each in sent(sight)["messages"]]
    assert messages == [
        *zip(("user", "assistant") * 2, texts, strict=True),
        ("user", "three"),
    ]
    page.click("#new-chat")
    page.reload()
    expect(page.locator("#hint")).to_be_visible()
    expect(page.locator("article")).to_have_count(0)


def test_an_answer_that_a_reload_interrupts_is_kept_as_far_as_it_came(page: Page) -> None:
    say(page, "hello", tokens=10_000)
    expect(page.locator("article .note").last).to_contain_text("a second now")
    before = answer(page)
    page.reload()
    expect(page.locator("article .stopped")).to_have_text("The page was left meanwhile.")
    assert answer(page).startswith(before)
    say(page, "and then?", tokens=5)
    finished(page)
    expect(page.locator("article")).to_have_count(4)


def test_each_tab_has_its_chat_and_a_new_tab_the_last_one(
    browser: Browser, service: Serving, link: Emulator
) -> None:
    context = browser.new_context()
    first = context.new_page()
    first.goto(service.url)
    say(first, "first", tokens=5)
    finished(first)
    second = context.new_page()
    second.goto(service.url)
    expect(second.locator("article .text").first).to_have_text("first")
    second.click("#new-chat")
    say(second, "second", tokens=5)
    finished(second)
    for tab, text in ((first, "first"), (second, "second")):
        tab.reload()
        expect(tab.locator("article .text").first).to_have_text(text)
    context.close()


def test_calls_and_their_results_survive(
    open_page: Callable[..., Page], tmp_path_factory: pytest.TempPathFactory
) -> None:
    models = calling_pair(tmp_path_factory.mktemp("callers"))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"enum": [{"a": 1}]}}}]
    flags = ("--protocol", "local", "--temperature", "1", "--seed", "7")
    with serving(models.draft, None, *flags) as started:
        page = open_page(started)
        page.evaluate("document.getElementById('form').open = true")
        page.fill("#tools", json.dumps(tools))
        page.check("#must-call")
        say(page, "hello", tokens=2000)
        finished(page)
        page.reload()
        page.get_by_label("Result").first.fill("sunny")  # still to be sent
        sight = Sight(page, started.url)
        page.get_by_role("button", name="Send result").click()
        finished(page)
        results = [each for each in sent(sight)["messages"] if each["role"] == "tool"]
        assert results[0]["content"] == "sunny"
        page.reload()
        field = page.get_by_label("Result").first
        expect(field).to_have_value("sunny")
        assert field.evaluate("e => e.readOnly")
        page.close()


def test_what_is_stored_is_bounded_and_may_be_broken(page: Page) -> None:
    stored = page.evaluate(
        """async () => {
          const { saveTurns } = await import("/page/store.js");
          const message = { role: "user", content: "x".repeat(50_000) };
          const record = { parts: [], seconds: 1, summary: null, lines: [] };
          saveTurns(Array(20).fill({ messages: [message], parameters: {}, record }));
          return localStorage.getItem("pilotfish-chat");
        }"""
    )
    assert len(stored) <= 400_200
    saved = json.loads(stored)
    assert (saved["cut"], len(saved["turns"])) == (True, 7)
    page.reload()
    expect(page.locator("#log > .stopped")).to_have_text("Earlier messages are no longer kept.")
    for broken in ("{", '{"version": 2}', "null", '{"version": 1, "turns": [{}]}'):
        page.evaluate("t => { for (const s of [localStorage, sessionStorage]) "
                      "s.setItem('pilotfish-chat', t) }", broken)  # fmt: skip
        page.reload()
        expect(page.locator("#hint")).to_be_visible()


# The request as a command


def copied(page: Page, service: Serving, index: int = -1) -> str:
    """Copy the request of an answer (-1: the last one), and read the clipboard."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=service.url)
    button = page.get_by_role("button", name="Copy as curl").nth(index)
    button.click()
    expect(button).to_have_attribute("data-label", "Copied")
    text: str = page.evaluate("navigator.clipboard.readText()")
    return text


def run(command: str, **environment: str) -> Any:
    """Run a command as a shell would that it was pasted into."""
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    done = subprocess.run(
        ["sh", "-c", command],
        capture_output=True,
        timeout=60,
        check=True,
        env={**os.environ, **environment, "no_proxy": "*"},
    )
    return json.loads(done.stdout)


def test_a_copied_request_gives_the_same_answer(page: Page, service: Serving) -> None:
    options(page, seed=5, temperature=0.8)
    for text in ("first", QUESTION):
        say(page, text, tokens=20)
        finished(page)
    command = copied(page, service)
    assert "Authorization" not in command
    assert run(command)["choices"][0]["message"]["content"] == answer(page)
    page.reload()
    assert copied(page, service) == command


def test_the_copied_request_of_a_failed_answer_has_no_later_message(
    open_page: Callable[..., Page], service: Serving
) -> None:
    page = open_page(service, faults_may="Failed to load")
    completions = "**/v1/chat/completions"
    for text in ("first", "lost", "later"):
        if text == "lost":
            page.route(completions, lambda route: route.abort())
        say(page, text, tokens=5)
        finished(page)
        page.unroute(completions)
    expect(page.locator("article .failure")).to_have_count(1)
    command = copied(page, service, 1)
    assert '"lost"' in command
    assert '"first"' in command
    assert '"later"' not in command
    assert '"lost"' not in copied(page, service, 2)


def test_a_copied_request_names_a_variable_and_never_the_key(
    open_page: Callable[..., Page], pair: Pair, tmp_path: Path
) -> None:
    listed = tmp_path / "api-keys"
    listed.write_text(f"alice:{KEY}\n")
    listed.chmod(0o600)
    flags = ("--protocol", "local", "--temperature", "0", "--api-keys", listed)
    with serving(pair.draft, None, *flags) as started:
        page = open_page(started, faults_may="401")
        page.evaluate(f"localStorage.setItem('pilotfish-chat', '{BEFORE_THE_KEYS}')")
        page.fill("#key", KEY)
        page.press("#key", "Enter")
        say(page, "hello", tokens=8)
        finished(page)
        command = copied(page, started)
        assert KEY not in command
        body = run(command, PILOTFISH_API_KEY=KEY)
        assert body["choices"][0]["message"]["content"] == answer(page)
        # the chat lives as long as the key: in this tab
        assert page.evaluate("localStorage.length") == 0
        page.evaluate(f"localStorage.setItem('pilotfish-chat', '{BEFORE_THE_KEYS}')")
        page.reload()
        expect(page.locator("article")).to_have_count(2)
        assert page.evaluate("localStorage.length") == 0
        with page.context.expect_page() as opening:
            page.evaluate("open('/', '_blank', 'noopener')")
        other = opening.value
        expect(other.locator("#key-dialog")).to_be_visible()
        assert other.locator("article").count() == 0
        other.close()
        page.close()


# Looks


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_notice_and_code_can_be_read(
    open_page: Callable[..., Page], service: Serving, scheme: str
) -> None:
    page = open_page(service, color_scheme=scheme)
    page.evaluate(
        """async () => {
          const { CodeText } = await import("/page/code.js");
          const box = document.createElement("div");
          document.getElementById("log").append(box);
          const reader = new CodeText(box);
          const origins = ["drafted", "forced", "corrected", "bonus", "target", "local", ""];
          const add = (text, origin) => reader.add({ text, kind: { origin }, entries: null });
          add("```py\\n", "");
          for (const origin of origins) add(`${origin}word `, origin);
          reader.end();
          document.getElementById("outage").hidden = false;
          document.getElementById("outage-title").textContent = "title";
        }"""
    )
    ground = page.locator(".block").evaluate("e => getComputedStyle(e).backgroundColor")
    tokens = page.locator(".block code .token")
    assert tokens.count() == 7
    for token in tokens.all():
        assert contrast(token.evaluate("e => getComputedStyle(e).color"), ground) >= 4.5
    notice = page.locator("#outage").evaluate("e => getComputedStyle(e).backgroundColor")
    for part in ("#outage", "#outage-title"):
        color = page.locator(part).evaluate("e => getComputedStyle(e).color")
        assert contrast(color, notice) >= 4.5, part


def test_long_code_and_the_notice_fit_a_phone(
    open_page: Callable[..., Page], service: Serving, link: Emulator
) -> None:
    page = open_page(service, viewport={"width": 390, "height": 700})
    say(page, "```\n" + "long line of code " * 20, tokens=5)
    finished(page)
    page.evaluate("document.getElementById('options').open = true")
    link.cut(3600.0, silent=True)
    expect(page.locator("#outage")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.evaluate("document.getElementById('options').open = false")
    box = page.locator("#send").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] <= 700  # the prompt is in sight
    link.cut(0.0, silent=True)
