"""Mixtures of experts: what they compute in every dialect.

Where their weights come from: test_sources_experts.py. Against transformers:
tests/reference/test_experts.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from pilotfish.engines.manifest import Precision
from pilotfish.engines.runtime import OPSET24_SINCE, runtime_version
from pilotfish.export.architectures.experts import EVERY
from pilotfish.export.dialects import DIALECTS
from pilotfish.export.graph import GraphWriter
from pilotfish.export.model_config import Form, ModelConfig
from pilotfish.export.network import write_experts
from pilotfish.export.parts import Experts
from pilotfish.export.quantize import BLOCK, quantize
from tests.support.runnable import DISTINCT, needs
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
    "sigmoid-biased": (
        Experts(count=6, chosen=2, width=32, normed=True, scores="sigmoid", biased=True,
                epsilon=0.1, factor=2.5, shared=64),
        Form(),
    ),
    "sigmoid": (Experts(count=4, chosen=2, width=32, normed=True, scores="sigmoid"), Form()),
    "sigmoid-biased-of-all": (
        Experts(count=6, chosen=3, width=32, normed=False, scores="sigmoid", biased=True),
        Form(),
    ),
    "softmax-biased": (
        Experts(count=6, chosen=2, width=32, normed=True, biased=True, least=0.35),
        Form(),
    ),
    "ungated": (
        Experts(count=6, chosen=2, width=32, normed=True, scores="sigmoid", biased=True,
                latent=32, shared=64),
        Form(gated=False, biases=("mlp.latent_in", "mlp.shared_expert.up_proj")),
    ),
}  # fmt: skip


def run(
    folder: Path, dialect: str, config: ModelConfig, x: Floats, precision: Precision = "fp32"
) -> Floats:
    """Compute the mixture of layer 0 for x [T, hidden], as a graph of the dialect."""
    needs(dialect)
    assert config.experts is not None
    kind = DIALECTS[dialect]
    with (folder / "experts.data").open("wb") as data:
        graph = GraphWriter(data, "experts.data")
        net = kind(graph, config, RandomSource(config, 0), precision)
        graph.input("x", "float32", ["T", config.hidden])
        # Not the input itself: a runtime may write over what another operator made.
        mixed = write_experts(net, config.experts, MODULE, net.scale("x", 2.0))
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
    (result,) = session.run(["y"], feeds | {"x": x / np.float32(2)})
    return np.asarray(result, np.float32)


def by_hand(
    config: ModelConfig,
    x: Floats,
    rounded: Callable[[Floats], Floats] = lambda weight: weight,
    *,
    ignores_bias: bool = False,
) -> Floats:
    """Compute the same token by token; `rounded` is applied to all but router and gate."""
    source, experts = RandomSource(config, 0), config.experts
    assert experts is not None
    bias: Floats = np.zeros(experts.count, np.float32)
    if experts.biased and not ignores_bias:
        bias = source.tensor(f"{MODULE}.expert_bias")

    def linear(name: str, value: Floats, rounding: Callable[[Floats], Floats] = rounded) -> Floats:
        result = value @ rounding(source.tensor(f"{MODULE}.{name}.weight")).T
        bias = f"{MODULE}.{name}.bias"
        return np.asarray(result + (source.tensor(bias) if bias in source.names() else 0))

    def fed(module: str, value: Floats, *, clamped: bool = True) -> Floats:
        if not config.form.gated:
            inner = np.maximum(linear(f"{module}.up_proj", value), 0) ** 2
            return linear(f"{module}.down_proj", inner)
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
        if experts.scores == "sigmoid":
            scores = 1 / (1 + np.exp(-scores))
        else:
            scores = np.exp(scores) / np.exp(scores).sum()
        chosen = np.argsort(-(scores + bias))[: experts.chosen]
        divisor = max(scores[chosen].sum() + experts.epsilon, experts.least)
        chances = experts.factor * scores / (divisor if experts.normed else 1)
        inputs = token if experts.latent is None else linear("latent_in", token)
        answer = sum(chances[j] * fed(f"experts.{j}", inputs) for j in chosen)
        if experts.latent is not None:
            answer = linear("latent_out", answer)
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
    activation = "silu" if form.gated else "relu2"
    return tiny_config("mixtral", experts=experts, form=form, activation=activation)


def tokens(count: int, config: ModelConfig) -> Floats:
    return np.random.default_rng(3).standard_normal((count, config.hidden), np.float32)


# What is computed


@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize("dialect", DISTINCT)
@pytest.mark.parametrize("case", CASES)
def test_the_chosen_experts_are_weighted_and_summed(
    tmp_path: Path, case: str, dialect: str, count: int
) -> None:
    config = config_of(case)
    x = tokens(count, config)
    np.testing.assert_allclose(run(tmp_path, dialect, config, x), by_hand(config, x), atol=2e-5)


@pytest.mark.parametrize("case", [name for name in CASES if CASES[name][0].biased])
def test_a_bias_of_the_choice_shows(case: str) -> None:
    """By hand, so that a graph without the bias fails the test above."""
    config = config_of(case)
    x = tokens(9, config)
    assert np.abs(by_hand(config, x) - by_hand(config, x, ignores_bias=True)).max() > 1e-2


@pytest.mark.parametrize(
    ("case", "bits"),
    [
        ("of-all", 4),
        ("shared-gated", 4),
        ("biased-clamped", 8),
        ("sigmoid-biased", 8),
        ("sigmoid-biased-of-all", 4),
    ],
)
@pytest.mark.parametrize("dialect", ["opset24", "contrib", "tensorrt"])
def test_rounded_experts_differ_by_the_rounding_of_activations_alone(
    tmp_path: Path, case: str, dialect: str, bits: int
) -> None:
    if bits == 4 and runtime_version() < OPSET24_SINCE:
        pytest.skip("older runtimes have no QMoE of 4 bits that is right")
    config = config_of(case)
    x = tokens(9, config)

    def rounded(weight: Floats) -> Floats:
        codes = quantize("weight", weight, bits, offsets_allowed=False)
        steps = (codes.codes.astype(np.float32) - codes.zero_point).reshape(len(weight), -1, BLOCK)
        return (steps * codes.scales[..., None]).reshape(weight.shape)

    completed = run(tmp_path, dialect, config, x, "int8" if bits == 8 else "int4")
    exact = by_hand(config, x, rounded)
    assert np.linalg.norm(completed - exact) < 0.02 * np.linalg.norm(exact)
    coarse = np.linalg.norm(by_hand(config, x) - exact) / np.linalg.norm(exact)
    assert bits == 8 or coarse > 0.05  # so that the first bound says something


def test_other_activations_than_silu_have_no_fused_operator(tmp_path: Path) -> None:
    config = tiny_config("mixtral", experts=PLAIN, activation="relu")
    x = tokens(5, config)
    fused, grouped = (run(tmp_path, dialect, config, x) for dialect in ("contrib", "opset17"))
    np.testing.assert_allclose(fused, grouped, atol=2e-5)
    assert np.abs(fused - by_hand(config, x)).max() > 0.1
