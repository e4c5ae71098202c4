"""Models of the table of architectures behind a real edge: the text is the target's alone.

Each is target and drafter, of one vocabulary and of two, as its class reads a config.json with the
flags of a real checkpoint; weights are random.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.export.model import export_model
from tests.support.bridged import SMALL
from tests.support.configs import read_config
from tests.support.tiny import RandomSource
from tests.system.test_lossless import PROMPT, VOCAB, expect_law

CONTEXT = 128
ANSWERS = 300
LONG = [1, 3, 2, 4, 0] * 8  # beyond the windows of 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)],
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
MODELS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16,
                    "layer_types": ALTERNATING},
    "phi3": {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 64,
             "rope_scaling": LONGROPE, "tie_word_embeddings": True},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0], "tie_word_embeddings": True},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
                "sliding_window": 16, "layer_types": ALTERNATING},
    "granite": {"embedding_multiplier": 12.0, "logits_scaling": 2.0, "residual_multiplier": 0.22,
                "attention_multiplier": 0.0625, "tie_word_embeddings": True},
}  # fmt: skip


def write(path: Path, model_type: str, seed: int, tokens: list[str] | None = None) -> None:
    """Export a random model of the class; `tokens` are its vocabulary but for the end."""
    vocab = VOCAB if tokens is None else len(tokens) + 1
    values = {"model_type": model_type, **SIZES, **MODELS[model_type], "vocab_size": vocab}
    config = read_config(values, f"tiny-{seed}", "config.json")
    source = RandomSource(config, seed, tokens=tokens, eos=f"<end of {seed}>", sharpness=2.0)
    export_model(source, path, context=CONTEXT)


class Ends(NamedTuple):
    """An edge, a device of its vocabulary, and one of another."""

    folder: Path
    device: Device
    across: Device


@pytest.fixture(scope="module", params=MODELS)
def ends(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ends]:
    folder = tmp_path_factory.mktemp("ends")
    write(folder / "target", request.param, 1)
    write(folder / "draft", request.param, 2)
    write(folder / "other", request.param, 3, tokens=SMALL)
    with (
        EdgeServer(folder / "target", rate=1e6, context=CONTEXT, threads=1) as edge,
        Device(folder / "draft", edge.endpoint, threads=1) as device,
        Device(folder / "other", edge.endpoint, threads=1) as across,
    ):
        yield Ends(folder, device, across)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["device", "across"])
def test_answers_follow_the_targets_law(ends: Ends, text: str) -> None:
    expect_law(getattr(ends, text), ends.folder / "target", ANSWERS)


@pytest.mark.parametrize("protocol", ["greedy", "ahead", "tree", "dssd"])
def test_at_temperature_zero_all_are_the_stream(ends: Ends, protocol: str) -> None:
    for prompt in (PROMPT, LONG):
        wanted = ends.device.generate(prompt, protocol="stream", max_tokens=40)
        for device in (ends.device, ends.across):
            got = device.generate(prompt, protocol=protocol, max_tokens=40)
            assert got.tokens == wanted.tokens


@pytest.mark.parametrize("protocol", ["coupled", "ahead"])
def test_with_a_seed_they_are_the_seeded_stream(ends: Ends, protocol: str) -> None:
    for seed in range(3):
        common: dict[str, Any] = {"max_tokens": 40, "seed": seed, "temperature": 1.0}
        wanted = ends.device.generate(LONG, protocol="stream", **common)
        for device in (ends.device, ends.across):
            got = device.generate(LONG, protocol=protocol, **common)
            assert got.tokens == wanted.tokens


def test_drafts_that_cross_a_bridge_come_true(ends: Ends) -> None:
    answer = ends.across.generate(LONG, protocol="coupled", temperature=1.0, max_tokens=60, seed=1)
    assert sum(each.accepted for each in answer.rounds) > 0
