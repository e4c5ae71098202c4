"""No key of a configuration and no tensor makes another model in silence.

Each key of a family's config.json is changed, dropped, or added from other families, and each kind
of weight removed or joined by one that the configuration does not speak of. Then transformers loads
the directory, and the export computes the same or is refused:

- what transformers loads with every weight that it wants: its logits, or a refusal;
- what it loads without some weight, which it makes up: a refusal;
- what it does not load or run: a refusal, or the logits of the unchanged checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from tests.reference.families import FAMILIES
from tests.reference.parity import TEXT, Floats, Library, answer, load
from tests.support.prefill import prefill

pytestmark = pytest.mark.reference
TOLERANCE = 1e-3
LENGTH = 120  # beyond windows, and 1.5 times the original context of rotary scalings
SHORT = TEXT[:LENGTH]
ABSENT = object()
WIDTH, HEAD = 64, 16

# Keys of every configuration in transformers; one family stands for all.
OF_ALL = """
    return_dict output_hidden_states output_attentions dtype chunk_size_feed_forward architectures
    is_encoder_decoder id2label label2id problem_type _name_or_path transformers_version
    initializer_range use_cache attention_dropout
""".split()  # noqa: SIM905  # a list would take a line for each name
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2")
OTHER_TEXTS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ACTIVATIONS,
    "hidden_activation": ACTIVATIONS,
    "activation": ACTIVATIONS,
    "activation_function": ACTIVATIONS,
    "rope_type": ("default", "linear", "dynamic", "yarn", "llama3", "longrope"),
    "type": ("default", "linear", "yarn"),
    "position_embedding_type": ("rope", "nope", None),
    "model_type": ("llama", "mistral", "qwen2", "phi3", "granite", "gemma"),
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
ROTARY: tuple[Any, ...] = (
    LINEAR,
    {"type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
     "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
     "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False, "mscale": 0.8,
     "mscale_all_dim": 0.4, "beta_fast": 16.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 1.3},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    {"sliding_attention": LINEAR, "full_attention": {"rope_type": "default", "rope_theta": 5e4}},
    {"full_attention": LINEAR},
    {},
    None,
)  # fmt: skip
# What keys mean that are absent or null in some families.
MEANT: dict[str, tuple[Any, ...]] = {
    "rope_parameters": ROTARY,
    "rope_scaling": (LINEAR, None),
    "rope_theta": (5e4,),
    "partial_rotary_factor": (0.5,),
    "rotary_pct": (0.5,),
    "rope_interleaved": (True,),
    "head_dim": (32,),
    "num_key_value_heads": (2, 1),
    "sliding_window": (8, 1024),
    "use_sliding_window": (True,),
    "sliding_window_pattern": (2, "LG"),
    "max_window_layers": (1, 0),
    "attention_chunk_size": (16,),
    "layer_types": (["sliding_attention"] * 2, ["full_attention", "sliding_attention"]),
    "no_rope_layers": ([1, 0], [0, 1]),
    "no_rope_layer_interval": (2,),
    "attn_logit_softcapping": (2.0,),
    "final_logit_softcapping": (2.0,),
    "query_pre_attn_scalar": (5,),
    "attention_multiplier": (0.4,),
    "embedding_multiplier": (3.0,),
    "residual_multiplier": (0.5,),
    "logits_scaling": (3.0,),
    "logit_scale": (0.3,),
    "clip_qkv": (1.0,),
    "qk_layernorm": (True,),
    "use_qk_norm": (True,),
    "attention_bias": (True,),
    "mlp_bias": (True,),
    "use_parallel_residual": (True,),
    "alibi": (True,),
    "use_bidirectional_attention": (True,),
    "is_causal": (False,),
    "is_decoder": (True,),
    "n_inner": (256, 96),
    "ffn_hidden_size": (96,),
    "num_ln_in_parallel_attn": (1, 2),
    "num_experts": (4,),
    "num_local_experts": (4,),
    "pretraining_tp": (2,),
    "per_layer_config": ({"1": {"head_dim": 32}},),
    "tie_word_embeddings": (True,),
    "original_max_position_embeddings": (32,),
    "quantization_config": ({"quant_method": "bitnet"},),
}


def changed(key: str, value: Any) -> Iterator[Any]:
    """Other values for a key, of plausible kinds; ABSENT is one of them."""
    yield ABSENT
    if value is not None:
        yield None
    yield from MEANT.get(key, ())
    yield from OTHER_TEXTS.get(key, ())
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value * 3 // 2 if value > 1 else value + 1, value // 2)
    elif isinstance(value, float):
        yield value * 1.5
    elif isinstance(value, list) and value:
        yield from (value[::-1], value[:-1], [value[0]] * len(value), [value[-1]] * len(value))
        yield [next(changed_item(item)) for item in value]
    elif isinstance(value, dict):
        for name, held in value.items():
            for other in changed(name, held):
                selection = {n: v for n, v in value.items() if n != name}
                yield selection if other is ABSENT else {**selection, name: other}


def changed_item(item: Any) -> Iterator[Any]:
    if isinstance(item, int) and item in (0, 1):
        yield 1 - item
    elif isinstance(item, int | float):
        yield item * 1.5
    elif isinstance(item, str):
        yield "sliding_attention" if item == "full_attention" else "full_attention"
    yield None


def other_values(stated: dict[str, Any], *, alone: bool) -> Iterator[tuple[str, Any]]:
    """(key, value) for each change of one key; `alone`: of the keys of all families, too."""
    for key, value in stated.items():
        if key == "model_type" and "intermediate_size" not in stated:
            continue  # others would read none of the sizes, and be as large as they are by default
        if alone or key not in OF_ALL:
            seen = [json.dumps(value)]
            for other in changed(key, value):
                text = "" if other is ABSENT else json.dumps(other)
                if text not in seen:
                    seen.append(text)
                    yield key, other
    for key, values in MEANT.items():
        if key not in stated:
            yield from ((key, value) for value in values)


class Checkpoint:
    """A copy of a family's checkpoint, to be spoilt; and what became of each change."""

    def __init__(self, name: str, library: Library, folder: Path) -> None:
        self.name, self.auto = name, FAMILIES[name].auto
        reference = library.reference(name)
        self.path, self._out = folder / "model", folder / "out"
        shutil.copytree(reference.path, self.path)
        self._model = reference.loaded.model
        self.stated = json.loads(reference.loaded.model.config.to_json_string(use_diff=False))
        self.weights = load_file(self.path / "model.safetensors")
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.write_config(self.stated)
        result = self._exported()
        np.testing.assert_allclose(result, self._base(len(result)), atol=TOLERANCE)

    def write_config(self, values: dict[str, Any]) -> None:
        (self.path / "config.json").write_text(json.dumps(values))

    def write_weights(self, weights: dict[str, Floats]) -> None:
        held = {name: np.ascontiguousarray(value) for name, value in weights.items()}
        save_file(held, self.path / "model.safetensors", metadata={"format": "pt"})

    def judge(self, message: str) -> None:
        """Export and compare what the directory holds now."""
        try:
            result = self._exported()
        except ExportError as refusal:
            self.counts["refused"] += 1
            if "\n" in str(refusal):
                self.wrong.append(f"{message}: refused in several lines")
            return
        except Exception as error:
            self.wrong.append(f"{message}: {type(error).__name__}: {error}")
            return
        wanted, verdict = self._wanted(len(result))
        self.counts[verdict] += 1
        if wanted is None:
            self.wrong.append(f"{message}: exported, but transformers lacks weights for it")
        elif not np.abs(result - wanted).max() <= TOLERANCE:
            apart = np.abs(result - wanted).max()
            base = np.abs(result - self._base(len(result))).max()
            self.wrong.append(
                f"{message}: {verdict}, {apart:.3g} apart; from the unchanged one {base:.3g}"
            )

    def _base(self, size: int) -> Floats:
        return answer(self._model, SHORT[:size]).logits

    def _exported(self) -> Floats:
        artifact = export_model(str(self.path), self._out)
        size = min(LENGTH, artifact.manifest.dimensions.context)
        decoder = Decoder(artifact, threads=1)
        return prefill(decoder, 0, SHORT[:size], rows=size).logits

    def _wanted(self, size: int) -> tuple[Floats | None, str]:
        """What transformers computes, or the unchanged logits where it cannot."""
        base = self._base(size)
        try:
            loaded = load(self.path, self.auto)
            if not loaded.complete:
                return None, "incomplete"
            logits = answer(loaded.model, SHORT[:size]).logits
        except Exception:  # transformers raises whatever it meets
            return base, "not loaded"
        if not np.isfinite(logits).all():
            return base, "not finite"
        return logits, "same" if np.abs(logits - base).max() <= TOLERANCE else "followed"


