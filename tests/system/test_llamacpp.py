"""llama.cpp as drafter and as target of a real edge: every protocol says what `stream` does."""

import numpy as np
import pytest

from pilotfish import Device, EdgeServer
from pilotfish.speculation.distributions import Sampling
from tests.support.enumeration import p_value
from tests.support.gguf_models import gguf_artifact, gguf_file, llama_cpp
from tests.support.tiny import tiny_artifact
from tests.system.test_lossless import LENGTH, THRESHOLD, VOCAB, law
from tests.system.test_lossless import PROMPT as LAW_PROMPT

llama_cpp()
PROMPT = [1, 30, 2, 77]
ANSWERS = 300


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target and a drafter that is a little like it, for both engines."""
    from pilotfish.export.model import export_model

    folder = tmp_path_factory.mktemp("models")
    made = {}
    for name, seed in (("target", 1), ("draft", 2)):
        made[name, "llamacpp"] = gguf_artifact(folder / name, seed=seed).path
        file = gguf_file(folder / f"{name}.gguf", seed=seed)
        made[name, "ours"] = export_model(str(file), folder / f"{name}-ours").path
    # of another vocabulary: bytes and pairs of letters
    small = tiny_artifact(folder / "small", vocab=300, eos="<the end>", seed=3)
    made["target", "small"] = made["draft", "small"] = small.path
    return made


@pytest.fixture(scope="module")
def edges(models):
    with (
        EdgeServer(models["target", "llamacpp"], sessions=6, threads=1) as theirs,
        EdgeServer(models["target", "ours"], sessions=6, threads=1) as ours,
        EdgeServer(models["target", "small"], sessions=6, threads=1) as small,
    ):
        yield {"llamacpp": theirs, "ours": ours, "small": small}


WAYS = [
    ("greedy", {"window": 4, "temperature": 0.0}),
    ("tree", {"expansion": (3, 2, 1), "temperature": 0.0}),
    ("coupled", {"window": 3, "temperature": 1.0}),
    ("ahead", {"temperature": 1.0}),
]


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("llamacpp", "llamacpp"),
        ("llamacpp", "ours"),
        ("ours", "llamacpp"),
        ("llamacpp", "small"),  # across a bridge
        ("small", "llamacpp"),
    ],
)
def test_every_protocol_says_what_stream_says(models, edges, target, draft):
    with Device(models["draft", draft], edges[target].endpoint, threads=1) as device:
        for protocol, options in WAYS:
            for seed in (1, 2):
                settings = {
                    "temperature": options["temperature"], "seed": seed, "max_tokens": 24,
                }  # fmt: skip
                alone = device.generate(PROMPT, protocol="stream", **settings)
                answer = device.generate(PROMPT, protocol=protocol, **{**options, **settings})
                assert answer.tokens == alone.tokens, protocol


def test_both_engines_targets_say_the_same(models, edges):
    answers = []
    for engine in ("llamacpp", "ours"):
        endpoint = edges[engine].endpoint
        with Device(models["target", "llamacpp"], endpoint, threads=1) as device:
            answer = device.generate(PROMPT, protocol="greedy", temperature=0.0, max_tokens=40)
            answers.append(answer.tokens)
            # the drafter is the target: all that it drafts comes true
            assert sum(item.accepted for item in answer.rounds) > 24
    assert answers[0] == answers[1]


def test_answers_across_a_bridge_follow_the_targets_law(models, tmp_path):
    target = tiny_artifact(tmp_path / "target", vocab=VOCAB, seed=1).path
    outcomes = law(target, Sampling(temperature=1.0))
    counts = dict.fromkeys(outcomes, 0)
    accepted = 0
    with (
        EdgeServer(target, rate=1e6, threads=1) as edge,
        Device(models["draft", "llamacpp"], edge.endpoint, threads=1) as device,
    ):
        for seed in range(ANSWERS):
            answer = device.generate(
                LAW_PROMPT, protocol="tslt", temperature=1.0, window=2, max_tokens=LENGTH, seed=seed
            )
            counts[tuple(answer.tokens)] += 1
            accepted += sum(each.accepted for each in answer.rounds)
    expected = np.array(list(outcomes.values())) * ANSWERS
    assert p_value(np.array(list(counts.values())), expected) > THRESHOLD
    assert accepted > ANSWERS / 20
