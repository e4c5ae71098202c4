"""`lab.agreement`: what one reading of an answer foretells, rounds over the wire accept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import PromptTooLongError
from pilotfish.bridge import Pair
from pilotfish.drafting.model_drafter import ModelDrafter
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.lab.agreement import (
    GREEDY,
    PassesInUse,
    agreement,
    count_accepted,
    count_by_depth,
)
from pilotfish.speculation.distributions import Sampling
from pilotfish.wire.protocols import SamplingParams
from pilotfish.wire.protocols.ahead import draft_with_margin
from tests.support.bridged import SMALL
from tests.support.ring import MASK, ring_pair
from tests.support.tiny import tiny_artifact

PROMPTS = ["abc", "bcd ef", "a long prompt, by these standards", "", "zzzz"]
TOKENS = 60


def opened(artifact, target):
    """A drafter with its bridge to a target of this vocabulary."""
    drafter = ModelDrafter.open(artifact, provider="cpu", threads=1, context=None)
    pair = Pair(Vocabulary.from_artifact(artifact), target)
    drafter.set_bridge(pair.bridge())
    return drafter, pair


@pytest.fixture(scope="module")
def reader(pair, device):
    """The pair's drafter, outside of any device, and its pair of vocabularies."""
    from pilotfish.engines.artifact import Artifact

    drafter, vocabularies = opened(Artifact.open(pair.draft), device.vocabulary)
    yield drafter, vocabularies
    drafter.release()


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_rounds_accept_what_follows_from_agreement(device, reader, prompt, window):
    drafter, pair = reader
    options = {"protocol": "greedy", "window": window, "max_tokens": TOKENS}
    generation = device.generate(prompt, **options)
    agreed = agreement(drafter, pair.prompt(prompt), generation.tokens)
    foretold = count_accepted(agreed, window)
    accepteds = [item.accepted for item in generation.rounds]
    # the last window may be cut short, and be right beyond the answer
    assert len(accepteds) == len(foretold)
    assert accepteds[:-1] == foretold[:-1]
    assert {*agreed.tolist()} == {True, False}


@pytest.mark.parametrize("window", [1, 4])
def test_under_shared_noise_too(device, reader, window):
    drafter, pair = reader
    sampling = {"temperature": 0.7, "seed": 11, "max_tokens": TOKENS}
    generation = device.generate("abc", protocol="coupled", window=window, **sampling)
    law = SamplingParams(sampling=Sampling(temperature=0.7), seed=11)
    agreed = agreement(drafter, pair.prompt("abc"), generation.tokens, law)
    assert [item.accepted for item in generation.rounds][:-1] == count_accepted(agreed, window)[:-1]
    greedy = agreement(drafter, pair.prompt("abc"), generation.tokens)
    assert not np.array_equal(agreed, greedy)


@pytest.fixture(scope="module")
def across(tmp_path_factory):
    """A drafter of another vocabulary than its target's, in which texts grow in other steps."""
    folder = tmp_path_factory.mktemp("across")
    target = ["A", "B", "AB", "C", "ABC"]
    tiny_artifact(folder / "draft", tokens=SMALL, context=256, seed=3)
    tiny_artifact(folder / "target", tokens=target, context=256, seed=4)
    return folder


def test_across_a_bridge_each_round_of_one_draft(across):
    from pilotfish.engines.artifact import Artifact

    with (
        EdgeServer(across / "target", threads=1) as edge,
        Device(across / "draft", edge.endpoint, threads=1) as device,
    ):
        drafter, pair = opened(Artifact.open(across / "draft"), device.vocabulary)
        assert not pair.trivial
        kinds = set()
        for prompt in ("AB", "CAB", "BBA", "C"):
            generation = device.generate(prompt, protocol="greedy", window=1, max_tokens=TOKENS)
            agreed = agreement(drafter, pair.prompt(prompt), generation.tokens)
            accepteds = [item.accepted for item in generation.rounds]
            assert accepteds[:-1] == count_accepted(agreed, 1)[:-1]
            kinds |= {*agreed.tolist()}
        assert kinds == {True, False}
        drafter.release()


def test_a_drafter_without_room_says_so(device, reader):
    drafter, pair = reader
    prompt = pair.prompt("abc")
    room = drafter.context - len(prompt.ids)
    assert len(agreement(drafter, prompt, [1] * room)) == room
    with pytest.raises(PromptTooLongError, match="is 256 tokens"):
        agreement(drafter, prompt, [1] * (room + 1))
    assert len(agreement(drafter, prompt, [])) == 0


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 9))
def test_rounds_cover_the_answer_and_depths_count_every_token(agreed, window):
    values = np.array(agreed, dtype=np.bool_)
    rounds = count_accepted(values, window)
    assert all(0 <= item <= window for item in rounds)
    tokens = sum(rounds) + len(rounds)
    assert len(values) <= tokens <= len(values) + 1  # a last bonus may lie beyond
    at = 0
    for item in rounds:
        assert values[at : at + item].all()
        if item < window and at + item < len(values):
            assert not values[at + item]
        at += item + 1
    reached, right = count_by_depth(values, 8)
    assert reached.sum() == len(values)
    assert right.sum() == values.sum()
    assert (np.diff(reached[:-1]) <= 0).all()


def test_depths_by_hand():
    reached, right = count_by_depth(np.array([1, 1, 0, 1, 0, 0, 1, 1, 1], dtype=np.bool_), 3)
    assert reached.tolist() == [4, 3, 2]
    assert right.tolist() == [3, 2, 1]
    assert GREEDY.sampling.greedy


@pytest.mark.parametrize("drafts", [1, 4, 8])
def test_a_drafter_of_several_drafts_is_read_as_it_drafts(tmp_path, monkeypatch, drafts):
    """Pass by pass: mask tokens follow the text, and a new pass begins after a wrong draft."""
    from pilotfish.engines.artifact import Artifact

    draft, target = (Artifact.open(path) for path in ring_pair(tmp_path))
    drafter, pair = opened(draft, Vocabulary.from_artifact(target))
    law = SamplingParams(sampling=Sampling(temperature=1.0), seed=5)
    text = [3]
    author = Decoder(target, threads=1, provider="cpu")
    for at in range(1, 90):
        logits = author.forward([Pass(0, np.array(text[-1:]))])[0].logits[0].copy()
        text.append(draft_with_margin(logits, law, at)[0])
    prompt, answer = pair.prompt(text[:1]), text[1:]
    monkeypatch.setattr("pilotfish.lab.agreement.stream_drafts", lambda *_, **__: drafts)
    passes = PassesInUse(target_s=0.04)
    agreed = agreement(drafter, prompt, answer, law, passes)
    reader = Decoder(draft, threads=1, provider="cpu")
    expected, places = [], []
    while len(expected) < len(answer):
        known = 1 + len(expected)
        some = min(drafts, len(answer) - len(expected))
        masked = np.array([*text[:known], *[MASK] * (some - 1)])
        reader.rollback(0, 0)
        for place, row in enumerate(reader.forward([Pass(0, masked, some)])[0].logits):
            token = draft_with_margin(row, law, known + place)[0]
            expected.append(token == text[known + place])
            places.append(place)
            if not expected[-1]:
                break
    assert agreed.tolist() == expected
    assert max(places) == drafts - 1 or drafts == 8  # all eight are rarely right
    assert max(places) > 0 or drafts == 1
    assert passes.drafts == drafts
    drafter.release()
