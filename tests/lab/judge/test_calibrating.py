"""Choosing what is key: the budget holds, nothing better is overlooked, the edge does as told."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import RelaxationError, UnsupportedError
from pilotfish.cli import main
from pilotfish.edge_runtime.relaxation_file import RelaxationCard, read_relaxation
from pilotfish.lab.judge.calibrating import ObservedPositions, Position, choose_relaxation
from pilotfish.speculation.adaptive import DistributionComparison, Relaxation
from pilotfish.speculation.distributions import Sampling, probabilities
from pilotfish.speculation.truncation import truncate
from tests.conftest import Pair
from tests.support.enumeration import Model
from tests.support.examples import examples

ONE = Sampling(temperature=1.0)
PROMPTS = ("abc", "bcd ef", "c", "the", "a fish", "hello there")


def comparisons(seed: int, count: int, vocab: int = 12) -> list[DistributionComparison]:
    results = []
    for at in range(count):
        target, drafter = (Model(vocab, 100 * seed + at, side) for side in (0, 1))
        mixed = target.logits(()) + np.float32(0.2 * (at % 4)) * drafter.logits(())
        p = probabilities(target.logits(())[None], ONE)[0]
        results.append(
            DistributionComparison(p, truncate(mixed, replace(ONE, top_k=3 + at % 8)).row(0))
        )
    return results


def observed(seed: int, tau: float, lengths: tuple[int, ...] = (7, 1, 12)) -> ObservedPositions:
    answers = [comparisons(10 * seed + n, length) for n, length in enumerate(lengths)]
    return ObservedPositions.from_answers(
        [[Position.from_comparison(item, tau) for item in answer] for answer in answers]
    )


relaxations = st.builds(
    Relaxation,
    tau=st.sampled_from([0.1, 0.5, 0.9]),
    lambda1=st.sampled_from([0.0, 0.9, 1.1, 1e6]),
    lambda2=st.sampled_from([0.0, 0.02, 0.1, 1.0]),
    lambda3=st.sampled_from([0.0, 0.7, 1.0]),
)


@given(st.integers(0, 50), relaxations)
@examples(40)
def test_positions_together_are_what_the_rule_does_at_each(
    seed: int, relaxation: Relaxation
) -> None:
    lengths = (7, 1, 12)
    every = [c for n, length in enumerate(lengths) for c in comparisons(10 * seed + n, length)]
    seen = observed(seed, relaxation.tau, lengths)
    accepted = [item.accepted_mass(relaxation) for item in every]
    expected = [item.deviation(some) for item, some in zip(every, accepted, strict=True)]
    np.testing.assert_allclose(seen.deviation(relaxation), expected, atol=1e-12)
    outcome = seen.outcome(relaxation, 4)
    assert outcome.relaxed == pytest.approx(np.mean([some.sum() for some in accepted]))
    assert outcome.relaxed - outcome.strict == pytest.approx(outcome.deviation)
    key = [float(item.drafter[item.key_tokens(relaxation)].sum()) for item in every]
    assert outcome.key == pytest.approx(np.mean(key))
    assert (outcome.prompts, outcome.positions) == (3, 20)


def test_rounds_end_with_their_answers() -> None:
    seen = observed(3, 0.5, (3, 2))
    alpha = np.array([0.5, 0.8, 0.4, 0.9, 0.3])
    rounds = [1 + 0.5 + 0.5 * 0.8, 1 + 0.8 + 0.8 * 0.4, 1 + 0.4, 1 + 0.9 + 0.9 * 0.3, 1 + 0.3]
    assert seen.tokens(alpha, 2) == pytest.approx(np.mean(rounds))
    longer = [rounds[0] + 0.5 * 0.8 * 0.4, *rounds[1:]]
    assert seen.tokens(alpha, 100) == pytest.approx(np.mean(longer))


@given(st.integers(0, 30), st.sampled_from([0.1, 0.5, 0.9]), st.floats(0.0, 0.3))
@examples(40)
def test_the_budget_holds_and_more_of_it_is_no_worse(seed: int, tau: float, budget: float) -> None:
    seen = observed(seed, tau)
    tight, wide = (choose_relaxation(seen, tau, b, 4) for b in (budget / 2, budget))
    outcomes = [seen.outcome(item, 4) for item in (tight, wide)]
    assert outcomes[0].deviation <= budget / 2 + 1e-12
    assert outcomes[1].deviation <= budget + 1e-12
    assert outcomes[0].strict_tokens <= outcomes[0].relaxed_tokens <= outcomes[1].relaxed_tokens


@pytest.mark.parametrize("seed", range(4))
def test_nothing_better_is_overlooked(seed: int) -> None:
    """Against every λ₂ that makes a difference, over the same λ₁ and λ₃."""
    seen, tau, budget = observed(seed, 0.6), 0.6, 0.03
    best = seen.outcome(choose_relaxation(seen, tau, budget, 4), 4).relaxed_tokens
    ratios = np.quantile(seen.entropy_ratio, np.linspace(0.0, 1.0, 21))
    for lambda1, lambda2, lambda3 in product(ratios, seen.gap[::3], np.linspace(0.0, 1.0, 11)):
        other = Relaxation(
            tau=tau, lambda1=float(lambda1), lambda2=float(lambda2), lambda3=float(lambda3)
        )
        if seen.deviation(other).mean() <= budget:
            assert seen.tokens(seen.strict + seen.deviation(other), 4) <= best + 1e-12


def test_without_budget_or_tau_all_is_key() -> None:
    for tau, budget in ((0.5, 0.0), (0.0, 0.2)):
        seen = observed(1, tau)
        outcome = seen.outcome(choose_relaxation(seen, tau, budget, 4), 4)
        assert outcome.deviation == 0.0
        assert outcome.relaxed_tokens == outcome.strict_tokens


# The command


def calibrated(pair: Pair, folder: Path, *options: object, prompts: str | None = None) -> int:
    wanted = folder / "prompts.txt"
    wanted.write_text("\n".join(PROMPTS) if prompts is None else prompts)
    models = ["--draft", pair.draft, "--target", pair.target, "--prompts", wanted]
    usual = ["--out", folder / "own.json", "--max-tokens", 24, "--threads", 1, "--draft-top-k", 10]
    return main(["judge", "calibrate", *map(str, [*models, *usual, *options])])


def test_the_edge_deviates_as_calibrated(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrated(pair, tmp_path, "--tau", 0.6, "--deviation", 0.05, "--json", "-") == 0
    output = capsys.readouterr()
    card = read_relaxation(tmp_path / "own.json")
    assert json.loads(output.out)["lambda2"] == card.lambda2
    assert "tokens per round" in " ".join(output.err.split())
    assert (card.chosen.prompts, card.kept_out.prompts) == (5, 1)
    assert card.chosen.positions <= 5 * 24
    assert 0.04 < card.chosen.deviation <= 0.05
    assert 0.0 < card.chosen.key < 1.0
    assert card.chosen.relaxed - card.chosen.strict == pytest.approx(card.chosen.deviation)
    with (
        EdgeServer(pair.target, threads=1, relaxation=tmp_path / "own.json") as edge,
        Device(pair.draft, edge.endpoint, threads=1) as device,
    ):
        answers = [
            device.generate(
                prompt,
                protocol="adaptive",
                temperature=1.0,
                draft_top_k=10,
                max_tokens=24,
                seed=seed,
            )
            for prompt, seed in product(PROMPTS, range(6))
        ]
    rounds = [each for answer in answers for each in answer.rounds]
    verified = sum(each.verified for each in rounds)
    deviated = sum(each.notes["deviation"] for each in rounds) / verified
    assert deviated == pytest.approx(card.chosen.deviation, abs=0.02)
    alpha = sum(each.accepted for each in rounds) / verified
    assert alpha == pytest.approx(card.chosen.relaxed, abs=0.1)


def test_the_same_command_finds_the_same(pair: Pair, tmp_path: Path) -> None:
    results = []
    for slots in (1, 4, 4):
        assert calibrated(pair, tmp_path, "--slots", slots, "--count", 3) == 0
        results.append(read_relaxation(tmp_path / "own.json"))
    assert results[1] == results[2]
    assert results[0].lambda1 == pytest.approx(results[1].lambda1, rel=1e-3)
    assert results[0].prompts_sha256 == results[1].prompts_sha256
    assert calibrated(pair, tmp_path, "--count", 2) == 0
    other: RelaxationCard = read_relaxation(tmp_path / "own.json")
    assert other.prompts_sha256 != results[0].prompts_sha256


def test_questions_of_a_task_are_asked_as_it_asks(pair: Pair, tmp_path: Path) -> None:
    lines = [json.dumps({"question": prompt, "answer": "1"}) for prompt in PROMPTS[:3]]
    plain = tmp_path / "plain"
    plain.mkdir()
    assert calibrated(pair, plain, "--context", 250, prompts="\n".join(lines)) == 0
    assert (
        calibrated(pair, tmp_path, "--context", 250, "--task", "gsm8k", prompts="\n".join(lines))
        == 0
    )
    hashes = [read_relaxation(folder / "own.json").prompts_sha256 for folder in (plain, tmp_path)]
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize(
    ("options", "prompts", "words"),
    [
        ([], "one\n", "two prompts"),
        ([], "", "no prompt"),
        (["--context", 5], None, "larger --context"),
        (["--temperature", 101], None, "temperature"),
        (["--out", "/proc/none/own.json"], None, "cannot be written"),
        (["--prompts", "/nowhere"], None, "cannot be read"),
    ],
)
def test_what_makes_no_sense_is_told(
    pair: Pair,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[Any],
    prompts: str | None,
    words: str,
) -> None:
    code = calibrated(pair, tmp_path, *options, prompts=prompts)
    assert code in (UnsupportedError.exit_code, RelaxationError.exit_code)
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "own.json").exists()


def test_a_budget_that_allows_nothing_says_so(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrated(pair, tmp_path, "--deviation", 0) == 0
    assert "all tokens are key" in " ".join(capsys.readouterr().err.split())
    assert read_relaxation(tmp_path / "own.json").chosen.deviation == 0.0


def test_the_help_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["judge", "calibrate", "--help"])
    out = capsys.readouterr().out
    for word in ("λ₁", "total variation", "edge serve", "--relaxation", "held out"):
        assert word in out
