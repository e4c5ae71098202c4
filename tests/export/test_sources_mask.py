"""The mask token of a drafter of many tokens per pass: what is read, kept, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotfish.cli import main
from pilotfish.drafting.model import SharedModel
from pilotfish.drafting.model_drafter import ModelDrafter
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.engines.passes import Pass
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from pilotfish.export.sources import open_source
from pilotfish.speculation.distributions import Sampling
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, SamplingParams
from tests.support.configs import read_config
from tests.support.small_checkpoints import LLAMA, TOKENS, VOCAB, tiny_weights, write_directory
from tests.support.tiny import tiny_artifact

PADDING = len(TOKENS) + 2  # as in Qwen2.5: a row of the embedding without a token
PARD2 = {"spd_type": "pard2", "pard2": True, "pard2_scale": 0.02, "pard2_proj_bias": False,
         "pard2_target_dim": 16384, "pard2_target_layers": [-1, -8]}  # fmt: skip
CAUSAL = {"mask_token_id": 7, "causal": True, "sample_from_anchor": True}
# As PARD's training writes it: the config.json of Qwen2.5-0.5B-Instruct, and two keys.
PARD_QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
    "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21,
    "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
    "num_key_value_heads": 2, "pard_token": 151665, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "sliding_window": 32768, "spd_type": "pard",
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.46.1",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
         "num_hidden_layers": 2, "eos_token_id": 259, "bos_token_id": 0}  # fmt: skip


def mask_token(**keys: Any) -> int | None:
    return read_config(LLAMA | keys, "tiny", "config.json").mask_token


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"pard_token": None}, None),
        ({"pard_token": 7, "spd_type": "pard"}, 7),
        ({"pard_token": VOCAB - 1}, VOCAB - 1),
        ({"ptd_token_id": 0}, 0),
        ({"dflash_config": CAUSAL}, 7),
        ({"dflash_config": CAUSAL, "pard_token": 7, "draft_vocab_size": None}, 7),
        ({"pard_token": 7, **PARD2}, 7),
    ],
)
def test_the_mask_token_is_read_under_all_its_names(
    keys: dict[str, Any], expected: int | None
) -> None:
    assert mask_token(**keys) == expected


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"pard_token": -1}, "pard_token is -1.*row of the embedding"),
        ({"ptd_token_id": VOCAB}, f"ptd_token_id is {VOCAB}"),
        ({"pard_token": "7"}, "pard_token is '7'.*int"),
        ({"pard_token": 7, "ptd_token_id": 8}, "pard_token and ptd_token_id name different"),
        ({"ptd_token_id": 7, "draft_vocab_size": 32}, "hidden states.*draft_vocab_size 32"),
        ({"dflash_config": CAUSAL, "target_layer_ids": [1]}, r"hidden states \(target_layer_ids"),
        ({"dflash_config": CAUSAL | {"target_layer_ids": [1, 9]}}, r"dflash_config\.target_layer"),
        ({"dflash_config": {"mask_token_id": 7}}, "both directions.*causal"),
        ({"dflash_config": {"mask_token_id": 7, "causal": True}}, "its own place"),
        ({"pard_token": 7, "sample_from_anchor": False}, "its own place"),
        ({"pard_token": 7, "para_num": 0}, "para_num is 0"),
        ({"pard_token": 7, "para_num": 8, "block_size": 4}, "para_num and block_size name diff"),
        ({"dflash_config": CAUSAL | {"selector_rank": 8}}, "keys: .*selector_rank"),
    ],
)
def test_other_drafters_are_refused_by_name(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ExportError, match=named):
        mask_token(**keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"architectures": ["LlamaForCausalLMEagle3"]},
        {"architectures": ["PEagleDraftModel"], "sliding_window": 64},
        {"architectures": ["Qwen3NextMTP"]},
        {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}},
        {"target_hidden_size": 64, "auto_map": {"AutoModel": "eagle.Eagle"}},
        {"speculators_model_type": "eagle3"},
    ],
)
def test_heads_without_a_mask_token_are_called_heads(keys: dict[str, Any]) -> None:
    with pytest.raises(ExportError, match=r"hidden states \(.*choose a drafter that reads only"):
        mask_token(**keys)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"pard_token": 7, "spd_type": "pard"}, None),
        ({"pard_token": 7, "para_num": 12}, 12),
        ({"pard_token": 7, "para_num": None}, None),
        ({"pard_token": 7, **PARD2}, 16),
        ({"pard_token": 7, **PARD2, "para_num": 6}, 6),
        ({"dflash_config": CAUSAL | {"block_size": 10}}, 10),
        ({"dflash_config": CAUSAL, "block_size": 16}, 16),
        ({}, None),
    ],
)
def test_the_number_of_drafts_is_taken_if_it_is_stated(
    keys: dict[str, Any], expected: int | None
) -> None:
    assert read_config(LLAMA | keys, "tiny", "config.json").drafts_per_pass == expected


@pytest.mark.parametrize(("stated", "expected"), [(None, 8), (1, 1), (5, 5), (16, 16), (400, 16)])
def test_a_drafter_makes_as_many_drafts_as_it_was_trained_for(
    tmp_path: Path, stated: int | None, expected: int
) -> None:
    path = tiny_artifact(tmp_path / "a", vocab=32, mask_token=31, drafts_per_pass=stated).path
    assert Artifact.open(path).manifest.drafts_per_pass == stated
    model = SharedModel.open(Artifact.open(path), slots=1, provider="cpu", threads=1, context=None)
    assert model.drafts_per_pass == expected
    assert {1, expected, 2 * expected - 1} <= {*model.pass_times}


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def qwen2_logits(
    weights: dict[str, np.ndarray], config: dict[str, Any], tokens: np.ndarray
) -> np.ndarray:
    """Qwen2 by its paper, without any of the project's code: logits [n, V] of tokens [n]."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size, count = config["hidden_size"] // heads, len(tokens)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        root = np.sqrt((x**2).mean(axis=-1, keepdims=True) + config["rms_norm_eps"])
        return x / root * weights[f"{name}.weight"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    rates = config["rope_theta"] ** (-np.arange(0, size, 2) / size)
    angles = np.outer(np.arange(count), np.concatenate([rates, rates]))[:, None]

    def turn(x: np.ndarray) -> np.ndarray:
        half = np.concatenate([-x[..., size // 2 :], x[..., : size // 2]], axis=-1)
        return x * np.cos(angles) + half * np.sin(angles)

    x = weights["model.embed_tokens.weight"].astype(np.float64)[tokens]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        y = norm(x, f"{name}.input_layernorm")
        q, k, v = (linear(y, f"{name}.self_attn.{part}_proj") for part in "qkv")
        q = turn(q.reshape(count, heads, size))
        k = turn(k.reshape(count, kv_heads, size)).repeat(heads // kv_heads, axis=1)
        v = v.reshape(count, kv_heads, size).repeat(heads // kv_heads, axis=1)
        scores = np.einsum("ihd,jhd->hij", q, k) / size**0.5
        scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
        mixed = np.einsum("hij,jhd->ihd", softmax(scores), v).reshape(count, -1)
        x = x + linear(mixed, f"{name}.self_attn.o_proj")
        y = norm(x, f"{name}.post_attention_layernorm")
        gate = linear(y, f"{name}.mlp.gate_proj")
        inner = gate / (1.0 + np.exp(-gate)) * linear(y, f"{name}.mlp.up_proj")
        x = x + linear(inner, f"{name}.mlp.down_proj")
    return norm(x, "model.norm") @ weights["model.embed_tokens.weight"].T


def test_a_checkpoint_like_pards_drafts_as_its_authors_do(tmp_path: Path) -> None:
    """Published keys, small sizes, random weights: drafts follow from 7 masks after the text."""
    config = PARD_QWEN | SMALL
    weights = {
        name: value * (0.3 if "proj" in name or "embed" in name else 1.0)
        for name, value in tiny_weights(config).items()
    }
    source = write_directory(tmp_path / "m", config, weights=weights)
    assert main(["export", "model", str(source), "--out", str(tmp_path / "a")]) == 0
    artifact = Artifact.open(tmp_path / "a")
    assert artifact.manifest.mask_token == PARD_QWEN["pard_token"]
    assert artifact.manifest.drafts_per_pass is None
    drafter = ModelDrafter.open(artifact, provider="cpu", threads=1, context=256)
    assert drafter.drafts_per_pass == 8
    text = np.array([40, 7, 99, 200, 3], dtype=np.uint32)
    params = SamplingParams(sampling=Sampling(), seed=0)
    for _ in range(3):
        draft = drafter.draft(text, (1,) * 8, PROTOCOL_REGISTRY["greedy"], params, ends=())
        tokens = np.concatenate([text, np.full(7, PARD_QWEN["pard_token"])])
        logits = qwen2_logits(weights, config, tokens)[-8:, : artifact.manifest.vocab_size]
        assert draft.ids.tolist() == logits.argmax(axis=1).tolist()
        text = np.concatenate([text, draft.ids[:3], [11]]).astype(np.uint32)


def test_an_artifact_keeps_the_mask_token_and_its_model_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_directory(tmp_path / "m", LLAMA | {"pard_token": PADDING, "spd_type": "pard"})
    path = export_model(str(source), tmp_path / "out" / "masked").path
    manifest = Artifact.open(path).manifest
    assert manifest.mask_token == PADDING
    assert manifest.vocab_size <= PADDING < manifest.readable_tokens
    decoder = Decoder(path, threads=1)
    output = decoder.forward([Pass(0, np.array([1, PADDING, PADDING]), 3)])[0]
    assert output.logits.shape == (3, manifest.vocab_size)  # the mask has no logit
    with pytest.raises(ValueError, match="token ids"):
        decoder.check([Pass(0, np.array([PADDING + 1]), 1)])
    assert main(["export", "list", str(tmp_path / "out")]) == 0
    assert "several drafts per pass" in " ".join(capsys.readouterr().out.split())


def test_models_without_a_mask_token_have_the_manifest_of_before(tmp_path: Path) -> None:
    path = export_model(open_source(str(write_directory(tmp_path / "m"))), tmp_path / "out").path
    fields = json.loads((path / "manifest.json").read_bytes())
    assert not {"mask_token", "drafts_per_pass"} & {*fields}
