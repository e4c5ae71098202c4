"""The page in Chromium where answers have a form: forced tokens, probabilities, calls, thoughts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")
pytest.importorskip("prometheus_client", reason="needs the extra `serve`")
pytest.importorskip("playwright", reason="needs playwright")

from playwright.sync_api import expect

from pilotfish import EdgeServer
from tests.conftest import Pair
from tests.support.browsing import Sight, answer, browser, finished, open_page, say
from tests.support.serving import Serving, serving
from tests.support.writing import OBJECT, calling_pair, writers

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.slow
assert browser
assert open_page
assert writers  # fixtures

FLAGS = ("--protocol", "coupled", "--window", "6", "--seed", "7", "--temperature", "1")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"in_the_city": {"enum": ["Oslo", "Rome"]}},
                "required": ["in_the_city"],
                "additionalProperties": False,
            },
        },
    }
]
_LOOK = "e => { const s = getComputedStyle(e); return [s.color, s.textDecorationStyle] }"


@pytest.fixture(scope="module")
def writing(writers: Pair) -> Iterator[Serving]:
    with (
        EdgeServer(writers.target, threads=1) as edge,
        serving(writers.draft, edge.endpoint, *FLAGS) as started,
    ):
        yield started


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Models that think, and call where they must."""
    pair = calling_pair(tmp_path_factory.mktemp("callers"))
    with (
        EdgeServer(pair.target, threads=1) as edge,
        serving(pair.draft, edge.endpoint, *FLAGS) as started,
    ):
        yield started


def form(page: Page, schema: object = None, tools: object = None) -> None:
    page.evaluate("document.getElementById('form').open = true")
    for name, value in (("schema", schema), ("tools", tools)):
        page.fill(f"#{name}", "" if value is None else json.dumps(value))
    page.evaluate("document.getElementById('form').open = false")


def look(results_value: Locator) -> Any:
    return results_value.first.evaluate(_LOOK)


def must_call(open_page: Callable[..., Page], calling: Serving) -> Page:
    """Open the page, with tools of which the model must call one."""
    page = open_page(calling)
    form(page, None, TOOLS)
    page.evaluate("document.getElementById('must-call').checked = true")
    return page


def test_forced_tokens_of_a_schema_have_their_colour(
    open_page: Callable[..., Page], writing: Serving
) -> None:
    page = open_page(writing)
    form(page, OBJECT)
    expect(page.locator("#form-name")).to_have_text("Form: schema")
    say(page, "ab", tokens=150)
    finished(page)
    assert set(json.loads(answer(page))) == {"ab", "bad", "x", "dd"}
    forced = page.locator("article [data-origin=forced]")
    assert '"' in "".join(forced.all_text_contents())
    legend = {
        origin: look(page.locator(f"#legend [data-origin={origin}]"))
        for origin in ("forced", "drafted")
    }
    assert look(page.locator("article .token:not(.blank)[data-origin=forced]")) == legend["forced"]
    assert legend["forced"] != legend["drafted"]
    expect(page.locator("article .note").last).to_contain_text(re.compile(r"[1-9]\d* forced"))
    form(page)
    say(page, "ab", tokens=20)
    finished(page)
    assert page.locator("article").last.locator("[data-origin=forced]").count() == 0


def test_probabilities_are_told_of_the_token_pointed_at(
    open_page: Callable[..., Page], writing: Serving
) -> None:
    page = open_page(writing)
    form(page, OBJECT)
    sent = Sight(page, writing.url).posted
    say(page, "ab", tokens=150)
    finished(page)
    tokens = page.locator("article .text .token")
    assert tokens.count() > 20  # each of them by itself
    bubble = page.locator("#bubble")
    expect(bubble).to_be_hidden()
    page.locator("article [data-origin=forced]").nth(2).hover()
    expect(bubble).to_contain_text("forced")
    expect(bubble.locator(".head .share")).to_have_text("100.0\u00a0%")
    page.locator("article [data-origin=drafted]").first.hover()
    expect(bubble.locator(".origin")).to_contain_text("drafted on this device")
    shares = bubble.locator("li .share").all_text_contents()
    assert len(shares) == 5
    info = [float(share.split("\u00a0")[0].lstrip("< ")) for share in shares]
    assert info == sorted(info, reverse=True)
    page.locator("h1").hover()
    expect(bubble).to_be_hidden()
    # by the keyboard
    page.locator("article .text").last.focus()
    page.keyboard.press("End")
    expect(bubble).to_be_visible()
    page.keyboard.press("Home")
    expect(bubble.locator(".head")).to_contain_text((tokens.first.text_content() or "").strip())
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_have_class(re.compile("chosen"))
    page.keyboard.press("Escape")
    expect(bubble).to_be_hidden()
    # and not requested when the option is off
    page.click("#options summary")
    page.uncheck("#probabilities")
    say(page, "ab", tokens=150)
    finished(page)
    assert ("logprobs" in json.loads(sent[0]), "logprobs" in json.loads(sent[-1])) == (True, False)


