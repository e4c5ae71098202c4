"""Graphs as ONNX Runtime GenAI's builder writes them, behind a real edge: the target's law."""

from __future__ import annotations

import pytest

from pilotfish import Device, EdgeServer, PilotfishError
from tests.bridge.test_drafter import OWN, THEIRS
from tests.support.genai_folders import genai_artifact
from tests.support.in_process import Reader, expect_the_same
from tests.system.test_lossless import EOS, PROMPT, VOCAB, expect_law

CONTEXT = 128
ANSWERS = 300
LONG = [1, 3, 2, 4, 0] * 8  # beyond the window of 24
# Which ends are such graphs; the others are of our own exporter, of the same weights.
PAIRS = [
    pytest.param(("genai", "genai"), id="both"),
    pytest.param(("genai", "ours"), id="target", marks=pytest.mark.slow),
    pytest.param(("ours", "genai"), id="draft"),
]


@pytest.fixture(scope="module", params=["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def models(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    paths = {}
    for end, seed in (("target", 1), ("draft", 2)):
        artifact = genai_artifact(folder / end, architecture=request.param, vocab=VOCAB, seed=seed)
        paths[end, "genai"] = artifact.path
        paths[end, "ours"] = folder / f"{end}-folder-ours"
    return paths


@pytest.fixture(scope="module", params=PAIRS)
def pair(request, models):
    target, draft = request.param
    with (
        EdgeServer(models["target", target], rate=1e6, context=CONTEXT, threads=1) as edge,
        Device(models["draft", draft], edge.endpoint, threads=1) as device,
    ):
        yield device, models["target", "ours"], request.param


def test_answers_are_those_of_the_protocol_alone(pair, models):
    """By our own engine's logits."""
    device, reference, _ = pair
    both = [Reader(reference), Reader(models["draft", "ours"])]
    options = {"protocol": "tslt", "temperature": 1.0, "window": 2}
    expect_the_same(device, both, PROMPT, EOS, **options)


@pytest.mark.slow
def test_answers_follow_the_targets_law(pair):
    """The law is that of our own engine's logits."""
    device, reference, _ = pair
    expect_law(device, reference, ANSWERS)


@pytest.mark.parametrize("protocol", ["greedy", "ahead", "dssd", "coupled"])
def test_all_are_the_stream(pair, protocol):
    """Turn by turn, each of which takes back much of the last."""
    device, _, _ = pair
    heat = 1.0 if protocol == "coupled" else 0.0
    for prompt in (PROMPT, LONG, LONG[:30], [*LONG[:33], 4, 4]):
        common = {"max_tokens": 40, "seed": 5, "temperature": heat}
        wanted = device.generate(prompt, protocol="stream", **common)
        got = device.generate(prompt, protocol=protocol, **common)
        assert got.tokens == wanted.tokens


def test_trees_are_not_offered(pair):
    device, _, _ = pair
    with pytest.raises(PilotfishError, match="has a graph without a mask for token trees, so"):
        device.generate(PROMPT, protocol="tree", expansion=(2, 1), temperature=1.0)
    answer = device.generate(PROMPT, protocol="auto", temperature=1.0, max_tokens=20)
    assert answer.protocol != "tree"


def test_both_engines_targets_say_the_same(models):
    answers = []
    for kind in ("genai", "ours"):
        with (
            EdgeServer(models["target", kind], rate=1e6, context=CONTEXT, threads=1) as edge,
            Device(models["target", "genai"], edge.endpoint, threads=1) as device,
        ):
            answer = device.generate(LONG, protocol="greedy", max_tokens=40)
            answers.append(answer.tokens)
            # the drafter is the target: all that it drafts comes true
            drafted = sum(item.window for item in answer.rounds[:-1])
            assert sum(item.accepted for item in answer.rounds[:-1]) == drafted
    assert answers[0] == answers[1]


def test_sessions_side_by_side_do_not_touch(models):
    """Devices whose answers are told turn about: each slot of the edge has its own text."""
    with EdgeServer(
        models["target", "genai"], rate=1e6, context=CONTEXT, threads=1, sessions=3
    ) as edge:
        devices = [Device(models["draft", "genai"], edge.endpoint, threads=1) for _ in range(3)]
        try:
            prompts = [PROMPT, LONG, LONG[3:20]]
            both = list(zip(devices, prompts, strict=True))
            wanted = [
                devex.generate(text, protocol="stream", max_tokens=30).tokens
                for devex, text in both
            ]
            for count in (10, 20, 30):
                for (devex, text), whole in zip(both, wanted, strict=True):
                    got = devex.generate(text, protocol="greedy", max_tokens=count).tokens
                    assert got == whole[:count]
        finally:
            for devex in devices:
                devex.close()


def test_protocols_that_need_hidden_states_are_refused(pair):
    device, _, ends = pair
    reply = "without hidden states, which" if ends[1] == "genai" else "no decision head"
    with pytest.raises(PilotfishError, match=reply):
        device.generate(PROMPT, protocol="wisv-full", max_tokens=5)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_across_a_bridge_they_are_the_stream(architecture, tmp_path):
    target, draft = (
        genai_artifact(tmp_path / end, architecture=architecture, tokens=tokens, eos=eos, seed=seed)
        for end, tokens, eos, seed in (("target", THEIRS, "<end>", 1), ("draft", OWN, "<x>", 2))
    )
    with (
        EdgeServer(target.path, rate=1e6, context=CONTEXT, threads=1) as edge,
        Device(draft.path, edge.endpoint, threads=1) as device,
    ):
        for protocol in ("greedy", "coupled", "ahead"):
            common = {"max_tokens": 40, "seed": 3}
            common["temperature"] = 0.0 if protocol == "greedy" else 1.0
            wanted = device.generate("ab cd abcd a", protocol="stream", **common)
            got = device.generate("ab cd abcd a", protocol=protocol, **common)
            assert got.tokens == wanted.tokens
