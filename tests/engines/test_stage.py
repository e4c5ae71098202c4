"""Stages: a model that was cut says what the whole one says, whatever is asked of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from pilotfish.engines.artifact import Artifact, open_stages
from pilotfish.engines.backends.cpu import CpuBackend
from pilotfish.engines.engine_errors import CapacityError
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.engines.stage import Head, Stage
from pilotfish.export.split import split_artifact
from tests.conftest import Pair
from tests.engines.test_decoder import (  # noqa: F401  # collected here once more, with another fixture
    SLOTS,
    empty,
    test_a_full_context_is_refused_and_nothing_is_appended,
    test_a_sequence_in_pieces_is_the_sequence_at_once,
    test_rollback_forgets,
    test_senseless_passes_are_refused,
    test_slots_of_different_lengths_share_a_pass,
)
from tests.engines.test_decoder_trees import (  # noqa: F401  # likewise
    test_a_tree_grown_level_by_level_is_the_whole_tree_is_its_paths,
    test_a_tree_is_over_after_rollback,
    test_any_tree_in_any_pieces_is_its_paths_and_keeps_any_of_them,
    test_keep_turns_a_grown_tree_into_the_accepted_path,
    test_parents_that_do_not_fit_are_refused,
    test_paths_that_the_grown_tree_has_not_are_refused,
    test_trees_of_several_slots_beside_chains_in_one_forward,
    test_what_was_kept_grows_the_next_tree,
    test_what_was_kept_is_a_chain_of_which_less_can_be_kept,
)
from tests.support import tensorrt_double
from tests.support.examples import examples
from tests.support.opening import CudaOnHost
from tests.support.prefill import prefill
from tests.support.runnable import needs
from tests.support.staged import STANDARD, TEXT, Both, Staged, both_in, of_every_kind, providers
from tests.support.thinned import thinned
from tests.support.tiny import tiny_artifact

# Name: stages, dialect, provider.
FORMS = {
    **{
        f"{count}-{dialect}": (count, dialect, "cpu") for count in (1, 2, 3) for dialect in STANDARD
    },
    "3-opset17-cuda": (3, "opset17", "cuda"),
    "3-opset17-narrow": (3, "opset17", "narrow"),
    **{f"2-{dialect}-tensorrt": (2, dialect, "tensorrt") for dialect in STANDARD},
}
QUICK = {"2-opset24", "3-opset17", "3-opset17-narrow", "2-opset17-tensorrt"}


class NarrowOnHost(CudaOnHost):
    """Takes few tokens of one pass at once, as a TensorRT engine does."""

    narrow, widest = 4, 7


@pytest.fixture(scope="module", params=thinned(FORMS, QUICK))
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    count, dialect, provider = FORMS[request.param]
    folder = tmp_path_factory.mktemp("stages")
    whole = tiny_artifact(folder / "whole", dialect=dialect, layers=3)
    split_artifact(whole.path, folder / "cut", stages=count)
    if provider == "tensorrt":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PILOTFISH_CACHE", str(folder / "cache"))
            tensorrt_double.install(patch, "10.16.2")
            return Staged(folder / "cut", whole, slots=SLOTS, provider=provider)
    with providers(cpu=CpuBackend, cuda=CudaOnHost, narrow=NarrowOnHost):
        return Staged(folder / "cut", whole, slots=SLOTS, provider=provider)


@pytest.fixture
def decoder(opened: Staged) -> Staged:
    empty(opened)
    return opened


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Both:
    return both_in(tmp_path_factory.mktemp("cut"))


# The same as the whole model


def passes_of_all_kinds() -> list[list[Pass]]:
    """Chains, trees and prompts of three slots, in three forwards."""
    tree, grown = np.array([-1, -1, 0, 1, 1]), np.array([-1, -1, 0, 1, 1, 3, 4, 4])
    return [
        [Pass(2, TEXT[:30], 0), Pass(0, TEXT[30:47], 3), Pass(1, TEXT[:1])],
        [Pass(0, TEXT[:5], parents=tree), Pass(1, TEXT[5:9], 2)],
        [Pass(1, TEXT[9:10]), Pass(2, TEXT[30:34]), Pass(0, TEXT[40:43], 2, grown)],
    ]


@of_every_kind
@pytest.mark.parametrize("layers", thinned([([3],), ([1, 2],), ([1, 1, 1],)], [([1, 1, 1],)]))
def test_stages_say_what_the_whole_model_says(
    tmp_path: Path, family: str, dialect: str, precision: Any, layers: list[int]
) -> None:
    needs(dialect)
    whole = tiny_artifact(
        tmp_path / "a", architecture=family, dialect=dialect, precision=precision, layers=3
    )
    decoder = Decoder(whole, slots=3)
    wanted = [
        [(out.logits.copy(), out.hidden.copy()) for out in decoder.forward(passes)]
        for passes in passes_of_all_kinds()
    ]
    split_artifact(whole.path, tmp_path / "cut", layers=layers)
    staged = Staged(tmp_path / "cut", whole, slots=3)
    assert len(staged.stages) == len(layers)
    for passes, answers in zip(passes_of_all_kinds(), wanted, strict=True):
        for out, (logits, hidden) in zip(staged.forward(passes), answers, strict=True):
            same(out.logits, logits, precision)
            same(out.hidden, hidden, precision)


def same(got: np.ndarray, wanted: np.ndarray, precision: str) -> None:
    """Bit for bit, as far as one can ask for it.

    On a CPU ONNX Runtime computes fp16 graphs in float32 and rounds here and there; at the border
    of a stage it always does.
    """
    if precision == "fp16":
        np.testing.assert_allclose(got, wanted, atol=0.02)
    else:
        np.testing.assert_array_equal(got, wanted)


# Anything that a decoder can be asked

CHAIN, TREE, ROLLBACK, KEEP = "chain", "tree", "rollback", "keep"
PLAY = examples(60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def plays(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Operations on eight slots. Numbers are taken modulo what is there when it comes to them."""
    plan: list[tuple[Any, ...]] = []
    number = st.integers(0, 1000)
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["forward", "forward", ROLLBACK, KEEP]))
        if kind == "forward":
            slots = draw(st.lists(st.integers(0, 7), min_size=1, max_size=5, unique=True))
            passes = [
                (slot, draw(st.sampled_from([CHAIN, TREE])), draw(st.integers(1, 9)), draw(number))
                for slot in slots
            ]
            plan.append((kind, passes, draw(number)))
        else:
            plan.append((kind, draw(st.integers(0, 7)), draw(number)))
    return plan