@pytest.mark.parametrize("name", FAMILIES)
def test_no_key_makes_another_model_in_silence(
    name: str, library: Library, tmp_path: Path, record_property: Any
) -> None:
    checkpoint = Checkpoint(name, library, tmp_path)
    stated = checkpoint.stated
    text = stated.get("text_config")
    changes = other_values(text or stated, alone=name == "llama")
    for key, value in changes:
        values = {**(text or stated), key: value}
        values = {name: held for name, held in values.items() if held is not ABSENT}
        checkpoint.write_config({**stated, "text_config": values} if text else values)
        checkpoint.judge(f"{key}: {'absent' if value is ABSENT else json.dumps(value)}")
    record_property("counts", dict(checkpoint.counts))
    assert not checkpoint.wrong, f"{name}: " + f"\n{name}: ".join(checkpoint.wrong)


# Of a multimodal checkpoint: what its text model does not read.
PARTS = ("vision_tower", "embed_vision", "vision_embedder", "vision_model", "visual",
         "multi_modal_projector")  # fmt: skip
LEFT_OUT = tuple(f"{prefix}{part}." for prefix in ("", "model.") for part in PARTS)


def spoilt(weights: dict[str, Floats]) -> Iterator[tuple[str, dict[str, Floats]]]:
    """Each kind of weight removed or narrowed, each missing bias and some strange weights added."""
    last = [name for name in weights if ".0." not in name and not name.startswith(LEFT_OUT)]
    for name in last:
        without = {other: value for other, value in weights.items() if other != name}
        yield f"without {name}", without
        if weights[name].ndim:
            yield f"{name} cut", {**weights, name: weights[name][:-2]}
        bias = name.removesuffix("weight") + "bias"
        if name.endswith("weight") and bias not in weights:
            width = weights[name].shape[0]
            yield f"with {bias}", {**weights, bias: np.full(width, 0.5, np.float32)}
    mixing = [name for name in last if "att" in name] or [name for name in last if "mixer" in name]
    layer = next(name for name in mixing if ".1." in name)
    prefix = layer[: layer.index(".1.") + 3]
    mixers = [name.rsplit(".", 2)[0] for name in mixing if prefix in name]
    for place in (prefix.rstrip("."), *mixers[:1]):
        for norm in ("q_norm", "k_norm", "sinks", "post_feedforward_layernorm", "strange"):
            name = f"{place}.{norm}" if norm == "sinks" else f"{place}.{norm}.weight"
            if name not in weights:
                width = 4 if norm == "sinks" else HEAD if "_norm" in norm else WIDTH
                yield f"with {name}", {**weights, name: np.full(width, 1.5, np.float32)}


@pytest.mark.parametrize("name", FAMILIES)
def test_no_weight_makes_another_model_in_silence(
    name: str, library: Library, tmp_path: Path, record_property: Any
) -> None:
    checkpoint = Checkpoint(name, library, tmp_path)
    for info, weights in spoilt(checkpoint.weights):
        checkpoint.write_weights(weights)
        checkpoint.judge(info)
    record_property("counts", dict(checkpoint.counts))
    assert not checkpoint.wrong, f"{name}: " + f"\n{name}: ".join(checkpoint.wrong)
