"""Code in the page's answers: which text has a code face, and that no text is lost or changed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")
pytest.importorskip("prometheus_client", reason="needs the extra `serve`")
pytest.importorskip("playwright", reason="needs playwright")

from tests.conftest import Pair
from tests.support.browsing import browser, open_page
from tests.support.serving import Serving, serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow
assert browser
assert open_page  # fixtures

_SHOW = """async ([pieces, ended]) => {
  const { CodeText } = await import("/page/code.js");
  const box = document.createElement("div");
  const reader = new CodeText(box);
  for (const [text, origin] of pieces) reader.add({ text, kind: { origin }, entries: null });
  if (ended) reader.end();
  const visible = (e) => {
    const copy = e.cloneNode(true);
    copy.querySelectorAll(".mark").forEach((mark) => mark.remove());
    return copy.textContent;
  };
  const shown = (query) => [...box.querySelectorAll(query)].map(visible);
  const layout = box.cloneNode(true);
  layout.querySelectorAll(".token").forEach((span) => span.replaceWith(...span.childNodes));
  layout.normalize();
  return {
    text: box.textContent,
    blocks: shown("pre > code"),
    languages: [...box.querySelectorAll(".block")].map((e) => e.dataset.language),
    inline: shown("code:not(pre code)"),
    plain: visible(box),
    origins: [...box.querySelectorAll("code .token")].map((e) => [e.dataset.origin, e.textContent]),
    tags: [...new Set([...box.querySelectorAll("*")].map((e) => e.tagName))],
    layout: layout.innerHTML,
  };
}"""

_TIME = """async ([unit, count]) => {
  const { CodeText } = await import("/page/code.js");
  const box = document.createElement("div");
  const reader = new CodeText(box);
  const began = performance.now();
  for (let i = 0; i < count; i += 1) reader.add({ text: unit, kind: null, entries: null });
  reader.end();
  return { ms: performance.now() - began, text: box.textContent };
}"""


@pytest.fixture(scope="module")
def service(pair: Pair) -> Iterator[Serving]:
    with serving(pair.draft, None, "--lanes", 1) as started:
        yield started


@pytest.fixture
def page(open_page: Callable[..., Page], service: Serving) -> Page:
    return open_page(service)


def show(page: Page, *pieces: str | tuple[str, str], ended: bool = True) -> dict[str, Any]:
    """Render pieces, each a text or (text, origin)."""
    pairs = [(each, "drafted") if isinstance(each, str) else each for each in pieces]
    result: dict[str, Any] = page.evaluate(_SHOW, [pairs, ended])
    return result


CASES: list[tuple[str, list[str], list[str]]] = [
    # text, blocks, inline code
    ("plain", [], []),
    ("a `b` c", [], ["b"]),
    ("``a ` b``", [], ["a ` b"]),
    ("a `b", [], []),
    ("a `b\nc` d", [], []),
    ("```python\nx = 1\n```\nend", ["x = 1\n"], []),
    ("```\n<b>&amp;\n", ["<b>&amp;\n"], []),
    ("~~~js\n```\n~~~", ["```\n"], []),
    ("````\n```\n````\n", ["```\n"], []),
    ("  ```\n  x\n  ```\nand `y`", ["  x\n"], ["y"]),
    ("```not a fence``` but code", [], ["not a fence"]),
    ("a ```\nb", [], []),
    ("```\none\n```\n\n```\ntwo\n```", ["one\n", "two\n"], []),
    ("```\nx ``` y\n```", ["x ``` y\n"], []),
    ("```\n`a`\n", ["`a`\n"], []),
]


def test_code_has_a_code_face_and_only_code(page: Page) -> None:
    for text, blocks, inline in CASES:
        rendering = show(page, text)
        assert (rendering["blocks"], rendering["inline"]) == (blocks, inline), text
        assert rendering["text"] == text


def test_the_marks_around_code_are_kept_but_not_shown(page: Page) -> None:
    rendering = show(page, "Run `ls`:\n```sh title=x\nls\n```\n")
    assert rendering["plain"] == "Run ls:\nls\n"
    assert rendering["languages"] == ["sh"]


def test_an_open_fence_shows_its_code_while_it_comes(page: Page) -> None:
    pieces = ["So:\n", "``", "`py", "thon\n", "x = ", "1\n``"]
    assert show(page, *pieces[:3], ended=False)["text"] == "So:\n"  # it may become a fence
    assert show(page, *pieces[:5], ended=False)["blocks"] == ["x = "]
    assert show(page, *pieces, ended=False)["blocks"] == ["x = 1\n"]  # it may become the end
    assert show(page, *pieces)["blocks"] == ["x = 1\n``"]
    assert show(page, "a `b", ended=False)["inline"] == ["b"]


def test_tokens_keep_their_origins_in_code(page: Page) -> None:
    rendering = show(page, ("```\nif", "drafted"), (" x", "corrected"), (":\n", "bonus"), "``", "`")
    words = [(origin, text.strip()) for origin, text in rendering["origins"] if text.strip("`\n")]
    assert words == [("drafted", "if"), ("corrected", "x"), ("bonus", ":")]


def test_markup_in_code_stays_text(page: Page) -> None:
    attack = "```<img src=x onerror=alert(1)>\n<script>1</script>\n```\n`<b>`"
    rendering = show(page, attack)
    assert rendering["text"] == attack
    assert set(rendering["tags"]) <= {"SPAN", "CODE", "PRE", "DIV", "BUTTON"}


def test_any_text_is_kept_however_it_is_cut(page: Page) -> None:
    """The same text gives the same layout, in whatever pieces it arrives."""
    draw = random.Random(5)
    for _ in range(150):
        text = "".join(draw.choice("``~~\n\n ab<") for _ in range(draw.randrange(1, 40)))
        text = text.replace("a", "```", draw.randrange(3))
        pieces, left = [], text
        while left:
            size = draw.randrange(1, 5)
            pieces.append(left[:size])
            left = left[size:]
        cut, whole = show(page, *pieces), show(page, text)
        assert cut["text"] == whole["text"] == text
        assert cut["layout"] == whole["layout"], text


def test_long_lines_take_little_time(page: Page) -> None:
    """A model may write a long line of backticks or spaces, in many pieces."""
    for unit in ("`a", "`", " ", "``` ", "~", "```\n", "`\n"):
        taken = page.evaluate(_TIME, [unit, 20_000])
        assert taken["text"] == unit * 20_000
        assert taken["ms"] < 8000, unit
