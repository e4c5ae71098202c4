"""Write tests/data/converted.json: what llama.cpp's converter makes of tiny checkpoints.

Each family's checkpoint has weights that follow from their names (`tests.support.converted`), so
that a checksum of each tensor says what the converter has done to it. Needs torch, transformers and
llama.cpp's sources, whose version of gguf goes first:

    PYTHONPATH=.:LLAMA_CPP/gguf-py python -m tests.reference.make_converted LLAMA_CPP
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from tests.support.converted import DATA, by_layer, checksums, made_weight
from tests.support.small_checkpoints import VOCAB, tokenizer_json

B: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 259,
    "pad_token_id": None,
    "intermediate_size": 64,
}
R = B | {"num_key_value_heads": 2}
WIDE, TIED = {"head_dim": 16}, {"tie_word_embeddings": True}
BIASED = {"attention_bias": True, "mlp_bias": True}
EIGHT = {"num_hidden_layers": 8, "sliding_window": 16}
GEMMA3 = R | WIDE | EIGHT | {"vocab_size": 261}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SCALES = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.15,
}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}


def rope(kind: str = "default", theta: float = 1e5, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


def each(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    tables = (table["rope_parameters"] for table in (full, sliding))
    return {
        "rope_parameters": dict(zip(("full_attention", "sliding_attention"), tables, strict=True))
    }


LLAMA3 = rope("llama3", 5e5, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)  # fmt: skip
YARN = rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=128)
PHI = R | {"original_max_position_embeddings": 64}
LAMBDA = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0,
          "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
          "original_max_position_embeddings": 64}  # fmt: skip

LINEAR = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    **rope(theta=1e7, partial_rotary_factor=0.25, mrope_section=[1, 1, 0]),
}
SPARSE = {key: value for key, value in (R | LINEAR | EXPERTS).items() if key != "intermediate_size"}
CONV = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "tie_word_embeddings": True,
    **rope(theta=1e6),
}
GEMMA4 = (
    R
    | EIGHT
    | {
        "vocab_size": 261,
        "head_dim": 8,
        "global_head_dim": 16,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
    }
    | each(rope("proportional", 1e6, partial_rotary_factor=0.25), rope(theta=1e4))
)
PER_LAYER = {
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 261,
    "num_kv_shared_layers": 4,
}
TIED_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.2": ("llama", R | LLAMA3 | TIED),
    "Granite code": ("llama", R | BIASED | TIED),
    "Llama, linear": ("llama", R | rope("linear", factor=4.0)),
    "Mistral Nemo": ("mistral", R | WIDE | {"sliding_window": None} | rope(theta=1e6)),
    "Mistral Small 3.1": ("mistral", R | WIDE | {"sliding_window": None} | rope(theta=1e9)),
    "Mixtral": ("mixtral", R | LOCAL | {"sliding_window": None}),
    "Ministral 3": ("ministral3", R | WIDE | TIED | {"rope_parameters": LAMBDA}),
    "Qwen 2.5": ("qwen2", R | TIED | rope(theta=1e6)),
    "Qwen 2.5, YaRN": ("qwen2", R | YARN),
    "Qwen 3": ("qwen3", R | WIDE | TIED | rope(theta=1e6)),
    "Qwen 2 MoE": ("qwen2_moe", R | EXPERTS | {"shared_expert_intermediate_size": 48}),
    "Qwen 3 MoE": ("qwen3_moe", R | EXPERTS | WIDE | {"norm_topk_prob": True}),
    "Gemma": ("gemma", R | WIDE | {"num_key_value_heads": 1}),
    "Gemma 2": ("gemma2", R | WIDE | {"sliding_window": 16, "query_pre_attn_scalar": 16}),
    "Gemma 2 27B": ("gemma2", R | WIDE | {"sliding_window": 16, "query_pre_attn_scalar": 8,
                                          "num_hidden_layers": 46}),
    "Gemma 3": ("gemma3_text", GEMMA3 | {"query_pre_attn_scalar": 16}),
    "Gemma 3 4B": ("gemma3_text", GEMMA3 | {"query_pre_attn_scalar": 16} | each(
        rope("linear", 1e6, factor=8.0), rope(theta=1e4))),
    "Gemma 3 27B": ("gemma3_text", GEMMA3 | {"query_pre_attn_scalar": 8, "num_hidden_layers": 62}),
    "Phi 2": ("phi", B | {"intermediate_size": 128} | rope(theta=1e4, partial_rotary_factor=0.5)),
    "Phi 3 mini 4k": ("phi3", R | {"sliding_window": 16}),
    "Phi 4": ("phi3", R | {"sliding_window": None} | rope(theta=25e4)),
    "Phi 4 mini": ("phi3", PHI | TIED | rope("longrope", 1e4, partial_rotary_factor=0.75,
                                             short_factor=[1.0, 1.1, 1.2],
                                             long_factor=[1.0, 2.0, 3.5])),
    "SmolLM 3": ("smollm3", R | TIED | {"num_hidden_layers": 5} | rope(theta=5e6)),
    "OLMo": ("olmo", B | TIED),
    "OLMo 2": ("olmo2", R | rope(theta=5e5)),
    "OLMo 3": ("olmo3", R | EIGHT | each(YARN, rope(theta=1e6))),
    "OLMoE": ("olmoe", B | LOCAL | {"num_experts": 4}),
    "Granite 3": ("granite", R | SCALES | TIED),
    "Granite MoE": ("granitemoe", R | SCALES | LOCAL),
    "Granite MoE, shared": ("granitemoeshared",
                            R | SCALES | LOCAL | {"shared_intermediate_size": 32}),
    "EXAONE 4 32B": ("exaone4", R | EIGHT | {"head_dim": 8} | LLAMA3),
    "EXAONE 4 1.2B": ("exaone4", R | TIED | LLAMA3 | {
        "head_dim": 8, "sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "ERNIE 4.5": ("ernie4_5", R | WIDE | TIED | {"use_bias": False}),
    "Hunyuan": ("hunyuan_v1_dense", R | TIED | {"head_dim": 16, "max_position_embeddings": 32768}
                | rope("dynamic", 1e4, alpha=1000.0, factor=1.0)),
    "Seed-OSS": ("seed_oss", R | WIDE),
    "AFM": ("arcee", R),
    "Command R": ("cohere", R | {"logit_scale": 0.25}),
    "Command R+": ("cohere", R | {"logit_scale": 0.25, "use_qk_norm": True}),
    "Command R7B": ("cohere2", R | EIGHT | {"logit_scale": 0.25}),
    "GLM 4": ("glm4", R | {"head_dim": 8, "attention_bias": True} | rope(partial_rotary_factor=.5)),
    "StableLM 2": ("stablelm", B | {"use_qkv_bias": True, "num_key_value_heads": 4}
                   | rope(theta=1e4, partial_rotary_factor=0.25)),
    "Nemotron": ("nemotron", R | {"head_dim": 8} | rope(partial_rotary_factor=0.5)),
    "StarCoder 2": ("starcoder2", R | {"sliding_window": None, "use_bias": True}),
    "GPT-2": ("gpt2", {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4,
                       "n_positions": 512, "bos_token_id": 0, "eos_token_id": 259}),
    "Pythia": ("gpt_neox", B | {"use_parallel_residual": True}
               | rope(theta=1e4, partial_rotary_factor=0.25)),
    "GPT-NeoX, serial": ("gpt_neox", B | {"use_parallel_residual": False}
                         | rope(theta=1e4, partial_rotary_factor=0.25)),
    "gpt-oss": ("gpt_oss", R | LOCAL | {"head_dim": 16, "sliding_window": 16, **rope(
        "yarn", 1e6, factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
        original_max_position_embeddings=128)}),
    "LFM2": ("lfm2", R | CONV | {"norm_eps": 1e-5}),
    "LFM2.5": ("lfm2", R | CONV | {"block_auto_adjust_ff_dim": False}),
    "LFM2 MoE": ("lfm2_moe", R | CONV | EXPERTS | {
        "num_dense_layers": 1, "use_expert_bias": True, "norm_topk_prob": True}),
    "Qwen 3.5": ("qwen3_5_text", R | LINEAR | TIED),
    "Qwen 3.5, equal heads": ("qwen3_5_text", R | LINEAR | {"linear_num_value_heads": 4}),
    "Qwen 3.5 MoE": ("qwen3_5_moe_text", SPARSE | {"shared_expert_intermediate_size": 48}),
    "Qwen3-Next": ("qwen3_next", R | LINEAR | EXPERTS | {
        "shared_expert_intermediate_size": 48, "norm_topk_prob": True, **rope(
            theta=1e7, partial_rotary_factor=0.25)}),
    "Gemma 4 E2B": ("gemma4_text", GEMMA4 | PER_LAYER | {"use_double_wide_mlp": True}),
    "Gemma 4 E4B": ("gemma4_text", GEMMA4 | PER_LAYER),
    "Gemma 4 31B": ("gemma4_text", GEMMA4 | TIED_VALUES),
    "Gemma 4 26B-A4B": ("gemma4_text", GEMMA4 | TIED_VALUES | {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 32}),
}  # fmt: skip
# What published files say and transformers does not write again, for the converter alone.
SAID = {
    "GPT-2": {"n_ctx": 512},
    "Pythia": {"rotary_pct": 0.25},
    "GPT-NeoX, serial": {"rotary_pct": 0.25},
    "Command R7B": {"rotary_pct": 1.0},
    "Mistral Small 3.1": {"architectures": ["Mistral3ForConditionalGeneration"]},
}


def main() -> None:
    """Convert everything and write the file."""
    sys.path.append(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        made = {name: _convert(name, Path(folder) / str(i)) for i, name in enumerate(FAMILIES)}
    lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in made.items())
    DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{DATA}: {DATA.stat().st_size} bytes")


def _convert(family: str, folder: Path) -> dict[str, Any]:
    kind, settings = FAMILIES[family]
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind](**copy.deepcopy(settings))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    weights = {
        name: made_weight(name, value.shape)
        for name, value in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "tokenizer.json").write_text(tokenizer_json())
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    stated = json.loads((folder / "config.json").read_text())
    layers = stated.get("num_hidden_layers", stated.get("n_layer"))
    metadata, tensors = _run_converter(folder, SAID.get(family, {}))
    architecture = metadata["general.architecture"]
    prefix = {"gpt2": "transformer.h.", "gpt_neox": "gpt_neox.layers."}.get(kind, "model.layers.")
    shapes = {name: list(value.shape) for name, value in weights.items()}
    extra = {name: tensors.pop(name).tolist() for name in sorted(tensors) if "rope_" in name}
    return {
        "config": stated,
        "layers": layers,
        "architecture": architecture,
        "metadata": {
            key.removeprefix(f"{architecture}."): value
            for key, value in metadata.items()
            if key.startswith(f"{architecture}.")
        },
        "stored": by_layer(shapes, prefix, layers),
        "extra": extra,
        "tensors": checksums(tensors),
    }


def _run_converter(folder: Path, message: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert a checkpoint to float32; its vocabulary is not what this is about."""
    import gguf
    import torch
    from conversion import ModelType, get_model_architecture, get_model_class
    from conversion.base import ModelBase, TextModel

    from pilotfish.export.sources.gguf_file import GgufFile

    stated = ModelBase.load_hparams(folder, False) | message
    kind = get_model_class(get_model_architecture(stated, ModelType.TEXT))
    kind.no_mtp = True  # transformers does not save the multi-token-prediction head
    load = ModelBase.load_hparams
    ModelBase.load_hparams = staticmethod(lambda *args, **more: load(*args, **more) | message)
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    with torch.inference_mode():
        model = kind(folder, gguf.LlamaFileType.ALL_F32, folder / "m.gguf", eager=True)
        for each_kind in {type(model), type(getattr(model, "impl", model))}:
            each_kind.set_vocab = lambda self: self._set_vocab_gpt2()
        model.write()
    ModelBase.load_hparams = staticmethod(load)
    file = GgufFile(folder / "m.gguf")
    return file.metadata, {name: file.tensor(name).copy() for name in file.tensors}


if __name__ == "__main__":
    main()
