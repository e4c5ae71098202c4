"""Mining: which mismatches are critical, which stall, and along which answer it goes on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pilotfish.bridge import Pair
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.lab.judge.episodes import Episode
from pilotfish.lab.judge.mining import SLACK, episode
from pilotfish.lab.judge.model_passes import DRAFTER, TARGET, ReadRequest, ReadResult
from pilotfish.lab.judge.question_reader import QuestionReader
from pilotfish.lab.judge.tasks import Question, Task
from tests.support.tiny import tiny_artifact

LETTERS = "abcdefgh"
END = "<x>"
MOST = 12
WIDTH = 4


class LastLetter(Task):
    """What an answer comes to is the letter that it ends with."""

    name = "last"

    def outcome(self, question: Question, text: str) -> str:
        return text.strip()[-1:]


class Script:
    """Models that know some texts by heart, earlier ones better: they go on as the first that fits.

    Where none does, they end. Their state tells which model it was and how much it has read; like a
    real model's, what it says is overwritten by what it says next. lacks: letters that the drafter
    neither says nor reads.
    """

    def __init__(
        self, folder: Path, target: list[str], drafter: list[str], lacks: str = ""
    ) -> None:
        letters = [letter for letter in LETTERS if letter not in lacks]
        vocabularies = [
            Vocabulary.from_artifact(tiny_artifact(folder / name, tokens=tokens, eos=END))
            for name, tokens in (("drafter", letters), ("target", [*LETTERS]))
        ]
        self.pair = Pair(*vocabularies)
        assert self.pair.trivial == (not lacks)
        self._known = {DRAFTER: (vocabularies[0], drafter), TARGET: (vocabularies[1], target)}
        self._buffers = {
            name: ReadResult(np.empty((16, letter.vocab_size), "f4"), np.empty((16, WIDTH), "f4"))
            for name, (letter, _) in self._known.items()
        }
        self.read = 0  # tokens of the target's

    def mine(
        self, slack: int | None = SLACK, *, reference: str = "d", right_only: bool = False
    ) -> Episode:
        question = Question("q", "a", reference)
        speaker = QuestionReader(question, self.pair, MOST)
        steps = episode(speaker, LastLetter(), slack, right_only=right_only)
        try:
            look = next(steps)
            while True:
                prompt = speaker.prompt
                look = steps.send(
                    self._sight(
                        look, len(prompt.draft_ids if look.model == DRAFTER else prompt.ids)
                    )
                )
        except StopIteration as end:
            value: Episode = end.value
            return value

    def _sight(self, look: ReadRequest, prompt: int) -> ReadResult:
        vocabulary, texts = self._known[look.model]
        logits, hidden = (rows[: look.rows] for rows in self._buffers[look.model])
        logits[:] = hidden[:] = 0.0
        for row, end in enumerate(range(len(look.ids) - look.rows + 1, len(look.ids) + 1)):
            decoded = vocabulary.tokenizer.decode(look.ids[prompt:end].tolist())
            known = (text for text in texts if text.startswith(decoded))
            ahead = next(known, decoded)[len(decoded) : len(decoded) + 1]
            token = vocabulary.tokenizer.encode(ahead)[0] if ahead else vocabulary.eos_ids[0]
            logits[row, token] = 1.0
            hidden[row, :2] = look.model == DRAFTER, end - prompt
        self.read += look.rows if look.model == TARGET else 0
        return ReadResult(logits, hidden)

    def letters(self, results: Episode) -> list[tuple[int, str, str, bool, bool]]:
        """(at, drafted, wanted, critical, stalling) of each mismatch; an end is ""."""
        rows = zip(results.at, results.tokens, results.critical, results.stalling, strict=True)
        return [
            (int(at), *map(self._letter, tokens), bool(critical), bool(stalling))
            for at, tokens, critical, stalling in rows
        ]

    def _letter(self, token: int) -> str:
        target = self.pair.target
        return "" if token in target.eos_ids else target.tokenizer.decode([int(token)])


# target's texts, drafter's texts, slack -> mismatches
CASES = {
    "none": (["abcd"], ["abcd"], SLACK, []),
    "harmless, and the new answer is gone on with": (
        ["abcd", "aecd", "aefd"],
        ["aefd"],
        SLACK,
        [(1, "e", "b", False, False), (2, "f", "c", False, False)],
    ),
    "critical, and the target's token is put back": (
        ["abcd", "aecf"],
        ["aecf", "abed"],
        SLACK,
        [(1, "e", "b", True, False), (2, "e", "c", True, False), (3, "", "d", True, False)],
    ),
    "an answer cut short": (["abdcd"], ["ab", "abdcd"], SLACK, [(2, "", "d", True, False)]),
    "an answer cut short that comes to the same": (
        ["abdcd", "abd"],
        ["abd"],
        SLACK,
        [(3, "", "c", False, False)],
    ),
    "put off, and the drafter errs again": (
        ["abd", "aebd", "aeebd"],
        ["aeee", "abd"],
        SLACK,
        [(1, "e", "b", False, True)],
    ),
    "put off, whatever it would change": (
        ["abd", "aebf"],
        ["aeee", "abd"],
        SLACK,
        [(1, "e", "b", False, True)],
    ),
    "an end that is lost": (
        ["abcdabcdabd", "abcdabcdaeddd"],
        ["abcdabcdaeddd", "abcdabcdabd"],
        SLACK,
        [(9, "e", "b", False, True)],
    ),
    "put off once": (["abd", "aebd"], ["aebd"], SLACK, [(1, "e", "b", False, False)]),
    "the end put off": (["abd", "abdd"], ["abdd"], SLACK, [(3, "d", "", False, True)]),
    "longer than slack": (["abd", "aecccd"], ["aecccd", "abd"], 2, [(1, "e", "b", False, True)]),
    "as long as slack": (["abd", "aecccd"], ["aecccd"], 3, [(1, "e", "b", False, False)]),
    "outcome only: put off": (
        ["abd", "aebd", "aeebd", "aeeebd"],
        ["aeed", "aeeebd"],
        None,
        [
            (1, "e", "b", False, False),
            (2, "e", "b", False, False),
            (3, "d", "b", False, False),
        ],
    ),
    "outcome only: the end put off": (["ad", "add"], ["add"], None, [(2, "d", "", False, False)]),
    "outcome only: the end put off, and another comes": (
        ["ad", "adf"],
        ["adf"],
        None,
        [(2, "f", "", True, False)],
    ),
    "outcome only: longer": (["abd", "aecccccccd"], ["aecccccccd"], None, [(1, "e", "b", 0, 0)]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_critical_and_what_stalls(case: str, tmp_path: Path) -> None:
    target, drafter, slack, expected = CASES[case]
    script = Script(tmp_path, target, drafter)
    result = script.mine(slack)
    assert script.letters(result) == expected
    assert (result.outcome, result.right) == ("d", True)
    assert len(result.answer) == len(target[0]) + 1


def test_the_states_are_those_at_the_drafted_token(tmp_path: Path) -> None:
    result = Script(tmp_path, ["abcdd", "aecdd", "aecfd"], ["aecfd"]).mine()
    assert result.at.tolist() == [1, 3]
    assert result.drafter[:, :2].tolist() == [[1, 2], [1, 4]]
    assert result.target[:, :2].tolist() == [[0, 2], [0, 4]]


def test_a_drafter_that_lacks_a_token_errs_there_and_goes_on(tmp_path: Path) -> None:
    script = Script(tmp_path, ["abgcd", "abcf"], ["abcd"], lacks="g")
    assert script.letters(script.mine()) == [(2, "c", "g", True, False)]


def test_an_answer_of_nothing_but_an_end(tmp_path: Path) -> None:
    script = Script(tmp_path, [""], ["dd"])
    result = script.mine(reference="")
    assert script.letters(result) == [(0, "d", "", False, True)]
    assert (result.outcome, result.right, len(result.answer)) == ("", False, 1)


def test_an_answer_that_does_not_end_has_as_many_tokens_as_there_may_be(tmp_path: Path) -> None:
    """So one that would go on for ever is not longer than one that does, too."""
    long = "d" * 20
    result = Script(tmp_path, [f"ab{long}", f"ae{long}"], [f"ae{long}"]).mine(0)
    assert len(result.answer) == MOST
    assert result.stalling.tolist() == [False]
    script = Script(tmp_path / "again", [f"ab{long}", f"ae{long}"], [f"ae{long}"])
    assert len(script.mine(right_only=True)) == 0  # what such an answer comes to is chance


def test_what_stalls_plainly_is_not_read_to_its_end(tmp_path: Path) -> None:
    texts = ["abcdd", "aebcdd", "aeebcdd"]
    script = Script(tmp_path, texts, ["aeee", "abcdd"])
    script.mine()
    # the answer with its end; then "a" again, for its logits, and a look behind "e"
    assert script.read == len("abcdd") + 1 + 1 + 1


def test_from_wrong_answers_nothing_is_taken_on_demand(tmp_path: Path) -> None:
    script = Script(tmp_path, ["abcd", "aecd"], ["aecd"])
    assert len(script.mine(reference="d", right_only=True)) == 1
    assert len(script.mine(reference="e")) == 1
    script.read = 0
    result = script.mine(reference="e", right_only=True)
    assert (len(result), result.right, result.outcome) == (0, False, "d")
    assert script.read == len(result.answer) == 5
