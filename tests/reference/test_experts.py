"""Mixtures of experts against transformers: every class, and gpt-oss's blocks of MXFP4.

10⁻³ on logits; 10⁻⁴ was the most when this was written. Routers are sharp and experts differ, so a
wrong expert or weight shows.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.export.model import export_model
from pilotfish.export.quantize import quantize
from pilotfish.export.sources.huggingface import DirectorySource
from tests.support.runnable import DISTINCT, needs
from tests.support.small_checkpoints import TOKENS, VOCAB, tokenizer_json

pytestmark = pytest.mark.reference
TEXT = np.random.default_rng(1).integers(0, len(TOKENS), 200)
PIECES = (1, 2, 9, 1, 30, 5, 17)  # again and again
TOLERANCE = 1e-3
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "bos_token_id": 0,
    "eos_token_id": 259,
    "pad_token_id": None,
}
LOCAL = BASE | {"num_local_experts": 4}
TOTAL = BASE | {"num_experts": 5}
NARROW = TOTAL | {"moe_intermediate_size": 32}
SHARED = NARROW | {"shared_expert_intermediate_size": 64}
GRANITE = LOCAL | {
    "embedding_multiplier": 6.0,
    "logits_scaling": 2.5,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.17,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 128,
}
GPT_OSS = LOCAL | {"head_dim": 16, "sliding_window": 16, "rope_parameters": YARN}
# Name → model_type and settings; what the class makes of weights as they are, and as they are not.
CLASSES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "mixtral": ("mixtral", LOCAL),
    "mixtral-window": ("mixtral", LOCAL | {"sliding_window": 16}),
    "qwen2_moe": ("qwen2_moe", SHARED),
    "qwen2_moe-plain-layer": ("qwen2_moe", SHARED | {"mlp_only_layers": [0]}),
    "qwen3_moe": ("qwen3_moe", NARROW | {"head_dim": 32, "norm_topk_prob": True}),
    "qwen3_moe-every-second": ("qwen3_moe", NARROW | {"decoder_sparse_step": 2}),
    "qwen2_moe-window": (
        "qwen2_moe",
        SHARED | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3_moe-window": ("qwen3_moe", NARROW | {"use_sliding_window": True, "sliding_window": 16}),
    "olmoe": ("olmoe", TOTAL),
    "granitemoe": ("granitemoe", GRANITE),
    "granitemoeshared": ("granitemoeshared", GRANITE | {"shared_intermediate_size": 64}),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss-one-expert": ("gpt_oss", GPT_OSS | {"num_experts_per_tok": 1, "swiglu_limit": 0.5}),
    # Without rotary parameters it has yarn's, from 4,096 positions.
    "gpt_oss-bare": ("gpt_oss", LOCAL | {"head_dim": 16, "sliding_window": 16}),
}


class Reference(NamedTuple):
    """A checkpoint, and transformers' logits for TEXT, [S, V]."""

    path: Path
    logits: NDArray[np.float32]


def make_model(name: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind, settings = CLASSES[name]
    torch.manual_seed(5)
    config = CONFIG_MAPPING[kind](**copy.deepcopy(dict(settings)))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn_like(weight) * 1.5 / weight.shape[-1] ** 0.5)
            else:
                weight.add_(0.2 * torch.randn_like(weight))
    return model


def answer(model: Any) -> NDArray[np.float32]:
    import torch

    with torch.no_grad():
        logits = model(torch.from_numpy(TEXT)[None], use_cache=False).logits[0]
    result: NDArray[np.float32] = logits.numpy()[:, : len(TOKENS)]
    return result


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(name: str) -> Reference:
        path = tmp_path_factory.mktemp(name)
        model = make_model(name)
        model.save_pretrained(path)
        (path / "tokenizer.json").write_text(tokenizer_json(), "utf-8")
        return Reference(path, answer(model))

    return make


def read(path: Path, out: Path, dialect: str) -> NDArray[np.float32]:
    """Read TEXT in pieces, with wrong tokens behind each that are rolled back."""
    needs(dialect)
    decoder = Decoder(export_model(str(path), out, dialect=dialect), slots=2)
    result, at = [], 0
    while at < len(TEXT):
        piece = TEXT[at : at + PIECES[len(result) % len(PIECES)]]
        result.append(decoder.forward([Pass(1, piece)])[0].logits.copy())
        at += len(piece)
        decoder.forward([Pass(1, TEXT[3:7])])
        decoder.rollback(1, at)
    return np.concatenate(result)


@pytest.mark.parametrize("dialect", DISTINCT)
@pytest.mark.parametrize("name", CLASSES)
def test_answers_as_transformers_does(
    reference: Any, tmp_path: Path, name: str, dialect: str
) -> None:
    path, logits = reference(name)
    assert np.abs(read(path, tmp_path / "out", dialect) - logits).max() < TOLERANCE


def test_windows_of_qwen2_moe_follow_its_rule(tmp_path: Path) -> None:
    """A file without layer_types: every other one of the first layers has the window."""
    from transformers import AutoModelForCausalLM

    make_model("qwen2_moe-window").save_pretrained(tmp_path / "m")
    values = json.loads((tmp_path / "m/config.json").read_text())
    del values["layer_types"]
    (tmp_path / "m/config.json").write_text(json.dumps(values))
    (tmp_path / "m/tokenizer.json").write_text(tokenizer_json(), "utf-8")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", attn_implementation="eager")
    logits = read(tmp_path / "m", tmp_path / "out", "opset24")
    assert np.abs(logits - answer(model.float().eval())).max() < TOLERANCE


@pytest.fixture(scope="module")
def in_blocks(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A gpt-oss whose experts are in MXFP4, as OpenAI's own are."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    path = tmp_path_factory.mktemp("mxfp4")
    model = make_model("gpt_oss")
    model.save_pretrained(path)
    stored = load_file(path / "model.safetensors")
    rng = np.random.default_rng(2)
    for i, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name)
            experts, width, rows = weight.shape
            blocks = rng.integers(0, 256, (experts, rows, width // 32, 16), np.uint8)
            scales = rng.integers(121, 125, (experts, rows, width // 32), np.uint8)
            exact = convert_moe_packed_tensors(
                torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
            )
            weight.data.copy_(exact.reshape(weight.shape))
            ours = f"model.layers.{i}.mlp.experts.{name}"
            del stored[ours]
            stored |= {f"{ours}_blocks": blocks, f"{ours}_scales": scales}
    save_file(stored, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text(tokenizer_json(), "utf-8")
    return Reference(path, answer(model))


@pytest.mark.parametrize("dialect", DISTINCT)
def test_reads_blocks_of_mxfp4(in_blocks: Reference, tmp_path: Path, dialect: str) -> None:
    result = read(in_blocks.path, tmp_path / "out", dialect)
    assert np.abs(result - in_blocks.logits).max() < TOLERANCE


def test_int8_holds_mxfp4_exactly(in_blocks: Reference) -> None:
    source = DirectorySource(in_blocks.path, lambda *_: None)
    for part in ("gate_proj", "down_proj"):
        weight = source.tensor(f"model.layers.1.mlp.experts.2.{part}.weight")
        rounded = quantize(part, weight, 8, offsets_allowed=False)
        steps = rounded.codes.astype(np.float32) - rounded.zero_point
        again = (steps.reshape(len(weight), -1, 32) * rounded.scales[..., None]).reshape(
            weight.shape
        )
        np.testing.assert_allclose(again, weight, rtol=1e-6, atol=0)
