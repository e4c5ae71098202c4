"""What a chat template may take: to compile, counted; to render, whatever operation makes it."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from pilotfish.engines.chat import ChatTemplate
from pilotfish.engines.engine_errors import TemplateError

MOST = 1 << 20  # characters of a rendering here
USER = {"role": "user", "content": "hi"}
# A list that holds another twice, which holds another twice, …: 2⁶⁰ texts to print or compare.
SHARED = (
    "{% set n = namespace(x=('a',), y=('a',)) %}"
    "{% for i in range(60) %}{% set n.x = (n.x, n.x) %}{% set n.y = (n.y, n.y) %}{% endfor %}"
)


def many(piece: str, count: int) -> str:
    return "".join(piece.replace("@", str(number)) for number in range(count))


INTRICATE = {
    "tags": many("{% if a@ %}{% endif %}", 16_000),
    "macros": many("{% macro m@() %}{% endmacro %}", 16_000),
    "variables": many("{% set a@ = 1 %}", 16_000),
    "outputs": many("{{ a@ }}", 32_000),
    "names in scopes": many("{% if a@ %}{% endif %}", 2_000),
    "includes": many("{% set a@ = 1 %}", 1_900) + "{% include 'x' %}" * 1_900,
    "code": "{% for q in z %}"
    + many("{% set a@ = 1 %}", 1_300)
    + "{% include 'x' %}" * 1_400
    + "{% endfor %}",
    "branches in branches": "{% if a %}" * 90 + "{{ a }}" * 4_000 + "{% endif %}" * 90,
    "deep": "{% if a %}" * 3_000 + "{% endif %}" * 3_000,
    "parentheses": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "terms": "{{ " + "+".join(["x"] * 11_000) + " }}",
    "digits": "{{ " + "9" * 500_000 + " }}",
    "evaluated": "{% autoescape 'a' is string %}{% endautoescape %}",
}


@pytest.mark.parametrize("source", INTRICATE.values(), ids=INTRICATE)
def test_what_would_take_long_to_compile_is_refused_soon(source: str) -> None:
    began = time.process_time()
    with pytest.raises(TemplateError, match="does not compile"):
        ChatTemplate(source)
    assert time.process_time() - began < 3.0


COMPILED = {
    "outputs": many("{{ a@ }}", 5_000),
    "branches": many("{% if a@ %}{% elif b %}{% else %}{% endif %}", 900),
    "elifs": "{% if a %}" + many("{% elif a == '@' %}{{ b }}", 1_000) + "{% endif %}",
    "nested": "{% for a in b %}" * 12 + many("{{ a@ }}", 3_000) + "{% endfor %}" * 12,
    "text": "words " * 87_000,
    "widths": "{{ 'a'|center(999999999) }}{{ '%0999999999d' % 1 }}{{ 9 ** 9 ** 9 ** 9 }}",
}


@pytest.mark.parametrize("source", COMPILED.values(), ids=COMPILED)
def test_far_longer_templates_than_published_ones_compile_soon(source: str) -> None:
    began = time.process_time()
    ChatTemplate(source)
    assert time.process_time() - began < 3.0


def test_a_slow_machine_refuses_no_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling has no clock: the verdict would be kept."""
    monkeypatch.setattr(time, "monotonic", iter(range(0, 10**9, 10**4)).__next__)
    monkeypatch.setattr(time, "thread_time", iter(range(0, 10**9, 10**4)).__next__)
    assert ChatTemplate("{% for m in messages %}{{ 'a' ~ m }}{% endfor %}") is not None