@pytest.mark.parametrize(
    ("field", "text", "fault"),
    [
        ("schema", '{"type": ', "no JSON"),
        ("schema", "[1]", "an object"),
        ("tools", "{}", "a list"),
        ("tools", '[{"type": "function"}]', "Tool 1"),
    ],
)
def test_a_bad_form_is_told_in_place_and_not_sent(
    open_page: Callable[..., Page], writing: Serving, field: str, text: str, fault: str
) -> None:
    page = open_page(writing)
    page.click("#form summary")
    page.fill(f"#{field}", text)
    expect(page.locator(f"#{field}-fault")).to_contain_text(fault)
    page.click("#form summary")
    say(page, "ab")
    expect(page.locator(f"#{field}")).to_be_visible()  # it is at fault
    expect(page.locator("article")).to_have_count(0)
    page.fill(f"#{field}", "")
    expect(page.locator(f"#{field}-fault")).to_have_text("")
    page.press("#prompt", "Enter")
    finished(page)
    expect(page.locator("article")).to_have_count(2)


def test_what_the_service_refuses_can_be_mended(
    open_page: Callable[..., Page], writing: Serving
) -> None:
    page = open_page(writing, faults_may="400")
    form(page, {"type": "strange"})
    say(page, "ab", tokens=150)
    finished(page)
    again = page.locator("article .failure button")
    form(page, None)
    page.evaluate("document.getElementById('form').open = true")
    page.fill("#schema", "{")
    again.click()  # nothing is sent, and nothing lost
    expect(page.locator("article")).to_have_count(2)
    expect(page.locator("#schema")).to_be_focused()
    form(page, {"enum": ["ab", 12]})
    again.click()
    finished(page)
    expect(page.locator("article .failure")).to_have_count(0)
    assert json.loads(answer(page)) in ("ab", 12)


def test_a_call_is_shown_and_its_result_goes_back(
    open_page: Callable[..., Page], calling: Serving
) -> None:
    page = open_page(calling)
    form(page, None, TOOLS)
    expect(page.locator("#form-name")).to_have_text("Form: 1 tool")
    page.evaluate("document.getElementById('must-call').checked = true")
    sent = Sight(page, calling.url).posted
    say(page, "hello", tokens=2000)
    finished(page)
    # thought first, and folded away
    thought = page.locator(".thought > div")
    expect(thought).to_be_hidden()
    page.click(".thought summary")
    expect(thought).to_be_visible()
    names, arguments = page.locator(".call h4"), page.locator(".call .arguments")
    assert set(names.all_text_contents()) == {"weather"}
    text_contents = arguments.all_text_contents()  # of as many calls as it makes
    assert all(json.loads(result)["in_the_city"] in ("Oslo", "Rome") for result in text_contents)
    assert arguments.locator("[data-origin=forced]").count() > 10 * len(text_contents)
    arguments.first.locator(".token").first.hover()
    expect(page.locator("#bubble")).to_be_visible()
    page.get_by_label("Result").first.fill("rain <b>")
    send = page.get_by_role("button", name="Send result")
    send.click()
    finished(page)
    expect(send).to_have_count(0)
    payload = json.loads(sent[-1])
    user, turn, *results = payload["messages"]
    assert (len(results), user["role"], turn["role"]) == (len(text_contents), "user", "assistant")
    assert [call["function"]["arguments"] for call in turn["tool_calls"]] == text_contents
    assert turn["reasoning_content"] == thought.first.text_content()
    info = [(result["role"], result["tool_call_id"], result["content"]) for result in results]
    contents = ["rain <b>", *["No result."] * (len(text_contents) - 1)]
    ids = [call["id"] for call in turn["tool_calls"]]
    assert info == [("tool", *pair) for pair in zip(ids, contents, strict=True)]
    assert turn["tool_calls"][0]["function"]["name"] == "weather"
    assert "tool_choice" in json.loads(sent[0])
    assert "tool_choice" not in payload
    expect(page.locator("article .failure")).to_have_count(0)
    expect(page.locator("article[data-role=user]")).to_have_count(1)


def test_a_message_may_come_instead_of_a_result(
    open_page: Callable[..., Page], calling: Serving
) -> None:
    page = must_call(open_page, calling)
    sent = Sight(page, calling.url).posted
    say(page, "hello", tokens=2000)
    finished(page)
    expect(page.get_by_role("button", name="Send result")).to_be_visible()
    say(page, "never mind", tokens=2000)
    finished(page)
    roles = [message["role"] for message in json.loads(sent[-1])["messages"]]
    assert (roles[:3], roles[-1]) == (["user", "assistant", "tool"], "user")
    assert json.loads(sent[-1])["messages"][2]["content"] == "No result."


def test_a_call_that_is_cut_off_is_not_kept(
    open_page: Callable[..., Page], calling: Serving
) -> None:
    page = must_call(open_page, calling)
    sent = Sight(page, calling.url).posted
    say(page, "hello", tokens=2000)
    finished(page)
    length = int((page.locator("article .note").last.text_content() or "").split()[0])
    page.click("#new-chat")
    say(page, "hello", tokens=length - 20)
    finished(page)
    expect(page.locator(".stopped")).to_contain_text("dropped")
    say(page, "and now?", tokens=8)
    finished(page)
    roles = [message["role"] for message in json.loads(sent[-1])["messages"]]
    assert roles == ["user"]
