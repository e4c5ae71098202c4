"""A drafter whose head was cut says less, and the target's law stays: same vocabulary and across.

Rounds are enumerated over all their outcomes with the real drafter, answers of real edges compared
token for token; the slow tests look at their law by χ² over many.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import PairMismatchError
from pilotfish.bridge import Pair, TrivialBridge
from pilotfish.device_runtime.drafter_trial import try_drafters
from pilotfish.drafting.model_drafter import ModelDrafter
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.lab.pairs import OpenPair
from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.logits_options import Grammar
from tests.support.bridged import END, TARGETS_END, WORDS, ids
from tests.support.enumeration import p_value
from tests.support.in_process import Reader, RealDrafter, expect_the_same
from tests.support.registered import ALL_LOSSLESS, temperature_of
from tests.support.rounds import PROMPT, Setting
from tests.support.tiny import tiny_artifact
from tests.system.test_lossless import ANSWERS, THRESHOLD, frequencies, law_after, read
from tests.wire.test_protocol_outcomes import assert_exact

# Of each drafter, what it keeps; its end token, the last, among it or not.
KEPT = {"same": [0, 2, 5], "same, without its end": [1, 3], "partial": [1, 2, 5]}


def drafts(folder: Path, name: str, head_tokens: list[int] | None) -> Artifact:
    """The drafter of a pair."""
    if name != "partial":
        return tiny_artifact(folder, vocab=6, seed=2, head_tokens=head_tokens)
    return tiny_artifact(
        folder, tokens=WORDS[name][0], eos=END, seed=2, sharpness=0.8, head_tokens=head_tokens
    )


def targets(folder: Path, name: str) -> Artifact:
    if name != "partial":
        return tiny_artifact(folder, vocab=6, seed=1)
    return tiny_artifact(folder, tokens=WORDS[name][1], eos=TARGETS_END, seed=1, sharpness=0.8)


def pair_of(drafter: Artifact, target: Artifact) -> Pair:
    return Pair(
        Vocabulary.from_artifact(drafter), Vocabulary.from_artifact(target), drafter.head_tokens
    )


@pytest.fixture(scope="module")
def opened(tmp_path_factory: Any) -> Iterator[Any]:
    """A device of that pair, its drafter and its target; each is opened once."""
    with ExitStack() as stack:

        @cache
        def open_(name: str) -> tuple[Device, Artifact, Artifact]:
            folder = tmp_path_factory.mktemp("pair")
            draft = drafts(folder / "draft", name, KEPT[name])
            target = targets(folder / "target", name)
            edge = stack.enter_context(EdgeServer(target.path, rate=1e6, context=96, threads=1))
            return stack.enter_context(Device(draft.path, edge.endpoint, threads=1)), draft, target

        yield open_


# Logits


@pytest.mark.parametrize("name", KEPT)
def test_the_bridge_says_what_the_whole_head_says_of_kept_tokens(tmp_path: Path, name: str) -> None:
    whole = drafts(tmp_path / "whole", name, None)
    cut = drafts(tmp_path / "cut", name, KEPT[name])
    target = targets(tmp_path / "target", name)
    pairs = [pair_of(each, target) for each in (whole, cut)]
    assert pairs[0].trivial == pairs[1].trivial == (name != "partial")
    bridges, rows = [], []
    for pair, artifact in zip(pairs, (whole, cut), strict=True):
        bridge = pair.bridge()
        bridge.start(pair.prompt([1, 0, 2]))
        context = bridge.context(ids([1, 0, 2, 0]))
        rows.append(bridge.project(read(Decoder(artifact, threads=1), context))[0].copy())
        bridges.append(bridge)
    reply = [token for token in range(target.manifest.vocab_size) if bridges[1].can_draft(token)]
    ours = [int(bridges[1].to_draft_ids(ids([token]))[0]) for token in reply]
    assert {*ours} <= {*KEPT[name]}
    np.testing.assert_allclose(rows[1][reply], rows[0][reply], rtol=1e-5)
    assert np.isneginf(np.delete(rows[1], reply)).all()
    assert {token for token in range(len(rows[0])) if np.isfinite(rows[0][token])} >= {*reply}
    assert len(reply) == len(KEPT[name])


def test_a_head_without_a_token_of_the_target_is_refused(tmp_path: Path) -> None:
    cut = drafts(tmp_path / "cut", "partial", [0, 4])  # "d" and "dd", which the target lacks
    with pytest.raises(PairMismatchError, match="its head was cut to tokens that"):
        pair_of(cut, targets(tmp_path / "target", "partial"))


# The law


@pytest.mark.parametrize(
    ("protocol", "expansion"), [("dsd", (1, 1)), ("tslt", (1, 1)), ("tree", (1, 2)), ("dssd", (1,))]
)
@pytest.mark.parametrize("name", KEPT)
def test_rounds_of_the_real_drafter_are_exact_over_all_their_outcomes(
    tmp_path: Path, name: str, protocol: str, expansion: tuple[int, ...]
) -> None:
    artifact = drafts(tmp_path / "draft", name, KEPT[name])
    pair = pair_of(artifact, targets(tmp_path / "target", name))
    drafter = ModelDrafter.open(artifact, provider="cpu", threads=1, context=None)
    drafter.set_bridge(pair.bridge())
    drafter.start(pair.prompt(PROMPT))

    def window(setting: Any, exchange: Any, law: Any, committed: Any) -> Any:
        return drafter.draft(ids(committed), setting.expansion, exchange, law, pair.target.eos_ids)

    sampling = Sampling(temperature=1.0, top_k=2)
    setting = Setting(
        protocol, expansion, Sampling(temperature=1.0), sampling, vocab=pair.target.vocab_size
    )
    assert_exact(setting, 2, window, (*PROMPT, 1, 0))


@pytest.mark.parametrize("name", KEPT)
def test_at_temperature_zero_all_are_stream(opened: Any, name: str) -> None:
    device, *_ = opened(name)
    for prompt in ([1, 3, 2], [0]):
        wanted = device.generate(prompt, protocol="stream", max_tokens=24)
        for protocol in ALL_LOSSLESS:
            for drafter in (None, 1.0):  # it may sample all the same
                if drafter and not temperature_of(protocol):
                    continue
                got = device.generate(
                    prompt, protocol=protocol, window=3, max_tokens=24, draft_temperature=drafter
                )
                assert got.tokens == wanted.tokens


@pytest.mark.parametrize("name", ["same", "partial"])
@pytest.mark.parametrize("protocol", ["coupled", "ahead"])
def test_a_seed_gives_the_targets_own_sample(opened: Any, name: str, protocol: str) -> None:
    device, *_ = opened(name)
    for seed in range(6):
        common = {"max_tokens": 24, "seed": seed, "temperature": 1.0}
        wanted = device.generate([1, 3, 2], protocol="stream", **common)
        assert device.generate([1, 3, 2], protocol=protocol, **common).tokens == wanted.tokens


CASES = [
    ("partial", "dsd", {"window": 2}),
    *(("same", "tslt", {"window": 3}), ("same", "tree", {"expansion": (2, 2)})),
    *(("same", "dssd", {"window": 2}), ("same, without its end", "dsd", {"window": 3})),
    *(("partial", "tree", {"expansion": (2, 2)}), ("partial", "tslt", {"window": 2})),
    ("same", "dsd", {"window": 2}),
]


@pytest.mark.parametrize(("name", "protocol", "options"), CASES)
def test_answers_are_those_of_the_protocol_alone(
    opened: Any, name: str, protocol: str, options: dict[str, Any]
) -> None:
    device, draft, target = opened(name)
    expect_the_same(
        device,
        (Reader(target), None),
        [1, 3, 2],
        target.manifest.eos_ids[0],
        drafter=RealDrafter(draft, pair_of(draft, target)),
        protocol=protocol,
        temperature=1.0,
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "protocol", "options"), CASES)
def test_answers_follow_the_targets_law(
    opened: Any, name: str, protocol: str, options: dict[str, Any]
) -> None:
    device, draft, target = opened(name)
    decoder, shape = Decoder(target), Sampling(temperature=1.0)
    prompt = [1, 3, 2]
    outcomes = law_after(
        lambda answer: read(decoder, [*prompt, *answer]), shape, target.manifest.eos_ids[0]
    )
    counts = frequencies(device, outcomes, protocol=protocol, temperature=1.0, **options)
    assert p_value(counts, np.array(list(outcomes.values())) * ANSWERS) > THRESHOLD
    # the test can fail: the drafter's own law is far away, and lacks most of the answers
    pair, ours = pair_of(draft, target), Decoder(draft)
    bridge = pair.bridge()
    bridge.start(pair.prompt(prompt))
    drafters = law_after(
        lambda answer: bridge.project(read(ours, bridge.context(ids([*prompt, *answer])))),
        shape,
        target.manifest.eos_ids[0],
    )
    wrong = np.array([drafters.get(answer, 0.0) for answer in outcomes]) * ANSWERS
    assert p_value(counts, np.maximum(wrong, 1e-9)) < 1e-12


@pytest.mark.parametrize("name", KEPT)
def test_drafts_are_accepted_and_what_was_cut_is_said_by_the_edge_alone(
    opened: Any, name: str
) -> None:
    device, draft, target = opened(name)
    bridge = pair_of(draft, target).bridge()
    drafted, reply, accepted = 0, set[int](), 0
    for seed in range(15):
        answer = device.generate(
            [1, 3, 2], protocol="dsd", window=2, temperature=1.0, max_tokens=24, seed=seed
        )
        reply |= {*answer.tokens}
        drafted += sum(each.window for each in answer.rounds)
        accepted += sum(each.accepted for each in answer.rounds)
    assert 0 < accepted < drafted
    assert any(not bridge.can_draft(token) for token in reply)


def test_alone_it_never_says_what_was_cut(opened: Any) -> None:
    device, *_ = opened("same")
    names = set[int]()
    for seed in range(20):
        answer = device.generate(
            [1, 3, 2], protocol="local", temperature=2.0, max_tokens=24, seed=seed
        )
        names |= {*answer.tokens}
    assert names == {*KEPT["same"]}


def test_grammars_force_what_it_cannot_say(tmp_path: Path) -> None:
    """A constrained answer needs tokens that were cut; the edge says them."""
    only = Grammar.from_choices(["hello", "help"])
    tiny_artifact(tmp_path / "target", vocab=128, seed=1)
    draft = tiny_artifact(tmp_path / "draft", vocab=128, seed=2, head_tokens=[0, 1, 127])
    with (
        EdgeServer(tmp_path / "target", rate=1e6, context=96, threads=1) as edge,
        Device(draft.path, edge.endpoint, threads=1) as device,
    ):
        for protocol in ("greedy", "dsd", "tree", "ahead"):
            answer = device.generate("abc", protocol=protocol, grammar=only, max_tokens=40)
            assert answer.text in ("hello", "help")


# An edge that dies, and what else there is


def test_an_edge_that_is_killed_leaves_an_answer_of_what_it_can_say(tmp_path: Path) -> None:
    target = tiny_artifact(tmp_path / "target", vocab=6, seed=1)
    draft = tiny_artifact(tmp_path / "draft", vocab=6, seed=2, head_tokens=[0, 2, 5])
    with (
        EdgeServer(target.path, rate=1e6, context=96, threads=1) as edge,
        Device(draft.path, edge.endpoint, threads=1, on_link_loss="local") as device,
    ):
        assert device.generate([1, 3, 2], max_tokens=8, protocol="greedy").tokens
        os.kill(edge.pid, signal.SIGKILL)
        answer = device.generate([1, 3, 2], max_tokens=8, protocol="greedy")
        assert answer.tokens
        assert {*answer.tokens} <= {0, 2, 5}


def test_it_is_no_target(tmp_path: Path) -> None:
    cut = tiny_artifact(tmp_path / "cut", vocab=6, seed=2, head_tokens=[0, 2, 5])
    whole = tiny_artifact(tmp_path / "whole", vocab=6, seed=2)
    with pytest.raises(Exception, match="computes logits for only 3 of its tokens") as caught:
        EdgeServer(cut.path, context=96, threads=1).__enter__()
    assert "\n" not in str(caught.value).strip()
    with pytest.raises(ArtifactError, match="computes logits for only 3 of its tokens"):
        OpenPair(whole.path, cut.path)
    opened = OpenPair(cut.path, whole.path)  # as the drafter that a head judges
    bridge = opened.vocabularies.bridge()
    assert isinstance(bridge, TrivialBridge)
    assert [token for token in range(6) if bridge.can_draft(token)] == [0, 2, 5]
    with pytest.raises(ArtifactError, match="computes logits for only 3 of its tokens"):
        try_drafters({"a": whole}, cut, ["a"], rtt_s=0, target_s=None, progress=lambda *_: None)


def test_a_trial_compares_it_with_others(tmp_path: Path) -> None:
    cut = tiny_artifact(tmp_path / "cut", seed=1, head_tokens=[*range(0, 127, 2), 127])
    whole = tiny_artifact(tmp_path / "whole", seed=1)
    drafters = try_drafters(
        {"cut": cut, "whole": whole}, whole, ["a"], rtt_s=0, target_s=1e-3, progress=lambda *_: None
    )
    assert drafters["whole"].acceptance == pytest.approx(1.0, abs=1e-3)
    assert 0.0 < drafters["cut"].acceptance < 0.9
    shutil.rmtree(tmp_path)
