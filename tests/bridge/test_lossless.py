"""As `tests/system/test_lossless.py`, with a drafter of another vocabulary: both ends are real.

Answers are those of the protocol in one process; the slow tests look at their law by χ² over
thousands. What is determined is the target's own, token for token.
"""

from contextlib import ExitStack
from functools import cache

import numpy as np
import pytest

from pilotfish import Device, EdgeServer
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.speculation.distributions import Sampling
from tests.support.bridged import END, TARGETS_END, WORDS, ids, pair_of
from tests.support.enumeration import p_value
from tests.support.in_process import Reader, RealDrafter, expect_the_same
from tests.support.registered import LOSSLESS, completed, sampling_only
from tests.support.tiny import tiny_artifact
from tests.system.test_lossless import (
    ANSWERS,
    PROMPT,
    SHAPED,
    THRESHOLD,
    frequencies,
    law_after,
    read,
)

PADDED = "the same, padded otherwise"
PAIRS = [*(words for words in WORDS if words != "nothing else"), PADDED]


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A device of that pair, its drafter and its target; each is opened once."""
    with ExitStack() as stack:

        @cache
        def open_(words):
            draft, target = artifacts(tmp_path_factory.mktemp("pair"), words)
            edge = stack.enter_context(EdgeServer(target.path, rate=1e6, context=96, threads=1))
            device = stack.enter_context(Device(draft.path, edge.endpoint, threads=1))
            return device, draft, target

        yield open_


def artifacts(folder, words):
    """The drafter's and the target's."""
    if words == PADDED:
        return (
            tiny_artifact(folder / "draft", vocab=64, padded_vocab=80, seed=2),
            tiny_artifact(folder / "target", vocab=64, padded_vocab=72, seed=1),
        )
    draft, target = WORDS[words]
    return (
        tiny_artifact(folder / "draft", tokens=draft, eos=END, seed=2, sharpness=0.8),
        tiny_artifact(folder / "target", tokens=target, eos=TARGETS_END, seed=1, sharpness=0.8),
    )


def law_of_drafter(draft, pair, sampling):
    """That of answers which the drafter gives alone, across the bridge."""
    decoder, bridge = Decoder(draft), pair.bridge()
    bridge.start(pair.prompt(PROMPT))

    def logits(answer):
        return bridge.project(read(decoder, bridge.context(ids([*PROMPT, *answer]))))

    return law_after(logits, sampling, pair.target.eos_ids[0])


# What crosses the bridge is enumerated in `test_law.py`.
LISTED = [
    ("tslt", {"temperature": 1.0, "window": 3}),  # 64 tokens are kept; 3 are shared
    ("tree", {"temperature": 1.0, "expansion": (2, 2), "draft_top_k": 2}),
    ("dsd", {"temperature": 1.0, "window": 2}),
    ("tslt", {**SHAPED, "window": 2, "draft_top_p": 0.6, "draft_temperature": 0.7}),
    ("dssd", {"temperature": 1.0, "window": "auto"}),
    ("coupled", {"temperature": 1.0, "window": 2}),
]
CASES = completed(LISTED, sampling_only(LOSSLESS), window=2)


IDS = [f"{name}-{'-'.join(map(str, options.values()))}" for name, options in CASES]


@pytest.mark.parametrize(("protocol", "options"), CASES, ids=IDS)
def test_answers_are_those_of_the_protocol_alone(opened, protocol, options):
    device, draft, target = opened("partial")
    pair = pair_of("partial")
    expect_the_same(
        device,
        (Reader(target), None),
        PROMPT,
        pair.target.eos_ids[0],
        drafter=RealDrafter(draft, pair),
        protocol=protocol,
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("protocol", "options"), CASES, ids=IDS)
def test_answers_follow_the_targets_law(opened, protocol, options):
    device, draft, target = opened("partial")
    pair, decoder = pair_of("partial"), Decoder(target)
    shape = Sampling(**{k: v for k, v in options.items() if k in ("temperature", "top_k", "top_p")})
    outcomes = law_after(lambda a: read(decoder, [*PROMPT, *a]), shape, pair.target.eos_ids[0])
    counts = frequencies(device, outcomes, protocol=protocol, **options)
    expected = np.array(list(outcomes.values())) * ANSWERS
    assert p_value(counts, expected) > THRESHOLD
    # the test can fail: the drafter's own law is far away
    drafters = law_of_drafter(draft, pair, shape)
    wrong = np.array([drafters.get(ids, 0.0) for ids in outcomes]) * ANSWERS
    assert p_value(counts, np.maximum(wrong, 1e-9)) < 1e-12


def test_the_drafter_is_of_use(opened):
    """Drafts are accepted, rejected, and followed by tokens that it does not have."""
    device, *_ = opened("partial")
    shared, reply, accepted, drafted = pair_of("partial").shared.target, set(), 0, 0
    for seed in range(50):
        answer = device.generate(
            PROMPT, protocol="dsd", window=2, temperature=1.0, max_tokens=40, seed=seed
        )
        reply |= {*answer.tokens}
        accepted += sum(each.accepted for each in answer.rounds)
        drafted += sum(each.window for each in answer.rounds)
    assert 0.1 < accepted / drafted < 0.9
    assert reply - {*shared.tolist()}


# Token for token

TEXTS = ["", "a", "ba", "abc", "cab ab", "bbaab", "aé", "dd aa"]


def prompts(device):
    """Texts, which either end reads in its own template, and ids of the target."""
    rng = np.random.default_rng(3)
    size = device.tokenizer.vocab_size
    return [*TEXTS, *(rng.integers(0, size, length).tolist() for length in (1, 2, 5, 9))]


@pytest.mark.parametrize("words", PAIRS)
def test_greedy_is_stream_at_temperature_zero(opened, words):
    device, *_ = opened(words)
    for prompt in prompts(device):
        wanted = device.generate(prompt, protocol="stream", max_tokens=24)
        for window in (1, 4):
            got = device.generate(prompt, protocol="greedy", max_tokens=24, window=window)
            assert got.tokens == wanted.tokens


@pytest.mark.parametrize("words", PAIRS)
@pytest.mark.parametrize("protocol", sampling_only(LOSSLESS))
def test_at_temperature_zero_all_are_stream(opened, words, protocol):
    device, *_ = opened(words)
    wanted = device.generate(PROMPT, protocol="stream", max_tokens=24)
    for drafter in (None, 1.0):  # a drafter may sample all the same
        common = {"max_tokens": 24, "seed": 5, "draft_temperature": drafter}
        got = device.generate(PROMPT, protocol=protocol, window=3, **common)
        assert got.tokens == wanted.tokens


@pytest.mark.parametrize("words", PAIRS)
@pytest.mark.parametrize("shape", [{"temperature": 1.0}, SHAPED])
def test_coupled_is_the_targets_own_seeded_sample(opened, words, shape):
    device, *_ = opened(words)
    for seed, prompt in enumerate(prompts(device)):
        common = {"max_tokens": 24, "seed": seed, **shape}
        wanted = device.generate(prompt, protocol="stream", **common)
        window = (1, 4, "auto")[seed % 3]
        got = device.generate(prompt, protocol="coupled", window=window, **common)
        assert got.tokens == wanted.tokens