LARGE = {
    "%": "{{ '%0999999999d' % 1 }}",
    "% of many": "{{ ('%s' * 9999) % ('a' * 9999) }}",
    "% of names": "{{ ('%(a)s' * 4000) % {'a': 'a' * 4000} }}",
    "format": "{{ '{:>999999999}'.format(1) }}",
    "format of format": "{{ '{:{w}}'.format(1, w=999999999) }}",
    "format many": "{{ ('{0}' * 4000).format('a' * 4000) }}",
    "format_map": "{{ ('{a}' * 4000).format_map({'a': 'a' * 4000}) }}",
    "format filter": "{{ '%*d'|format(999999999, 1) }}",
    "center": "{{ 'a'|center(width=999999999) }}",
    "ljust": "{{ 'a'.ljust(999999999) }}",
    "zfill": "{{ 'a'.zfill(2000000000) }}",
    "replace": "{{ ('a' * 4000)|replace('', 'b' * 4000) }}",
    "replace method": "{{ ('a' * 4000).replace('', 'b' * 4000) }}",
    "join": "{{ range(9999)|map('string')|join('a' * 9999) }}",
    "join method": "{{ ('a' * 9999).join(['b'] * 9999) }}",
    "join attribute": "{{ ([{'a': 'b' * 9999}] * 9999)|join(attribute='a') }}",
    "indent": "{{ ('\\n' * 9999)|indent(9999) }}",
    "indent text": "{{ ('\\n' * 9999)|indent('a' * 9999) }}",
    "batch": "{{ range(3)|batch(999999999, 'x')|list }}",
    "slice": "{{ range(3)|slice(99999999)|list }}",
    "tojson": "{{ messages|tojson(indent=999999999) }}",
    "sum": "{{ ([[1] * 9999] * 9999)|sum(start=[]) }}",
    "sum attribute": "{{ ([{'a': [1] * 9999}] * 9999)|sum('a', []) }}",
    "splitlines": "{{ ('\\n' * 1000000).splitlines() }}",
    "list": "{{ ('a' * 1000000)|list }}",
    "slow filter": "{{ ('<!---->' * 99999)|striptags }}",
    "int": "{{ ('f' * 999999)|int(base=16) }}",
    "numbers": "{% set n = namespace(x=3) %}"
    "{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "macro": "{% macro m(x) %}" + "{{ x }}" * 99 + "{% endmacro %}{{ m('a' * 99999)|length }}",
    "block": "{% set x %}{% for i in range(99999) %}" + "x" * 999 + "{% endfor %}{% endset %}",
    "slices": "{% set t = 'a' * 999999 %}{% set n = namespace(x=[]) %}"
    "{% for i in range(999) %}{% set n.x = [n.x, t[i:]] %}{% endfor %}",
    "separators": "{{ range(9999)|list|tojson(separators=('a' * 9999, 'b')) }}",
    "width in a list": "{{ '{:{w[0]}}'.format(1, w=[999999999]) }}",
    "precision": "{{ (10 ** 999)|round(-99999999) }}",
    "attribute": "{{ messages|sort(attribute='role,' * 99999)|list }}",
    "kept": "{% set n = namespace(x=[]) %}"
    "{% for i in range(999) %}{% set n.x = [n.x, 'a' * 999999] %}{% endfor %}",
    **{
        f"shared {name}": SHARED + use
        for name, use in {
            "printed": "{{ n.x }}",
            "joined": "{{ n.x ~ '' }}",
            "string": "{{ n.x|string }}",
            "trim": "{{ n.x|trim }}",
            "tojson": "{{ n.x|tojson }}",
            "formatted": "{{ '%s' % (n.x,) }}{{ '{}'.format(n.x) }}",
            "compared": "{{ n.x == n.y }}",
            "sought": "{{ n.x in [n.y] }}",
            "tested": "{{ [n.x]|select('eq', n.y)|list }}",
            "sorted": "{{ [n.x, n.y]|sort }}",
            "unique": "{{ [n.x, n.y]|unique|list }}",
            "key": "{{ {n.x: 1} }}",
            "looked up": "{{ messages[0][n.x] }}",
            "raised": "{{ raise_exception(n.x) }}",
            "index": "{{ [n.x].index(n.y) }}",
        }.items()
    },
}


@pytest.mark.parametrize("source", LARGE.values(), ids=LARGE)
def test_no_operation_makes_more_than_may_be_printed(source: str) -> None:
    template = ChatTemplate(source, max_characters=MOST, max_seconds=60.0)  # size alone stops it
    began = time.process_time()
    with pytest.raises(TemplateError, match=f"more than {MOST} characters"):
        template.render([USER])
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize("name", ["encode('utf-32')", "translate({97: 'b'})", "expandtabs(99)"])
def test_methods_that_no_template_needs(name: str) -> None:
    with pytest.raises(TemplateError, match="unsafe"):
        ChatTemplate("{{ 'a'." + name + " }}").render([USER])


def test_what_templates_do_every_day_is_within_the_bounds() -> None:
    """Long conversations, accumulated lists, comparisons in loops."""
    source = (
        "{% set n = namespace(seen=[], text='') %}{% for m in messages %}"
        "{% if m not in n.seen and m.role in ['user', 'assistant'] %}"
        "{% set n.seen = n.seen + [m.role] %}{% set n.text = n.text ~ m.content|trim %}{% endif %}"
        "{{ '%s: %d' % (m.role, loop.index) }}{{ m|tojson(indent=2) }}"
        "{{ m.content.split('\\n')|join(', ')|replace('a', 'bb')|indent(4) }}{% endfor %}"
        "{{ n.text|length }}{{ n.seen|unique|list|length }}{{ [1, 2, 3]|sum }}"
    )
    talk = [{"role": "user", "content": f"line {n}\nmore"} for n in range(300)]
    began = time.process_time()
    assert ChatTemplate(source).render(talk).endswith("16")
    assert time.process_time() - began < 4.0


def test_hostile_templates_stay_within_a_gibibyte() -> None:
    """With the usual bounds, in a process that has no more."""
    script = (
        "import resource\n"
        "from pilotfish.engines.chat import ChatTemplate\n"
        "from pilotfish.engines.engine_errors import TemplateError\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "for source in ['{{ messages|tojson(indent=999999999) }}', \"{{ 'a'.zfill(2**31) }}\",\n"
        "    \"{{ range(99999)|map('string')|join('a' * 9999) }}\",\n"
        '    "{{ ([[1] * 99999] * 9999)|sum(start=[]) }}"]:\n'
        "    try:\n"
        "        ChatTemplate(source).render([{'role': 'user', 'content': ''}])\n"
        "    except TemplateError as error:\n"
        "        assert 'characters' in str(error), error\n"
        "        print('refused')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.split(), done.stderr) == (["refused"] * 4, "")
