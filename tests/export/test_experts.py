"""Mixtures of experts: what they compute in every dialect, and where their weights come from.

Against transformers: tests/reference/test_experts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from pilotfish.engines.artifact import Precision
from pilotfish.engines.runtime import OPSET24_SINCE, runtime_version
from pilotfish.export.architectures.experts import EVERY
from pilotfish.export.config import Experts, Form, ModelConfig
from pilotfish.export.dialects import DIALECTS
from pilotfish.export.errors import ExportError
from pilotfish.export.experts import write_experts
from pilotfish.export.graph import GraphWriter
from pilotfish.export.quantize import BLOCK, quantize
from pilotfish.export.sources.huggingface import DirectorySource, open_directory
from tests.support.runnable import needs
from tests.support.small_checkpoints import LLAMA, tiny_weights, write_directory
from tests.support.tiny import RandomSource, tiny_config

Floats = NDArray[np.float32]
MODULE = "model.layers.0.mlp"
BIASED = Form(biases=("mlp.router", *EVERY))
PLAIN = Experts(count=4, chosen=2, width=32, normed=True)
# Experts, and the form of their layers.
CASES: dict[str, tuple[Experts, Form]] = {
    "normed": (PLAIN, Form()),
    "of-all": (Experts(count=5, chosen=3, width=32, normed=False), Form()),
    "one-chosen": (Experts(count=4, chosen=1, width=64, normed=False), Form()),
    "all-chosen": (Experts(count=3, chosen=3, width=32, normed=True), Form()),
    "shared": (Experts(count=4, chosen=2, width=32, normed=True, shared=64), Form()),
    "shared-gated": (
        Experts(count=4, chosen=2, width=32, normed=False, shared=64, shared_gate=True),
        Form(),
    ),
    "biased-clamped": (
        Experts(count=4, chosen=2, width=32, normed=True, steepness=1.702, lift=1.0, limit=0.7),
        BIASED,
    ),
}


def run(
    folder: Path, dialect: str, config: ModelConfig, x: Floats, precision: Precision = "fp32"
) -> Floats:
    """Compute the mixture of layer 0 for x [T, hidden], as a graph of the dialect."""
    needs(dialect)
    assert config.experts is not None
    kind = DIALECTS[dialect]
    with (folder / "experts.data").open("wb") as data:
        graph = GraphWriter(data, "experts.data")
        net = kind(graph, config, RandomSource(config, 0).tensor, precision)
        graph.input("x", "float32", ["T", config.hidden])
        # Not the input itself: a runtime may write over what another operator made.
        mixed = write_experts(net, config.experts, MODULE, net.scaled("x", 2.0))
        graph.op("Identity", mixed, name="y")
        graph.output("y", "float32", ["T", config.hidden])
        graph.save(folder / "experts.onnx", opset=kind.opset)
    session = onnxruntime.InferenceSession(
        folder / "experts.onnx", providers=["CPUExecutionProvider"]
    )
    types = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}
    feeds = {
        item.name: np.zeros(
            [size if isinstance(size, int) else 1 for size in item.shape],
            types.get(item.type, np.float32),
        )
        for item in session.get_inputs()
    }
    (found,) = session.run(["y"], feeds | {"x": x / np.float32(2)})
    return np.asarray(found, np.float32)


def by_hand(
    config: ModelConfig, x: Floats, rounded: Callable[[Floats], Floats] = lambda weight: weight
) -> Floats:
    """Compute the same token by token; `rounded` is applied to all but router and gate."""
    source, experts = RandomSource(config, 0), config.experts
    assert experts is not None

    def linear(name: str, value: Floats, rounding: Callable[[Floats], Floats] = rounded) -> Floats:
        found = value @ rounding(source.tensor(f"{MODULE}.{name}.weight")).T
        bias = f"{MODULE}.{name}.bias"
        return np.asarray(found + (source.tensor(bias) if bias in source.names() else 0))

    def fed(module: str, value: Floats, *, clamped: bool = True) -> Floats:
        gate, up = (linear(f"{module}.{part}_proj", value) for part in ("gate", "up"))
        if clamped and experts.limit is not None:
            gate = np.minimum(gate, experts.limit)
            up = np.clip(up, -experts.limit, experts.limit)
        steepness, lift = (experts.steepness, experts.lift) if clamped else (1.0, 0.0)
        inner = gate / (1 + np.exp(-steepness * gate)) * (up + lift)
        return linear(f"{module}.down_proj", inner)

    answers = []
    for token in x:
        scores = linear("router", token, lambda weight: weight)
        chosen = np.argsort(-scores)[: experts.chosen]
        chances = np.exp(scores) / np.exp(scores[chosen] if experts.normed else scores).sum()
        answer = sum(chances[j] * fed(f"experts.{j}", token) for j in chosen)
        if experts.shared is not None:
            shared = fed("shared_expert", token, clamped=False)
            if experts.shared_gate:
                gate = linear("shared_expert_gate", token, lambda weight: weight)
                shared = shared / (1 + np.exp(-gate))
            answer = answer + shared
        answers.append(answer)
    return np.array(answers)


def config_of(case: str) -> ModelConfig:
    experts, form = CASES[case]
    return tiny_config("mixtral", experts=experts, form=form)


def tokens(count: int, config: ModelConfig) -> Floats:
    return np.random.default_rng(3).standard_normal((count, config.hidden), np.float32)


# What is computed


@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("case", CASES)
def test_the_chosen_experts_are_weighted_and_summed(
    tmp_path: Path, case: str, dialect: str, count: int
) -> None:
    config = config_of(case)
    x = tokens(count, config)
    np.testing.assert_allclose(run(tmp_path, dialect, config, x), by_hand(config, x), atol=2e-5)


@pytest.mark.parametrize(
    ("case", "bits"), [("of-all", 4), ("shared-gated", 4), ("biased-clamped", 8)]
)
@pytest.mark.parametrize("dialect", ["opset24", "contrib"])
def test_rounded_experts_differ_by_the_rounding_of_activations_alone(
    tmp_path: Path, case: str, dialect: str, bits: int
) -> None:
    if bits == 4 and runtime_version() < OPSET24_SINCE:
        pytest.skip("older runtimes have no QMoE of 4 bits that is right")
    config = config_of(case)
    x = tokens(9, config)

    def rounded(weight: Floats) -> Floats:
        codes = quantize("weight", weight, bits, shifted=False)
        steps = (codes.codes.astype(np.float32) - codes.zero_point).reshape(len(weight), -1, BLOCK)
        return (steps * codes.scales[..., None]).reshape(weight.shape)

    found = run(tmp_path, dialect, config, x, "int8" if bits == 8 else "int4")
    exact = by_hand(config, x, rounded)
    assert np.linalg.norm(found - exact) < 0.02 * np.linalg.norm(exact)
    coarse = np.linalg.norm(by_hand(config, x) - exact) / np.linalg.norm(exact)
    assert bits == 8 or coarse > 0.05  # so that the first bound says something


def test_other_activations_than_silu_have_no_fused_operator(tmp_path: Path) -> None:
    config = tiny_config("mixtral", experts=PLAIN, activation="relu")
    x = tokens(5, config)
    fused, grouped = (run(tmp_path, dialect, config, x) for dialect in ("contrib", "opset17"))
    np.testing.assert_allclose(fused, grouped, atol=2e-5)
    assert np.abs(fused - by_hand(config, x)).max() > 0.1


# Where the weights come from

MIXTRAL: dict[str, Any] = LLAMA | {
    "model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2,
}  # fmt: skip
GRANITE = MIXTRAL | {"model_type": "granitemoe"}
QWEN = LLAMA | {
    "model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 8,
    "moe_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip
GPT_OSS = MIXTRAL | {
    "model_type": "gpt_oss", "head_dim": 8, "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
HIDDEN, INNER, COUNT = LLAMA["hidden_size"], LLAMA["intermediate_size"], 3


def weights_of(config: Mapping[str, Any]) -> dict[str, Floats]:
    """Make the weights of a mixture, by the names that its class gives them."""
    rng = np.random.default_rng(4)
    kind, inner = config["model_type"], config.get("moe_intermediate_size", INNER)
    found = {k: v for k, v in tiny_weights(config).items() if ".mlp." not in k}
    own: dict[str, tuple[int, ...]] = {}
    if kind == "qwen3_moe":
        own |= {f"self_attn.{name}_norm.weight": (8,) for name in "qk"}
    if kind == "granitemoe":
        own |= {
            "block_sparse_moe.router.layer.weight": (COUNT, HIDDEN),
            "block_sparse_moe.input_linear.weight": (COUNT, 2 * inner, HIDDEN),
            "block_sparse_moe.output_linear.weight": (COUNT, HIDDEN, inner),
        }
    elif kind == "gpt_oss":
        own |= {
            **{f"self_attn.{name}_proj.bias": (rows,) for name, rows in
               (("q", HIDDEN), ("k", 16), ("v", 16), ("o", HIDDEN))},
            "self_attn.sinks": (4,),
            "mlp.router.weight": (COUNT, HIDDEN),
            "mlp.router.bias": (COUNT,),
            "mlp.experts.gate_up_proj": (COUNT, HIDDEN, 2 * inner),
            "mlp.experts.gate_up_proj_bias": (COUNT, 2 * inner),
            "mlp.experts.down_proj": (COUNT, inner, HIDDEN),
            "mlp.experts.down_proj_bias": (COUNT, HIDDEN),
        }  # fmt: skip
    else:
        mixtral = kind == "mixtral"
        block = "block_sparse_moe" if mixtral else "mlp"
        parts = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        own[f"{block}.gate.weight"] = (COUNT, HIDDEN)
        for j in range(COUNT):
            shapes = ((inner, HIDDEN), (inner, HIDDEN), (HIDDEN, inner))
            own |= {
                f"{block}.experts.{j}.{part}.weight": shape
                for part, shape in zip(parts, shapes, strict=True)
            }
    for layer in range(config["num_hidden_layers"]):
        found |= {
            f"model.layers.{layer}.{name}": rng.standard_normal(shape, np.float32)
            for name, shape in own.items()
        }
    return found


def opened(path: Path, config: Mapping[str, Any], weights: Mapping[str, Floats]) -> DirectorySource:
    write_directory(path, config, weights=weights)
    return open_directory(str(path), lambda *_: None)


def test_experts_of_their_own_are_renamed(tmp_path: Path) -> None:
    weights = weights_of(MIXTRAL)
    source = opened(tmp_path, MIXTRAL, weights)
    for theirs, ours in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        np.testing.assert_array_equal(
            source.tensor(f"model.layers.1.mlp.experts.2.{ours}.weight"),
            weights[f"model.layers.1.block_sparse_moe.experts.2.{theirs}.weight"],
        )


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_stacked_experts_are_taken_one_by_one(tmp_path: Path, dtype: str) -> None:
    weights = weights_of(GRANITE)
    write_directory(tmp_path, GRANITE, weights=weights, dtype=dtype)
    source = open_directory(str(tmp_path), lambda *_: None)
    both = weights["model.layers.1.block_sparse_moe.input_linear.weight"][2]
    name = "model.layers.1.mlp.experts.2"
    for part, rows in (("gate_proj", both[:INNER]), ("up_proj", both[INNER:])):
        np.testing.assert_allclose(source.tensor(f"{name}.{part}.weight"), rows, rtol=2**-8)


def test_columns_that_take_turns_are_told_apart(tmp_path: Path) -> None:
    weights = weights_of(GPT_OSS)
    source = opened(tmp_path, GPT_OSS, weights)
    stored = "model.layers.0.mlp.experts.gate_up_proj"
    for start, part in enumerate(("gate_proj", "up_proj")):
        name = f"model.layers.0.mlp.experts.1.{part}"
        columns = weights[stored][1][:, start::2]
        np.testing.assert_array_equal(source.tensor(f"{name}.weight"), columns.T)
        np.testing.assert_array_equal(
            source.tensor(f"{name}.bias"), weights[f"{stored}_bias"][1][start::2]
        )
    down = weights["model.layers.0.mlp.experts.down_proj"][2].T
    np.testing.assert_array_equal(
        source.tensor("model.layers.0.mlp.experts.2.down_proj.weight"), down
    )


def in_blocks(path: Path, **shapes: tuple[int, ...]) -> Path:
    """Write a gpt-oss in MXFP4: codes count up, scales are 2⁻², but for `shapes`."""
    config = GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}
    write_directory(path, config, weights=weights_of(GPT_OSS))
    stored = load_file(path / "model.safetensors")
    for layer in range(2):
        for name, rows, width in (
            ("gate_up_proj", 2 * INNER, HIDDEN),
            ("down_proj", HIDDEN, INNER),
        ):
            own = f"model.layers.{layer}.mlp.experts.{name}"
            del stored[own]
            blocks = shapes.get("blocks", (COUNT, rows, width // 32, 16))
            scales = shapes.get("scales", (COUNT, rows, width // 32))
            stored[f"{own}_blocks"] = np.arange(np.prod(blocks), dtype=np.uint8).reshape(blocks)
            stored[f"{own}_scales"] = np.full(scales, 125, np.uint8)
    save_file(stored, path / "model.safetensors")
    return path


def test_blocks_of_mxfp4_are_read_as_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = open_directory(str(in_blocks(tmp_path)), lambda *_: None)
    assert "MXFP4" in caplog.text
    row = source.tensor("model.layers.0.mlp.experts.0.up_proj.weight")[0]
    # Row 1 of the stored ones, whose bytes are 16 to 31: the low halves count, the high ones are 1.
    positive = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    np.testing.assert_array_equal(row[0::2], np.concatenate([positive, -positive]) / 4)
    np.testing.assert_array_equal(row[1::2], np.full(16, 0.5 / 4))


# What is refused


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scales": (COUNT, 5, 1)}, "no blocks of MXFP4"),
        ({"blocks": (COUNT, 5, 1, 8)}, "no blocks of MXFP4"),
        ({"blocks": (COUNT, 5, 1, 16), "scales": (COUNT, 5, 1)}, "has shape .* asks for"),
    ],
)
def test_other_blocks_are_refused(tmp_path: Path, change: Any, words: str) -> None:
    with pytest.raises(ExportError, match=words):
        open_directory(str(in_blocks(tmp_path, **change)), lambda *_: None)


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (MIXTRAL, {"num_experts_per_tok": 4}, "num_experts_per_tok is 4, and there are 3 experts"),
        (MIXTRAL, {"num_local_experts": 4}, r"moe\.gate\.weight has .*num_local_experts 4 asks"),
        (MIXTRAL, {"num_experts": 4}, "two names of one key, and differ"),
        (MIXTRAL, {"intermediate_size": 32}, r"experts\.0\.w1.*intermediate_size 32"),
        (GRANITE, {"num_local_experts": 2}, r"router\.layer.*num_local_experts 2 asks"),
        (GRANITE, {"intermediate_size": 96}, r"input_linear.*intermediate_size 96"),
        (QWEN, {"moe_intermediate_size": 64}, r"experts\.0\.gate.*moe_intermediate_size 64"),
        (QWEN, {"mlp_only_layers": [1]}, r"mlp\.gate_proj"),
        (QWEN, {"decoder_sparse_step": 2}, r"layers\.0\.mlp\.gate_proj"),
        (QWEN, {"mlp_only_layers": ["all"]}, "must be a list of layers"),
        (QWEN, {"use_sliding_window": True}, "only False is supported"),
        (QWEN, {"n_group": 2}, "n_group: not known here"),
        (QWEN, {"quantization_config": {"quant_method": "mxfp4"}}, "is quantised"),
        (GPT_OSS, {"quantization_config": {"quant_method": "gptq"}}, "is quantised"),
        (QWEN, {"model_type": "deepseek_v3"}, "this mixture-of-experts model is not supported"),
    ],
)  # fmt: skip
def test_a_mixture_that_does_not_fit_is_refused(
    tmp_path: Path, config: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    opened(tmp_path / "right", config, weights_of(config))
    with pytest.raises(ExportError, match=words):
        opened(tmp_path / "wrong", config | change, weights_of(config))


def test_an_expert_too_many_or_too_few_is_refused(tmp_path: Path) -> None:
    weights = weights_of(MIXTRAL)
    name = "model.layers.1.block_sparse_moe.experts.{}.w2.weight"
    more = weights | {name.format(3): weights[name.format(2)]}
    with pytest.raises(ExportError, match=r"experts\.3\.w2.*num_local_experts 3 has no use"):
        opened(tmp_path / "more", MIXTRAL, more)
    fewer = {key: value for key, value in weights.items() if key != name.format(1)}
    with pytest.raises(ExportError, match=r"has no .*experts\.1\.w2.*num_local_experts 3 asks"):
        opened(tmp_path / "fewer", MIXTRAL, fewer)
    stacked = weights_of(GRANITE)
    name = "model.layers.1.block_sparse_moe.output_linear.weight"
    with pytest.raises(ExportError, match=r"has no .*output_linear.*num_local_experts 3 asks"):
        opened(tmp_path / "stacked", GRANITE, stacked | {name: stacked[name][:2]})
