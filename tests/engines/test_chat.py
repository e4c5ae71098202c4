"""Chat templates: what real ones give, and hostile ones, which end in a typed error."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pilotfish.engines.chat import ChatTemplate
from pilotfish.engines.engine_errors import TemplateError

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
USER = {"role": "user", "content": " Hi <b>🐟</b> "}
CHAT = [USER, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "More"}]


def template(name: str, **tokens: str) -> ChatTemplate:
    return ChatTemplate((TEMPLATES / f"{name}.jinja").read_text("utf-8"), tokens)


def render(source: str, **bounds: Any) -> str:
    return ChatTemplate(source, **bounds).render([USER])


def test_llama3() -> None:
    assert template("llama3", bos_token="<|begin_of_text|>").render([USER]) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi <b>🐟</b><|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_qwen() -> None:
    system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    text = "<|im_start|>user\n Hi <b>🐟</b> <|im_end|>\n"
    assert template("qwen2.5").render([USER]) == (
        f"<|im_start|>system\n{system}<|im_end|>\n{text}<|im_start|>assistant\n"
    )
    assert template("qwen2.5").render([USER], add_generation_prompt=False).endswith(text)
    silent = template("qwen3").render([USER], enable_thinking=False)
    assert silent.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_mistral_refuses_what_its_makers_refuse() -> None:
    mistral = template("mistral", bos_token="<s>", eos_token="</s>")
    assert mistral.render(CHAT) == ("<s>[INST]  Hi <b>🐟</b>  [/INST]Hello</s>[INST] More [/INST]")
    with pytest.raises(TemplateError, match="must alternate"):
        mistral.render([USER, USER])


def test_functions_that_templates_use() -> None:
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": " Hi <b>🐟</b> "}]'
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")
    assert render("{% generation %}said{% endgeneration %}") == "said"
    assert render("{% for m in messages %}{% break %}{% endfor %}.") == "."
    assert render("{{ tools is none }} {{ unknown }}") == "True "
    # Blocks leave no lines behind.
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"
    loop = "{% for x in 'abc' %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}"
    assert render(loop) == "1/3False 2/3False 3/3True "


def test_tokens_by_their_names() -> None:
    tokens = {"bos_token": "<s>", "image_token": "<i>", "messages": "no", "tools": "no"}
    source = "{{ bos_token }}{{ image_token }}{{ pad_token }}{{ eos_token is defined }}"
    written = ChatTemplate(source + "{{ messages | length }}{{ tools is none }}", tokens)
    assert written.render([USER]) == "<s><i>False1True"
    assert written.render([USER], bos_token="other").startswith("other<i>")


def test_messages_are_as_transformers_gives_them() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [], "name": None}
    thought = {"role": "assistant", "content": "b", "reasoning_content": "a"}
    source = "{% for m in messages %}{{ m.content is defined }} {{ m | length }};{% endfor %}"
    assert ChatTemplate(source).render([called, USER]) == "False 2;True 2;"
    both = ChatTemplate("{{ messages[0].thinking }}{{ messages[0].reasoning_content }}")
    assert both.render([thought]) == "aa"
    assert both.render([{"role": "assistant", "thinking": "c"}]) == "cc"


def test_a_template_that_does_not_compile_is_told_by_its_line() -> None:
    with pytest.raises(TemplateError, match=r"does not compile: line 3: .*'endfor'"):
        ChatTemplate("a\n{% if b %}\n{% endfor %}")


@pytest.mark.parametrize(
    "source",
    [
        "{% set x = range(99999) %}{% for a in x %}{% for b in x %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(90) }}",
        "{% set x = range(99999) %}{% for a in x if a < 0 %}{% endfor %}" * 400,
    ],
)
def test_endless_templates_are_stopped(source: str) -> None:
    began = time.process_time()
    with pytest.raises(TemplateError, match=r"more than 0\.5 s"):
        render(source, max_seconds=0.5)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 12 }}",
        "{{ [1] * 10 ** 12 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{% set n = namespace(x='a' * 99) %}"
        "{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='a' * 99) %}"
        "{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
        "{{ ('a' * 999999) ~ ('a' * 999999) }}",
    ],
)
def test_templates_that_would_fill_the_memory_are_stopped(source: str) -> None:
    with pytest.raises(TemplateError, match="more than 1000000 characters"):
        render(source, max_characters=1_000_000, max_seconds=60.0)  # size alone stops it


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages[0].update(role='x') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ lipsum() }}",
        "{{ 1 / 0 }}",
        "{{ messages.content.upper() }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_templates_that_reach_out_or_fail(source: str) -> None:
    with pytest.raises(TemplateError, match="the chat template failed"):
        render(source)
    assert USER == {"role": "user", "content": " Hi <b>🐟</b> "}


@pytest.mark.parametrize(
    "source",
    ["{% for %}", "{{", "{% endif %}", "{{ " + "(" * 5000 + ")" * 5000 + " }}", "{{ x!! }}"],
)
def test_templates_that_do_not_compile(source: str) -> None:
    with pytest.raises(TemplateError, match="does not compile"):
        ChatTemplate(source)


def test_unsafe_values_are_nothing() -> None:
    for source in ("{{ messages|attr('__class__') }}", "{{ '{0.__class__}'.format(messages) }}"):
        assert "class" not in render(source)


def test_two_threads_render_at_once() -> None:
    shared = template("qwen2.5")
    expected, result = shared.render(CHAT), []
    threads = [
        threading.Thread(target=lambda: result.extend(shared.render(CHAT) for _ in range(50)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert result == [expected] * 200
