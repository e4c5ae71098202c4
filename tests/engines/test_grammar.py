"""Constraints allow what their grammar does, token by token, and bound what a grammar costs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pilotfish.engines.compiling import compile_grammar, on_deep_stack
from pilotfish.engines.engine_errors import GrammarError
from pilotfish.engines.grammar import GrammarConstraint, Grammars
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.speculation.logits_options import Grammar
from tests.support.bridged import vocabulary
from tests.support.examples import examples
from tests.support.vocabularies import sentencepiece

TOKENS = ["a", "b", "ab", "ba", "c"]
END = len(TOKENS)
REGEX = "(ab|c)?a{1,3}b?c?"
LONGEST = 7


@pytest.fixture(scope="module")
def small() -> Grammars:
    return vocabulary(TOKENS, "<end>").grammars


@pytest.fixture(scope="module")
def english(default_artifacts: Any) -> Vocabulary:
    from pilotfish.engines.artifact import Artifact

    return Vocabulary.from_artifact(Artifact.open(default_artifacts.target))


def language() -> set[str]:
    """All texts that match."""
    letters = "".join(sorted({letter for token in TOKENS for letter in token}))
    return {
        text
        for size in range(LONGEST + 1)
        for text in map("".join, product(letters, repeat=size))
        if re.fullmatch(REGEX, text)
    }


LANGUAGE = language()
BEGINNINGS = {text[:end] for text in LANGUAGE for end in range(len(text) + 1)}


def may_follow(message: str) -> set[int]:
    """The tokens that may follow a text, by brute force."""
    result = {at for at, token in enumerate(TOKENS) if message + token in BEGINNINGS}
    return result | ({END} if message in LANGUAGE else set())


def allowed(constraint: GrammarConstraint, answer: list[int], *paths: list[int]) -> list[set[int]]:
    logits = np.zeros((len(paths), END + 1), np.float32)
    constraint.forbid(logits, np.array(answer, np.uint32), paths)
    return [set(np.flatnonzero(np.isfinite(row)).tolist()) for row in logits]


@given(st.lists(st.lists(st.integers(0, END - 1), max_size=5), min_size=1, max_size=5), st.data())
@examples(200)
def test_each_row_allows_what_continues_its_own_path(
    small: Grammars, paths: list[list[int]], data: st.DataObject
) -> None:
    constraint = small.constraint(Grammar("regex", REGEX))
    for _ in range(3):  # rows may be asked for in any order, and answers be taken back
        answer = data.draw(st.lists(st.integers(0, END - 1), max_size=3))
        if "".join(TOKENS[token] for token in answer) not in BEGINNINGS:
            with pytest.raises(GrammarError, match="so far does not follow the grammar"):
                allowed(constraint, answer, *paths)
            continue
        for path, result in zip(paths, allowed(constraint, answer, *paths), strict=True):
            reply = "".join(TOKENS[token] for token in [*answer, *path])
            every = set(range(END + 1))
            assert result == (may_follow(reply) if reply in BEGINNINGS else every)


def test_what_is_complete_ends_and_what_follows_the_end_is_left_alone(small: Grammars) -> None:
    constraint = small.constraint(Grammar("regex", "ab"))
    result = allowed(constraint, [], [], [2], [2, END], [2, END, 0], [4])
    every = set(range(END + 1))
    assert result == [{2}, {END}, every, every, every]  # forced: in its own tokens


def test_forced_text_stops_where_tokens_may_be_longer(english: Vocabulary) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "integer"}}, "required": ["name"]}
    grammar = Grammar("json", json.dumps({**schema, "additionalProperties": False}))
    constraint, tokenizer = english.grammars.constraint(grammar), english.tokenizer
    none = np.empty(0, np.uint32)
    forced = constraint.forced(none, [])
    assert tokenizer.decode(forced) == '{"name":'
    assert forced == tokenizer.encode('{"name": 1')[: len(forced)]
    assert constraint.forced(none, [*forced, *tokenizer.encode(" 1")]) == []
    assert constraint.forced(none, tokenizer.encode("not valid JSON")) == []


SCHEMAS: list[tuple[dict[str, Any], str]] = [
    ({"type": "object"}, '{"a": [1, null, "x y"]}'),
    ({"enum": ["left", "right"]}, '"right"'),
    ({"type": "string", "pattern": "^[0-9]{3}$"}, '"123"'),
    ({"type": "array", "items": {"type": "integer", "minimum": 3}, "minItems": 2}, "[3, 99]"),
    ({"oneOf": [{"type": "null"}, {"type": "number"}]}, "-1.5e3"),
    ({"type": "string", "format": "nanoid", "title": "T"}, '"no such format"'),
    ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {
        "next": {"$ref": "#/$defs/n"}}, "additionalProperties": False}}}, '{"next": {"next": {}}}'),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "text"), SCHEMAS, ids=lambda value: str(value)[:20])
def test_a_text_of_the_schema_is_allowed_and_may_end(
    english: Vocabulary, schema: dict[str, Any], text: str
) -> None:
    tokenizer = english.tokenizer
    ids = tokenizer.encode(text)
    constraint = english.grammars.constraint(Grammar("json", json.dumps(schema)))
    logits = np.zeros((len(ids) + 1, english.vocab_size), np.float32)
    none = np.empty(0, np.uint32)
    constraint.forbid(logits, none, [ids[:at] for at in range(len(ids) + 1)])
    assert np.isfinite(logits[np.arange(len(ids)), ids]).all()
    (end,) = english.eos_ids
    assert np.isfinite(logits[-1, end])
    assert not np.isfinite(logits[0, end])
    special = [id for id in range(english.vocab_size) if tokenizer.is_special(id) and id != end]
    assert not np.isfinite(logits[:, special]).any()


@pytest.mark.parametrize(
    ("kind", "text", "word"),
    [
        ("json", "{", "not valid JSON"),
        ("json", '{"type": "strange"}', "cannot be used"),
        ("json", '{"$ref": "#/nowhere"}', "cannot be used"),
        ("json", '{"allOf": [{"type": "string"}, {"type": "number"}]}', "cannot be used"),
        ("regex", "(", "cannot be used"),
        ("lark", "start: nothing", "cannot be used"),
        ("prose", "", "is not known"),
    ],
)
def test_what_is_no_grammar_says_so(small: Grammars, kind: str, text: str, word: str) -> None:
    with pytest.raises(GrammarError, match=word) as refused:
        small.constraint(Grammar(kind, text))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_a_vocabulary_that_cannot_say_it(small: Grammars) -> None:
    constraint = small.constraint(Grammar("regex", "[ab]*z"))
    with pytest.raises(GrammarError, match="No token"):
        allowed(small.constraint(Grammar("regex", "z")), [], [])
    assert allowed(constraint, [], [0]) == [{0, 1, 2, 3}]


def test_a_draft_that_leads_astray_harms_no_row_but_its_own(small: Grammars) -> None:
    constraint = small.constraint(Grammar("regex", "az|b+"))
    none, every = np.empty(0, np.uint32), set(range(END + 1))
    logits = np.zeros((4, END + 1), np.float32)
    assert constraint.forbid(logits, none, [[], [0], [1], [1, 1]]) == [1]
    result = [set(np.flatnonzero(np.isfinite(row)).tolist()) for row in logits]
    assert result == [{0, 1}, every, {1, END}, {1, END}]
    with pytest.raises(GrammarError, match="No token"):
        allowed(constraint, [0], [])


HOSTILE = {
    "counted": Grammar("regex", "(([a-z]{1,100}){1,100}){1,100}x"),
    "powers": Grammar("regex", "(a|b)*a(a|b){2000}"),
    "unicode": Grammar("regex", r"(\p{L}{1,500}\p{N}){1,500}"),
    "ambiguous": Grammar("lark", 'start: s\ns: s s | "a" | s s s |'),
    "patterns": Grammar("json", json.dumps({"anyOf": [
        {"type": "string", "pattern": f"^(a|b)*a(a|b){{{20 + i}}}$"} for i in range(200)]})),
    "words": Grammar("json", json.dumps({"enum": [f"{i:x}" * 5 for i in range(4000)]})),
    "nested": Grammar("json", '{"type": "array", "items": ' * 200 + "{}" + "}" * 200),
    "recursive": Grammar("json", json.dumps({"$ref": "#/$defs/n", "$defs": {"n": {
        "type": "object",
        "properties": {f"c{i}": {"$ref": "#/$defs/n"} for i in range(500)}}}})),
    "long": Grammar("json", '{"type": "string", "minLength": 1000000}'),
    "many": Grammar("json", '{"type": "array", "minItems": 100000, "items": {"multipleOf": 97}}'),
    "divisible": Grammar("json", '{"type": "integer", "multipleOf": 9973}'),
    "by more": Grammar("json", '{"type": "integer", "multipleOf": 99999989}'),
    "by several": Grammar("json", json.dumps({"anyOf": [
        {"type": "integer", "multipleOf": n} for n in range(900, 1000)]})),
    "by all": Grammar("json", json.dumps({"allOf": [{"multipleOf": n} for n in (89, 83, 97)]})),
    "by fractions": Grammar("json", '{"type": "number", "multipleOf": 0.99999989}'),
    "all patterns": Grammar("json", json.dumps({"type": "string", "allOf": [
        {"pattern": f"a.{{{5 + i}}}b"} for i in range(25)]})),
    "all terminals": Grammar("lark", "start: A\nA: " + " & ".join(
        f"/(.*a.{{{5 + i}}})*/" for i in range(20))),
    "stars": Grammar("lark", "start: X0\n" + "".join(
        f"X{i}: X{i + 1}*\n" for i in range(3000)) + 'X3000: "a"'),
    "powers of forced": Grammar("regex", "(a{1000}){1000}"),
    "by true": Grammar("json", '{"type": "integer", "multipleOf": true}'),
    "by nothing": Grammar("json", json.dumps({
        "properties": {"a": {"type": "integer", "multipleOf": 999983}},
        "examples": [{"multipleOf": 0}]})),
    "by hugely much": Grammar("json", '{"type": "integer", "multipleOf": 1' + "0" * 400 + "}"),
    "rules": Grammar("lark", "start: r0\n" + "".join(
        f"r{i}: r{i + 1}\n" for i in range(4500)) + 'r4500: "a"'),
    "terminals": Grammar("lark", "start: A0\n" + "".join(
        f'A{i}: "a" A{i + 1}\n' for i in range(4000)) + 'A4000: "a"'),
    "definitions": Grammar("json", json.dumps({"$ref": "#/$defs/d0", "$defs": {
        **{f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1500)},
        "d1500": {}}})),
    "all of": Grammar("json", json.dumps({"$ref": "#/$defs/d0", "$defs": {
        **{f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(1400)},
        "d1400": {"type": "null"}}})),
    "forced": Grammar("regex", "a{60000}"),
    "forced later": Grammar("regex", "[bc]a{60000}"),
    "spelt": Grammar("regex", '"' + "ab" * 30000 + '"'),
    "too long": Grammar("regex", "a" * 70_000),
    "ignored": Grammar("lark", 'start: "true" " " x\n%ignore / /\nx: "null"*'),
    "rolled back": Grammar("lark", 'start: x\nx[max_tokens=3]: /.*/'),
    "embedded": Grammar("lark", 'start: A\nA: %regex {"multiple_of": 99999989}'),
    "either": Grammar("lark", "start: " + " | ".join(f"/a{{{i}}}.*b{{{i}}}/" for i in range(400))),
}  # fmt: skip


def test_what_is_costly_ends_the_answer(english: Vocabulary) -> None:
    constraint = english.grammars.constraint(HOSTILE["forced later"])
    values = np.array(english.tokenizer.encode("b"), np.uint32)
    begun_s, refused = time.thread_time(), False
    for _ in range(100):
        logits = np.zeros((64, english.vocab_size), np.float32)
        try:
            ids = constraint.forced(values, [])[:63]
            constraint.forbid(logits, values, [ids[:at] for at in range(64)])
        except GrammarError as error:
            refused = "too much CPU time" in str(error)
            break
    assert refused
    assert time.thread_time() - begun_s < 0.4


@pytest.mark.timing
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_costs_little(english: Vocabulary, name: str) -> None:
    """To compile, and for 200 tokens drawn at random of those that it allows."""
    english.grammars.warm()
    begun_s = time.monotonic()
    try:
        constraint = english.grammars.constraint(HOSTILE[name])
    except GrammarError:
        assert time.monotonic() - begun_s < 0.6
        return
    assert time.monotonic() - begun_s < 0.6
    rng, answer = np.random.default_rng(0), np.empty(0, np.uint32)
    rows_s = []
    for _ in range(200):
        logits = np.zeros((1, english.vocab_size), np.float32)
        begun_s = time.thread_time()
        try:
            constraint.forbid(logits, answer, [[]])
        except GrammarError:
            break
        finally:
            rows_s.append(time.thread_time() - begun_s)
        token = rng.choice(np.flatnonzero(np.isfinite(logits[0])))
        if token in english.eos_ids:
            break
        answer = np.append(answer, np.uint32(token))
    assert max(rows_s) < 0.3
    assert sum(rows_s) < 0.4 + 2e-3 * len(rows_s)


def test_one_answer_spoils_no_other(english: Vocabulary) -> None:
    """Parsers share nothing: not the states that one of them has run out of."""
    rng, none = np.random.default_rng(0), np.empty(0, np.uint32)

    def row(constraint: GrammarConstraint, answer: NDArray[np.uint32]) -> NDArray[np.float32]:
        logits = np.zeros((1, english.vocab_size), np.float32)
        constraint.forbid(logits, answer, [[]])
        return logits[0]

    spent, other = (english.grammars.constraint(HOSTILE["counted"]) for _ in range(2))
    answer, wanted = none, row(other, none)
    with pytest.raises(GrammarError, match="too complex"):  # noqa: PT012  # which of the tokens raises is random
        while len(answer) < 200:
            token = rng.choice(np.flatnonzero(np.isfinite(row(spent, answer))))
            answer = np.append(answer, np.uint32(token))
    later = english.grammars.constraint(HOSTILE["counted"])
    for constraint in (other, later):
        np.testing.assert_array_equal(row(constraint, none), wanted)


@pytest.mark.parametrize(
    "text", ['start: "a" <[2]> "b"', "start: <|im_end|>", 'start: A\nA: "a" <[*]>']
)
def test_control_tokens_are_no_text(small: Grammars, text: str) -> None:
    with pytest.raises(GrammarError, match="must not contain <"):
        small.constraint(Grammar("lark", text))


@pytest.mark.parametrize(
    "grammar",
    [Grammar("regex", "the model of the"), Grammar("regex", " the model of the"),
     Grammar.from_schema({"const": {"the": ["left", "right"]}}),
     Grammar.from_choices([" yes", "no"])],
)  # fmt: skip
def test_a_vocabulary_that_puts_spaces_before_texts(grammar: Grammar) -> None:
    """What is forced is in the middle of a text, wherever it is."""
    tokenizer = sentencepiece()
    size = tokenizer.vocab_size
    constraint, reply = Grammars(tokenizer, size, [2]).constraint(grammar), []
    while len(reply) < 60:
        logits = np.zeros((1, size), np.float32)
        constraint.forbid(logits, np.array(reply, np.uint32), [[]])
        token = int(np.isfinite(logits[0]).nonzero()[0][-1])
        if token == 2:
            break
        reply.append(token)
    text = b"".join(map(tokenizer.token_bytes, reply)).decode()
    wanted = {"json": '{"the": ["left", "right"]}', "regex": grammar.text}
    assert text in (wanted.get(grammar.kind), " yes", "no")


def test_threads_may_compile_at_once(small: Grammars) -> None:
    results = []

    def compile_one(at: int) -> None:
        constraint = small.constraint(Grammar("regex", f"a{{{1 + at % 3}}}"))
        results.append(allowed(constraint, [], [], [0] * (1 + at % 3)))

    threads = [threading.Thread(target=compile_one, args=(at,)) for at in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[{0}, {END}]] * 12


def test_an_endless_trial_ends_with_its_parent_or_by_itself() -> None:
    """Whatever becomes of the process that asked."""
    endless = HOSTILE["all patterns"]
    code = (
        "import os, sys, threading, time\n"
        "from pilotfish.engines.grammar_trial import TRIAL\n"
        "from pilotfish.speculation.logits_options import Grammar\n"
        "TRIAL.start()\n"
        "print(TRIAL._process.pid, flush=True)\n"
        "threading.Timer(0.1, os.kill, (os.getpid(), 9)).start()\n"
        f"TRIAL.attempt(Grammar(*{tuple(endless)!r}))\n"
    )
    asking = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert asking.returncode == -9
    trial, end_s = int(asking.stdout), time.monotonic() + 15.0
    while Path(f"/proc/{trial}/stat").exists() and time.monotonic() < end_s:
        state = Path(f"/proc/{trial}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":
            break
        time.sleep(0.1)
    else:
        assert not Path(f"/proc/{trial}/stat").exists()


def test_dead_ends_of_drafts_compile_nothing_anew(small: Grammars) -> None:
    """A window of many of them stalled an edge for seconds."""
    made = []

    def parser() -> Any:
        made.append(
            compile_grammar(Grammar("lark", 'start: A | "ab" "c"\nA: /[ab]x/'), small._load())
        )
        return made[-1], 0.0

    constraint = GrammarConstraint(parser, END + 1, [END])
    for _ in range(20):
        rows = np.zeros((5, END + 1), np.float32)
        paths = [[], [0], [1], [2], [1]]
        assert constraint.forbid(rows, np.empty(0, np.uint32), paths) == [2, 4]
        assert allowed(constraint, [], [], [2]) == [{0, 1, 2}, {4}]
    assert len(made) == 1


def test_drafts_that_lead_a_parser_astray_compile_nothing_costly_anew(small: Grammars) -> None:
    """Where others wait for the mask: a spare parser takes the place, and then the answer ends."""
    most = 550  # four items of a parser's row for each, and a row has 2,000 at most
    rules = "".join(
        "".join(f'{name}{at}: {name}{at + 1} | "b"\n' for at in range(most))
        + f'{name}{most}: "a"\n'
        for name in "rq"
    )
    grammar = Grammar("lark", 'start: "b" | "c" w\nw: r0 | q0\n' + rules)
    made = []

    def parser() -> Any:
        made.append(on_deep_stack(partial(compile_grammar, grammar, small._load()))[0])
        return made[-1], 1.0  # costly, however fast this machine is

    constraint = GrammarConstraint(parser, END + 1, [END])
    constraint.add_spare()
    constraint._budget_s = float("inf")  # else a slow machine's rows would spend it first
    none, c = np.empty(0, np.uint32), TOKENS.index("c")
    for outcome in (
        nullcontext(),
        pytest.raises(GrammarError, match="drafts make its parser fail"),
    ):
        rows = np.zeros((2, END + 1), np.float32)
        with outcome:
            assert constraint.forbid(rows, none, [[], [c]]) == [1]
    assert len(made) == 2  # both before the first row