def play(runner: Any, plan: list[tuple[Any, ...]], vocabulary: int) -> list[Any]:
    """What it answers to each operation: logits, lengths, errors."""
    answers: list[Any] = []
    trees: dict[int, list[int]] = {}
    for kind, first, second in plan:
        try:
            if kind == "forward":
                passes = [requests(runner, trees, each, vocabulary) for each in first]
                answers.append([out.logits.copy() for out in runner.forward(passes)])
                for item in passes:
                    trees[item.slot] = [] if item.parents is None else item.parents.tolist()
            elif kind == ROLLBACK:
                runner.rollback(first, second % (runner.length(first) + 1))
                trees[first] = []
            else:
                nodes = np.random.default_rng(second).random(9) < 0.5
                runner.keep_path(first, np.flatnonzero(nodes).tolist())
                trees[first] = []
        except (ValueError, CapacityError) as error:
            answers.append(type(error))
        answers.append([runner.length(slot) for slot in range(8)])
    return answers


def requests(
    runner: Any, trees: dict[int, list[int]], wanted: tuple[int, str, int, int], vocabulary: int
) -> Pass:
    """A chain, or a tree that goes on where the slot's last pass ended, as numbers say."""
    slot, kind, size, number = wanted
    random = np.random.default_rng(number)
    tokens = random.integers(0, vocabulary, size)
    rows = None if number % 3 else number % (size + 1)
    if kind == CHAIN:
        return Pass(slot, tokens, rows)
    known = trees.get(slot, []) if number % 2 else []
    known = known if len(known) <= runner.length(slot) else []
    parents = [*known, *(int(random.integers(-1, i)) for i in range(len(known), len(known) + size))]
    return Pass(slot, tokens, rows, np.array(parents))


@given(plan=plays())
@example(  # a full slot beside others
    plan=[
        ("forward", [(7, CHAIN, 9, 4), (0, TREE, 9, 5)], 0),
        *[("forward", [(7, CHAIN, 9, 4), (1, CHAIN, 2, 1)], 0)] * 5,
        (KEEP, 7, 3),
    ]
)
@PLAY
def test_any_play_on_the_stages_is_the_same_on_the_whole(
    cut: Both, players: list[Any], plan: list[tuple[Any, ...]]
) -> None:
    for player in players:
        for slot in range(8):
            player.rollback(slot, 0)
    vocabulary = cut.whole.manifest.vocab_size
    wanted, *others = (play(player, plan, vocabulary) for player in players)
    for got in others:
        for item, two in zip(got, wanted, strict=True):
            if isinstance(two, list) and two and isinstance(two[0], np.ndarray):
                for logits, expected in zip(item, two, strict=True):
                    np.testing.assert_allclose(logits, expected, atol=1e-4)
            else:
                assert item == two


