"""Models with states as target and as drafter of a real edge: the text is that of `stream`."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime.capi.onnxruntime_pybind11_state as native
import pytest

from pilotfish import Device, EdgeServer, PilotfishError
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.states import WINDOW
from pilotfish.speculation.distributions import Sampling
from tests.support.bridged import SMALL
from tests.support.enumeration import p_value
from tests.support.in_process import Reader, expect_the_same
from tests.support.thinned import thinned
from tests.support.tiny import tiny_artifact
from tests.system.test_lossless import EOS, LENGTH, PROMPT, THRESHOLD, VOCAB, law

CONTEXT = 256
ANSWERS = 300
STORY = [1, 3, 2, 4, 0] * 20  # reread from the middle by a later prompt
LINEAR = any(each.name == "LinearAttention" for each in native.get_all_operator_schema())
PAIRS = [("lfm2", "llama"), ("llama", "lfm2"), ("qwen3_5", "qwen3_5"), ("mamba2", "mamba")]


class Ends(NamedTuple):
    """An edge, a device of its vocabulary, and one of another."""

    folder: Path
    device: Device
    across: Device


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def ends(request, tmp_path_factory):
    if {"qwen3_5", "mamba", "mamba2"} & set(request.param) and not LINEAR:
        pytest.skip("this onnxruntime has no LinearAttention")
    folder = tmp_path_factory.mktemp("states")
    target, draft = request.param
    tiny_artifact(folder / "target", architecture=target, vocab=VOCAB, seed=1)
    tiny_artifact(folder / "draft", architecture=draft, vocab=VOCAB, seed=2)
    tiny_artifact(folder / "other", architecture=draft, tokens=SMALL, eos="<the end>", seed=6)
    with (
        EdgeServer(folder / "target", rate=1e6, context=CONTEXT, threads=1) as edge,
        Device(folder / "draft", edge.endpoint, threads=1) as device,
        Device(folder / "other", edge.endpoint, threads=1) as across,
    ):
        yield Ends(folder, device, across)


@pytest.mark.parametrize("protocol", ["tslt", "coupled"])
def test_answers_are_those_of_the_protocol_alone(ends, protocol):
    models = [Reader(ends.folder / end) for end in ("target", "draft")]
    options = {"protocol": protocol, "temperature": 1.0, "window": 2}
    expect_the_same(ends.device, models, PROMPT, EOS, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "protocol"), [("device", "tslt"), ("device", "coupled"), ("across", "tslt")]
)
def test_answers_follow_the_targets_law(ends, kind, protocol):
    device = getattr(ends, kind)
    outcomes = law(ends.folder / "target", Sampling(temperature=1.0))
    counts = dict.fromkeys(outcomes, 0)
    for seed in range(ANSWERS):
        answer = device.generate(
            PROMPT, protocol=protocol, temperature=1.0, window=2, max_tokens=LENGTH, seed=seed
        )
        counts[tuple(answer.tokens)] += 1
    expected = np.array(list(outcomes.values())) * ANSWERS
    assert p_value(np.array(list(counts.values())), expected) > THRESHOLD


@pytest.mark.parametrize("protocol", ["greedy", "ahead", "tslt", "dssd"])
@pytest.mark.parametrize("window", thinned([1, 4, WINDOW], [4]))
def test_at_temperature_zero_all_are_the_stream(ends, protocol, window):
    """Turn by turn, each of which takes back much of the last: answer, and part of the prompt."""
    device = ends.device
    for prompt in (PROMPT, STORY, STORY[:50], [*STORY[:70], 4, 4], STORY):
        wanted = device.generate(prompt, protocol="stream", max_tokens=40)
        got = device.generate(prompt, protocol=protocol, window=window, max_tokens=40)
        assert got.tokens == wanted.tokens


@pytest.mark.parametrize("protocol", ["coupled", "ahead"])
def test_with_a_seed_they_are_the_seeded_stream(ends, protocol):
    for seed in range(4):
        common = {"max_tokens": 60, "seed": seed, "temperature": 1.0}
        wanted = ends.device.generate(STORY[: 20 * seed + 9], protocol="stream", **common)
        for device in (ends.device, ends.across):
            got = device.generate(STORY[: 20 * seed + 9], protocol=protocol, **common)
            assert got.tokens == wanted.tokens


@pytest.mark.parametrize("protocol", ["greedy", "ahead", "dssd"])
def test_across_a_bridge_they_are_the_stream(ends, protocol):
    accepted = drafted = answers = 0
    prompts = (PROMPT, STORY, STORY[:50], [*STORY[:70], 4, 4])
    # under ahead it is the clock that decides which hints are in time
    while answers < len(prompts) or (protocol == "ahead" and not drafted and answers < 60):
        prompt = prompts[answers % len(prompts)]
        answers += 1
        wanted = ends.device.generate(prompt, protocol="stream", max_tokens=40)
        got = ends.across.generate(prompt, protocol=protocol, max_tokens=40)
        assert got.tokens == wanted.tokens
        accepted += sum(each.accepted for each in got.rounds)
        drafted += sum(each.nodes for each in got.rounds)
    assert drafted if protocol == "ahead" else accepted


def test_trees_are_not_offered(ends):
    device = ends.device
    with pytest.raises(PilotfishError, match=r"states,? (which|that) follow one chain"):
        device.generate(PROMPT, protocol="tree", expansion=(2, 1), temperature=1.0)
    answer = device.generate(PROMPT, protocol="auto", temperature=1.0, max_tokens=20)
    assert answer.protocol != "tree"


def test_windows_are_as_long_as_the_target_takes_them_back(ends):
    folder, device, _ = ends
    device.generate(PROMPT, protocol="greedy", window=32, max_tokens=60)
    stateful = Artifact.open(folder / "target").manifest.states is not None
    assert (device.welcome.limits.window == WINDOW) == stateful
    assert max(each.window for each in device.last.rounds) <= device.welcome.limits.window
