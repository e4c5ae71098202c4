"""Prompts: what files may hold, and which prompts are kept out."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.base.errors import UnsupportedError
from pilotfish.lab.distill import prompt_selection as asking
from pilotfish.lab.distill.prompt_selection import UNTRAINED, DistillPrompt


def test_a_text_file_has_a_prompt_a_line_and_its_name_is_their_kind(tmp_path: Path) -> None:
    path = tmp_path / "chats.txt"
    path.write_text("Why?\n\n  How so?  \n")
    assert asking.read_prompts(path) == [
        DistillPrompt("chats", "Why?"),
        DistillPrompt("chats", "How so?"),
    ]


def test_json_lines_have_a_question_a_prompt_or_messages(tmp_path: Path) -> None:
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?", "name": "a"},
        {"role": "assistant", "content": "Because."},
    ]
    lines = [{"question": "1 + 1?", "answer": "2"}, {"prompt": "Hi", "kind": "chat"}]
    path = tmp_path / "made.jsonl"
    path.write_text("\n".join(json.dumps(item) for item in [*lines, {"messages": talk}]))
    first, second, third = asking.read_prompts(path)
    assert (first, second) == (DistillPrompt("made", "1 + 1?"), DistillPrompt("chat", "Hi"))
    # the answer that stands there is left out: the target gives its own
    assert third.content == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?"},
    ]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "cannot be read: it is not UTF-8 text: its byte 0 is 0x89."),
        (b"PK\x03\x04\x00\x00\x00", "is not a text file: it contains bytes of value 0"),
        (b"", "has no prompt"),
        (b"\n  \n", "has no prompt"),
        (b'{"prompt": "a"}\n{"prompt"', "line 2 is not JSON"),
        (b'{"prompt": "a"}\n[1]', "line 2 is not a JSON object"),
        (b'{"text": "a"}', "line 1 has no text for the key 'prompt' or 'question' or 'messages'"),
        (b'{"messages": []}', "line 1 has no valid messages"),
        (b'{"messages": [{"role": "user"}]}', "line 1 has no valid messages"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "line 1 is not valid text"),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}', "line 1 has no valid messages"),
    ],
)
def test_what_is_no_prompt_is_told_in_one_sentence(
    tmp_path: Path, content: bytes, fault: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(UnsupportedError, match=r"^[^\n]*$") as info:
        asking.read_prompts(path)
    assert fault in str(info.value)


def test_built_in_prompts_are_a_few_hundred_of_several_kinds() -> None:
    result = asking.built_in()
    kinds = Counter(item.kind for item in result)
    assert len({item.key for item in result}) == len(result) >= 250
    assert len(kinds) >= 8
    assert min(kinds.values()) >= 25
    assert set(UNTRAINED) < set(kinds)


prompts = st.lists(st.integers(0, 500), min_size=16, max_size=60, unique=True).map(
    lambda numbers: [DistillPrompt("abc"[number % 3], f"prompt {number}") for number in numbers]
)


@given(prompts, st.integers(16, 60), st.sampled_from([0.1, 0.3]))
def test_a_prompt_is_learnt_or_held_out_and_more_prompts_change_no_choice(
    given_: list[DistillPrompt], fewer: int, held: float
) -> None:
    whole = asking.select(given_, [], most_from_files=1000, most_built_in=0, held=held)
    keys = {item.key for item in given_}
    learnt, out = ({item.key for item in ones} for ones in (whole.learnt, whole.held))
    assert learnt | out == keys
    assert not learnt & out
    assert out
    some = given_[:fewer]
    part = asking.select(some, [], most_from_files=1000, most_built_in=0, held=held)
    if len(part.held) > 1:  # a single one may be there because one has to be
        assert {item.key for item in part.held} <= out


def test_of_the_built_in_kinds_two_are_never_learnt() -> None:
    mine = [DistillPrompt("mine", f"prompt {number}") for number in range(30)]
    chosen = asking.select(mine, asking.built_in(), most_from_files=20, most_built_in=40, held=0.2)
    assert not chosen.kinds & set(UNTRAINED)
    assert set(UNTRAINED) <= {item.kind for item in chosen.held}
    assert sum(item.kind == "mine" for item in [*chosen.learnt, *chosen.held]) == 20
    assert len(chosen.kinds) >= 7  # what is mixed in is of all the other kinds


def test_prompts_that_leave_nothing_to_learn_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="no prompt is left for training"):
        asking.select(
            [DistillPrompt("a", "one")], [], most_from_files=10, most_built_in=0, held=0.2
        )


def test_what_is_to_measure_by_is_never_learnt() -> None:
    mine = [DistillPrompt("mine", f"prompt {number}") for number in range(30)]
    apart = [DistillPrompt("exam", item.content) for item in mine[:10]]
    chosen = asking.select(
        mine, [], most_from_files=30, most_built_in=0, held=0.2, measure_only=apart
    )
    assert {item.key for item in apart} <= {item.key for item in chosen.held}
    assert not {item.key for item in apart} & {item.key for item in chosen.learnt}


def test_a_prompt_that_is_given_twice_counts_once() -> None:
    mine = [DistillPrompt("mine", f"prompt {number}") for number in range(30)]
    exam = [DistillPrompt("exam", f"question {number}") for number in range(10)]
    chosen = asking.select(
        [*mine, *mine, *exam], [], most_from_files=30, most_built_in=0, held=0.2, measure_only=exam
    )
    keys = [item.key for item in [*chosen.learnt, *chosen.held]]
    assert sorted(keys) == sorted(item.key for item in [*mine, *exam])