@pytest.fixture(scope="module")
def players(cut: Both) -> list[Any]:
    """The whole model, its stages, and stages over a double that takes few tokens at once."""
    with providers(cpu=CpuBackend, narrow=NarrowOnHost):
        narrow = Staged(cut.folder, cut.whole, slots=8, provider="narrow")
    return [Decoder(cut.whole, slots=8), Staged(cut.folder, cut.whole, slots=8), narrow]


def test_answers_are_in_the_order_of_the_passes(cut: Both) -> None:
    """Slots far apart go into runs of their own, and runs ascend."""
    first = Stage(open_stages(cut.folder)[0], slots=20)
    slots = [19, 3, 10, 4]
    passes = [Pass(slot, TEXT[slot : slot + 1 + i]) for i, slot in enumerate(slots)]
    together = first.forward(passes).copy()
    alone = []
    for item in passes:
        first.rollback(item.slot, 0)
        alone.append(first.forward([item]).copy())
    np.testing.assert_array_equal(together, np.concatenate(alone))
    assert together.shape == (1 + 2 + 3 + 4, first.width)


def test_only_the_last_stage_looks_at_rows(cut: Both) -> None:
    passes = [Pass(0, TEXT[:5], 2), Pass(1, TEXT[:3], 0)]
    states = None
    for stage in [Stage(each, slots=2) for each in open_stages(cut.folder)]:
        states = stage.forward(passes, states)
        assert states.shape == (2 if stage.last else 8, stage.width)


def test_only_the_first_stage_looks_at_ids(cut: Both) -> None:
    stages = [Stage(each) for each in open_stages(cut.folder)]
    states = stages[0].forward([Pass(0, TEXT[:5])]).copy()
    with pytest.raises(ValueError, match="token ids"):
        stages[0].forward([Pass(0, np.full(5, 10**6))])
    answers = []
    for tokens in (TEXT[:5], np.full(5, 10**6)):
        answers.append(stages[1].forward([Pass(0, tokens)], states).copy())
        stages[1].rollback(0, 0)
    np.testing.assert_array_equal(*answers)


def test_nothing_to_do_is_nothing_done(cut: Both) -> None:
    first, second, last = (Stage(each) for each in open_stages(cut.folder))
    none = first.forward([])
    assert none.shape == (0, first.width)
    assert second.forward([], none).shape == (0, second.width)
    assert last.forward([], none).shape == (0, last.answer_width)
    assert Head(first.artifact).logits(none).shape == (0, 100)


def test_a_norm_may_be_narrower_than_the_layers(tmp_path: Path) -> None:
    whole = tiny_artifact(tmp_path / "a", architecture="opt-post-norm")
    split_artifact(whole.path, tmp_path / "cut", stages=2)
    staged = Staged(tmp_path / "cut", whole)
    widths = [(stage.width, stage.answer_width) for stage in staged.stages]
    assert widths == [(64, 64), (64, 32)]
    assert staged.head.width == 32


def test_a_stage_keeps_keys_and_values_of_its_own_layers_only(tmp_path: Path) -> None:
    whole = tiny_artifact(tmp_path / "a", layers=3)
    split_artifact(whole.path, tmp_path / "cut", layers=[1, 2])
    stages = [Stage(each, provider="cpu") for each in open_stages(tmp_path / "cut")]
    planes = [sum(map(len, stage._cache._buffers)) for stage in stages]
    assert planes == [2, 4]


# Real weights


@pytest.mark.slow
def test_real_weights_in_stages_say_the_same_text(default_artifacts: Pair, tmp_path: Path) -> None:
    target = default_artifacts.target
    split_artifact(target, tmp_path / "cut", layers=[9, 7, 7, 7])
    prompt = np.random.default_rng(3).integers(0, 49152, 40)
    messages = []
    for runner in (Decoder(target), Staged(tmp_path / "cut", Artifact.open(target))):
        logits = prefill(runner, 0, prompt).logits[0].copy()
        first = logits
        tokens: list[int] = []
        for _ in range(16):
            tokens.append(int(logits.argmax()))
            logits = runner.forward([Pass(0, np.array(tokens[-1:]))])[0].logits[0].copy()
        messages.append((first, logits, tokens))
    (a, b, text), (c, d, again) = messages
    assert text == again
    np.testing.assert_allclose(c, a, atol=1e-4)
    np.testing.assert_allclose(d, b, atol=1e-4)
