"""The drafter across a bridge: what it has read is the committed text, in its own tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pilotfish.base.errors import InterruptedGenerationError
from pilotfish.bridge import Pair, Prompt
from pilotfish.drafting.model_drafter import ModelDrafter
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.speculation.distributions import Sampling
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, SamplingParams
from tests.support.pass_counter import PassCounter
from tests.support.registered import LOSSLESS
from tests.support.tiny import tiny_artifact

# "abc" is one token of the drafter's; of the target's it is "a", "bc".
OWN = [*"abcdx", "Ġ", "ab", "cd", "abc", "abcd", "Ġa"]
THEIRS = [*"abcdez", "Ġ", "bc", "da", "Ġb", "za"]
PROMPT = "ab cd abcd a"
ANSWER = "abcda zbc abed bcd ab da"
LAW = SamplingParams(sampling=Sampling(temperature=1.5), seed=1)
COLD = SamplingParams(sampling=Sampling(), seed=1)
CONTEXT = 96


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    path = tmp_path_factory.mktemp("drafter") / "own"
    return Artifact.open(tiny_artifact(path, tokens=OWN, eos="<x>", seed=5, context=CONTEXT).path)


@pytest.fixture(scope="module")
def pair(artifact: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp("target") / "theirs"
    target = tiny_artifact(path, tokens=THEIRS, eos="<y>", seed=6)
    return Pair(Vocabulary.from_artifact(artifact), Vocabulary.from_artifact(target))


def fresh(artifact: Artifact, pair: Pair, lanes: int = 1) -> ModelDrafter:
    """A drafter that has read nothing."""
    drafter = ModelDrafter.open(artifact, provider="cpu", threads=1, context=None, lanes=lanes)
    drafter.set_bridge(pair.bridge())
    return drafter


def committed(pair: Pair, text: str) -> NDArray[np.uint32]:
    return np.array(pair.target.tokenizer.encode(text), dtype=np.uint32)


def common(items: list[int], other: list[int]) -> int:
    """How many ids both begin with."""
    unequal = (at for at, (a, b) in enumerate(zip(items, other, strict=False)) if a != b)
    return next(unequal, min(len(items), len(other)))


def logits_alone(
    artifact: Artifact, pair: Pair, ids: NDArray[np.uint32], after: Any = PROMPT
) -> Any:
    """The logits of a drafter that sees these tokens for the first time."""
    drafter = fresh(artifact, pair)
    drafter.start(pair.prompt(after, chat=False))
    return drafter.logits(ids).copy()


@pytest.mark.parametrize(
    "expansion", [(1, 1, 1), (1,) * 5, (2, 2, 2), (4, 2, 1), (1, 3, 2), (1, 1, 2, 2), (3,)]
)
def test_after_every_verdict_the_drafter_is_where_a_fresh_one_would_be(
    artifact: Artifact, pair: Pair, expansion: tuple[int, ...]
) -> None:
    drafter, exchange = fresh(artifact, pair), PROTOCOL_REGISTRY["tree"]
    prompt = pair.prompt(PROMPT, chat=False)
    nodes = len(draft_of(drafter, prompt, expansion).ids)
    tokens = range(pair.target.vocab_size)
    for node in range(nodes + 1):
        draft = draft_of(drafter, prompt, expansion)
        assert {*draft.ids.tolist()} <= {*pair.shared.target.tolist()}
        path = draft.path(node)
        drafted = draft.ids[[n - 1 for n in path]]
        # whatever the target adds, of its own tokens too: "e", "z", "bc"
        token = tokens[(7 * node) % len(tokens)]
        text = np.concatenate([prompt.ids, drafted, [token]]).astype(np.uint32)
        passes = PassCounter(drafter._shared_model.engine.model)
        got = drafter.logits(text).copy()
        # the path was not forgotten; its last node may not have been read
        read = [*prompt.draft_ids.tolist(), *drafter.bridge.to_draft_ids(drafted)[: len(path) - 1]]
        context = drafter.bridge.context(text).tolist()
        assert passes.take() <= len(context) - min(common(read, context), len(context) - 1)
        np.testing.assert_allclose(got, logits_alone(artifact, pair, text), atol=1e-4)
        assert np.isneginf(got[[THEIRS.index("e"), THEIRS.index("bc")]]).all()
        drafter.draft(text, expansion, exchange, LAW, ends=())  # and it goes on from there


def draft_of(drafter: ModelDrafter, prompt: Any, expansion: tuple[int, ...]) -> Any:
    drafter.start(prompt)
    return drafter.draft(prompt.ids, expansion, PROTOCOL_REGISTRY["tree"], LAW, ends=())


@pytest.mark.parametrize("protocol", LOSSLESS)
@pytest.mark.parametrize("seed", range(3))
def test_a_long_answer_is_read_as_it_comes(
    artifact: Artifact, pair: Pair, protocol: str, seed: int
) -> None:
    """Rounds as a session plays them, with verdicts of all kinds."""
    random = np.random.default_rng(seed)
    drafter, exchange = fresh(artifact, pair), PROTOCOL_REGISTRY[protocol]
    prompt = pair.prompt(PROMPT, chat=False)
    drafter.start(prompt)
    ids = prompt.ids
    expansion = (1, 2, 2) if exchange.allows_trees else (1,) * 4
    for _ in range(12):
        drafter.prefill(ids)
        draft = drafter.draft(ids, expansion, exchange, LAW, ends=())
        path = draft.path(int(random.integers(len(draft.ids) + 1)))
        drafted = draft.ids[[n - 1 for n in path]]
        ids = np.concatenate([ids, drafted, random.integers(len(THEIRS), size=1)])
        ids = ids.astype(np.uint32)
        assert drafter.remaining_context(ids) == CONTEXT - len(drafter.bridge.context(ids))
    got = drafter.logits(ids).copy()
    np.testing.assert_allclose(got, logits_alone(artifact, pair, ids), atol=1e-4)


def test_only_a_tail_that_has_to_be_told_otherwise_is_read_again(
    artifact: Artifact, pair: Pair
) -> None:
    drafter = fresh(artifact, pair)
    passes = PassCounter(drafter._shared_model.engine.model)
    prompt = pair.prompt(PROMPT, chat=False)
    drafter.start(prompt)
    drafter.logits(prompt.ids)
    assert passes.take() == len(prompt.draft_ids)
    ours, again = prompt.draft_ids.tolist(), 0
    answer = committed(pair, ANSWER)
    for at in range(1, len(answer) + 1):
        ids = np.concatenate([prompt.ids, answer[:at]])
        now = drafter.bridge.context(ids).tolist()
        same = common(ours, now)
        drafter.logits(ids)
        # the last token is always read, for its logits
        assert passes.take() == max(1, len(now) - same)
        again += len(ours) - same
        ours = now
    assert again > 2
    np.testing.assert_allclose(drafter.logits(ids), logits_alone(artifact, pair, ids), atol=1e-4)


def test_a_tail_that_merges_is_rolled_back(artifact: Artifact, pair: Pair) -> None:
    """What was read as "ab" is "abc" when a "c" comes."""
    drafter = fresh(artifact, pair)
    passes = PassCounter(drafter._shared_model.engine.model)
    prompt = pair.prompt(PROMPT, chat=False)
    drafter.start(prompt)
    for text in ("a", "ab", "abc", "abcd", "abcda"):  # one token after the other, but the last
        ids = np.concatenate([prompt.ids, [THEIRS.index(letter) for letter in text]])
        ids = ids.astype(np.uint32)
        drafter.prefill(ids)
        passes.take()
        got = drafter.logits(ids).copy()
        assert passes.take() == 1
        np.testing.assert_allclose(got, logits_alone(artifact, pair, ids), atol=1e-4)
        assert drafter._shared_model.engine.model.length(0) == len(drafter.bridge.context(ids))


def test_what_two_prompts_begin_with_is_read_once(artifact: Artifact, pair: Pair) -> None:
    drafter = fresh(artifact, pair)
    passes = PassCounter(drafter._shared_model.engine.model)
    first = pair.prompt("ab cd abcd a" * 3, chat=False)
    drafter.start(first)
    drafter.prefill(first.ids)
    assert passes.take() == len(first.draft_ids) - 1
    drafter.start(first)  # the same again
    drafter.prefill(first.ids)
    assert passes.take() == 0
    # another turn: the answer is part of the prompt, in whatever tokens
    answer = committed(pair, "bcd dab")
    ids = np.concatenate([first.ids, answer])
    drafter.logits(ids)
    held = drafter.bridge.context(ids).tolist()
    passes.take()
    second = pair.prompt("ab cd abcd a" * 3 + "bcd dab cd abcd", chat=False)
    same = common(held, second.draft_ids.tolist())
    assert same > len(first.draft_ids) - 2
    drafter.start(second)
    drafter.prefill(second.ids)
    assert passes.take() == len(second.draft_ids) - 1 - same
    got = drafter.logits(second.ids).copy()
    other = fresh(artifact, pair)
    other.start(second)
    np.testing.assert_allclose(got, other.logits(second.ids), atol=1e-4)


def test_what_was_drafted_in_vain_leaves_nothing_behind(artifact: Artifact, pair: Pair) -> None:
    """A window whose verdict never came: the link was lost, or another answer begins."""
    prompt, other = pair.prompt(PROMPT, chat=False), pair.prompt("dd c", chat=False)
    for expansion in ((1, 1, 1, 1), (2, 2, 2), (1, 2, 2)):
        for after in (prompt, other):
            drafter = fresh(artifact, pair)
            drafter.start(prompt)
            drafter.draft(prompt.ids, expansion, PROTOCOL_REGISTRY["tree"], LAW, ends=())
            drafter.start(after)
            # nor does an empty window bring it back
            draft = drafter.draft(after.ids, (), PROTOCOL_REGISTRY["tree"], LAW, ends=())
            assert len(draft.ids) == 0
            text = np.concatenate([after.ids, committed(pair, "zbc")])
            got = drafter.logits(text).copy()
            wanted = logits_alone(artifact, pair, text, after.source)
            np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_an_interrupted_reading_goes_on_where_it_was(artifact: Artifact, pair: Pair) -> None:
    drafter = fresh(artifact, pair)
    passes = PassCounter(drafter._shared_model.engine.model)
    prompt = pair.prompt(PROMPT, chat=False)

    def strike() -> None:
        raise InterruptedGenerationError

    drafter.start(prompt)
    with pytest.raises(InterruptedGenerationError):
        drafter.prefill(prompt.ids, strike)
    assert passes.take() == 0
    drafter.start(prompt)
    got = drafter.logits(prompt.ids).copy()
    np.testing.assert_allclose(got, logits_alone(artifact, pair, prompt.ids), atol=1e-4)


def test_two_lanes_do_not_disturb_each_other(artifact: Artifact, pair: Pair) -> None:
    """Each has a bridge of its own, and a slot."""
    first = fresh(artifact, pair, lanes=2)
    second = first.fork()
    second.set_bridge(pair.bridge())
    prompts = [pair.prompt(text, chat=False) for text in (PROMPT, "dcba dcba")]
    drafters = [first, second]
    ids = [prompt.ids for prompt in prompts]
    for drafter, prompt in zip(drafters, prompts, strict=True):
        drafter.start(prompt)
    for at in range(10):
        for lane, drafter in enumerate(drafters):
            drafter.draft(ids[lane], (2, 1, 2), PROTOCOL_REGISTRY["tree"], LAW, ends=())
            ids[lane] = np.concatenate([ids[lane], [(at * 3 + lane) % len(THEIRS)]])
            ids[lane] = ids[lane].astype(np.uint32)
    for lane, drafter in enumerate(drafters):
        got = drafter.logits(ids[lane]).copy()
        wanted = logits_alone(artifact, pair, ids[lane], prompts[lane].source)
        np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_a_full_context_drafts_nothing_and_forgets_nothing(artifact: Artifact, pair: Pair) -> None:
    drafter, exchange = fresh(artifact, pair), PROTOCOL_REGISTRY["greedy"]
    first = committed(pair, "d")
    ids, prompt = first, long_prompt(pair, CONTEXT - 8, first)
    windows = []
    drafter.start(prompt)
    for _ in range(20):
        drafter.prefill(ids)
        room = drafter.remaining_context(ids)
        draft = drafter.draft(ids, (1, 1, 1), exchange, COLD, ends=())
        windows.append((room, len(draft.ids)))
        ids = np.concatenate([ids, [THEIRS.index("d")]]).astype(np.uint32)
    assert windows[0] == (8, 3)
    assert all(drafted == max(0, min(3, room)) for room, drafted in windows)
    assert windows[-1] == (8 - 19, 0)
    assert drafter._shared_model.engine.model.length(0) <= CONTEXT
    drafter.start(prompt)  # what it begins with is still there
    passes = PassCounter(drafter._shared_model.engine.model)
    got = drafter.logits(first).copy()
    assert passes.take() == 1
    other = fresh(artifact, pair)
    other.start(prompt)
    np.testing.assert_allclose(got, other.logits(first), atol=1e-4)


def long_prompt(pair: Pair, length: int, ids: NDArray[np.uint32]) -> Prompt:
    """A prompt of so many tokens for the drafter, and of these for the target."""
    made = pair.prompt("x" * length, chat=False)
    assert len(made.draft_ids) == length
    return replace(made, ids=ids)


def test_a_prompt_that_is_too_long_for_the_drafter_is_not_read(
    artifact: Artifact, pair: Pair
) -> None:
    drafter = fresh(artifact, pair)
    passes = PassCounter(drafter._shared_model.engine.model)
    ids = committed(pair, "da")
    for length in (CONTEXT, CONTEXT + 1, 3 * CONTEXT):
        drafter.start(long_prompt(pair, length, ids))
        drafter.prefill(ids)
        assert drafter.remaining_context(ids) == CONTEXT - length
        draft = drafter.draft(ids, (2, 2), PROTOCOL_REGISTRY["tree"], LAW, ends=())
        assert len(draft.ids) == 0
        assert passes.take() == (CONTEXT - 1 if length == CONTEXT else 0)


@pytest.mark.parametrize("length", [1, 255, 256, 257, 600])
def test_a_bridge_is_as_long_as_it_has_to_be(pair: Pair, length: int) -> None:
    bridge = pair.bridge()
    for prompt in (
        pair.prompt("a" + "x" * (length - 1), chat=False),
        pair.prompt("cd", chat=False),
    ):
        bridge.start(prompt)
        for times in range(1, 12):
            text = "da bc " * 12 * times
            ours = bridge.context(np.concatenate([prompt.ids, committed(pair, text)]))
            answer = pair.drafter.tokenizer.encode_rest(text).ids
            assert ours.tolist() == [*prompt.draft_ids.tolist(), *answer]


def test_a_narrow_bridge_carries_a_wide_tree(tmp_path: Path) -> None:
    """More candidates than there are tokens to draft."""
    ours = Artifact.open(tiny_artifact(tmp_path / "own", tokens=[*"abc"], eos="<x>").path)
    target = tiny_artifact(tmp_path / "theirs", tokens=[*"adef"], eos="<y>")
    pair = Pair(Vocabulary.from_artifact(ours), Vocabulary.from_artifact(target))
    shared = pair.shared.target.tolist()
    assert len(shared) == 2  # "a" and the end
    for protocol in LOSSLESS:
        drafter = fresh(ours, pair)
        prompt = pair.prompt("aaa", chat=False)
        drafter.start(prompt)
        expansion = (8, 2) if PROTOCOL_REGISTRY[protocol].allows_trees else (1, 1, 1)
        for auto in (False, True):
            draft = drafter.draft(
                prompt.ids, expansion, PROTOCOL_REGISTRY[protocol], LAW, ends=(), auto=auto
            )
            assert len(draft.ids)
            assert {*draft.ids.tolist()} <= {*shared}


def test_another_bridge_and_back(artifact: Artifact, pair: Pair, tmp_path: Path) -> None:
    """What was read stays, for it is in the drafter's own tokens."""
    target = tiny_artifact(tmp_path / "other", tokens=[*"abcdĠ"])
    drafter = fresh(artifact, pair)
    passes = PassCounter(drafter._shared_model.engine.model)
    unread = True
    for item in (
        pair,
        Pair(pair.drafter, Vocabulary.from_artifact(target)),
        Pair(pair.drafter, pair.drafter),
        pair,
    ):
        drafter.set_bridge(item.bridge())
        prompt = item.prompt("ab cd abcd ab", chat=False)
        drafter.start(prompt)
        got = drafter.logits(prompt.ids)
        assert got.shape == (item.target.vocab_size,)
        assert passes.take() == (len(prompt.draft_ids) if unread else 1)
        unread = False
