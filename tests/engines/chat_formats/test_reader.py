"""A turn is read into words, thought and calls, however it comes in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.engines.chat_formats import ChatFormat
from pilotfish.engines.chat_formats.outline import Outline
from pilotfish.engines.chat_formats.reader import Turn, TurnPart, TurnReader
from tests.support.calling import CALLING, allowed, outline
from tests.support.examples import examples

every_family = pytest.mark.parametrize("family", CALLING, ids=lambda family: family.name)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(max_size=4), values, max_size=3)
calls = st.lists(st.tuples(st.sampled_from(["move", "stop"]), arguments), min_size=1, max_size=3)


def parts_of(told: Outline, text: str, cuts: list[int]) -> list[TurnPart]:
    """Read a text that comes in pieces, cut here."""
    numbers = iter(range(1000))
    reader = TurnReader(told, lambda: f"id{next(numbers)}")
    found = []
    begin = 0
    for end in [*sorted(cut % (len(text) + 1) for cut in cuts), len(text)]:
        found += reader.push(text[begin:end])
        begin = end
    return [*found, *reader.end()]


def read(told: Outline, text: str, cuts: list[int]) -> Turn:
    return Turn.from_parts(parts_of(told, text, cuts))


@every_family
@given(calls, st.booleans(), st.booleans(), st.lists(st.integers(0), max_size=12))
@examples(150)
def test_a_turn_is_read_as_it_was_written(
    family: ChatFormat, calls: list[Any], thinks: bool, speaks: bool, cuts: list[int]
) -> None:
    assert family.calls is not None
    calls = calls if family.parallel else calls[:1]
    speaks = speaks and family.calls.anywhere
    begin, end = family.thought
    text = f"{begin}\nhm\n{end}\n\n" if thinks else ""
    text += "I see.\n" if speaks else ""
    turn = read(outline(family), text + family.calls.format(calls), cuts)
    assert [(one.name, json.loads(one.arguments)) for one in turn.calls] == calls
    assert len({one.id for one in turn.calls}) == len(calls)
    assert turn.reasoning == ("hm" if thinks else "")
    assert turn.content == ("I see." if speaks else "")


@every_family
@given(calls, st.integers(0), st.lists(st.integers(0), max_size=12))
@examples(150)
def test_a_turn_that_is_cut_off(
    family: ChatFormat, calls: list[Any], length: int, cuts: list[int]
) -> None:
    assert family.calls is not None
    calls = calls if family.parallel else calls[:1]
    whole = family.calls.format(calls)
    text = whole[: length % (len(whole) + 1)]
    turn = read(outline(family), text, cuts)
    assert turn == read(outline(family), text, [])
    wanted = [(name, json.dumps(told, ensure_ascii=False)) for name, told in calls]
    for (name, told), one in zip(wanted, turn.calls, strict=False):
        assert one.name == name
        assert told.startswith(one.arguments)
    begun = family.calls.trigger in text  # then what is no call yet is left out
    assert turn.content == ("" if begun else text)


@every_family
@given(st.data(), st.lists(st.integers(0), max_size=12))
@examples(300)
def test_words_are_said_as_they_are(
    family: ChatFormat, data: st.DataObject, cuts: list[int]
) -> None:
    assert family.calls is not None
    marks = [family.calls.trigger[:3], family.calls.trigger[:-1], *family.thought, " ", "\n", "a"]
    text = "x" + "".join(data.draw(st.lists(st.sampled_from(marks), max_size=8)))
    text = text.replace(family.calls.trigger, "")
    assert read(outline(family), text, cuts) == Turn(text, "", ())


@every_family
@given(st.data())
@examples(40)
def test_calls_that_are_read_are_those_that_the_grammar_held(
    family: ChatFormat, data: st.DataObject
) -> None:
    assert family.calls is not None
    told = family.calls
    written = told.format([("move", {"to": data.draw(st.sampled_from(["here", "away"]))})])
    marks = [*family.thought, told.trigger, told.trigger[:-1], written, "\n", " ", "x", "{"]
    text = "".join(data.draw(st.lists(st.sampled_from(marks), max_size=5)))
    for special in (False, True):
        if allowed(outline(family), text, special=special):
            turn = read(outline(family), text, [])
            for call in turn.calls:
                assert (call.name, call.arguments) == ("move", '{"to": "here"}')
            inside = text.count(written) - turn.reasoning.count(written)
            assert len(turn.calls) == inside - turn.content.count(written)


@every_family
@given(st.data(), st.lists(st.integers(0), max_size=12))
@examples(300)
def test_nonsense_is_read_alike_in_any_pieces(
    family: ChatFormat, data: st.DataObject, cuts: list[int]
) -> None:
    assert family.calls is not None
    told = family.calls
    marks = [told.trigger, told.opening, told.before, told.behind, told.end, told.between,
             told.closing, *family.thought, "move", "{", "}", '"', "\\", " ", "a"]  # fmt: skip
    text = "".join(data.draw(st.lists(st.sampled_from(marks), max_size=12)))
    assert read(outline(family), text, cuts) == read(outline(family), text, [])


def test_a_thought_that_the_prompt_began() -> None:
    (hermes,) = (family for family in CALLING if family.name == "hermes")
    told = outline(hermes, thinking=True)
    assert read(told, "so\n</think>\n\nyes", [1, 5]) == Turn("yes", "so", ())
    assert read(told, "so", []) == Turn("", "so", ())


def test_any_text_is_words() -> None:
    assert read(Outline(), " <think>\n", [2]) == Turn(" <think>\n", "", ())
