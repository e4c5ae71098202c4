"""What a precision costs: measured against the source's own float32, written into the manifest."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.manifest import Precision
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.engines.tokenizer import Tokenizer
from pilotfish.export import cost, reference
from pilotfish.export.cost import TEXT
from pilotfish.export.model import export_model
from pilotfish.export.model_config import Layer
from pilotfish.export.reference import Reference, largest_layer
from pilotfish.export.sources import open_source
from tests.support.prefill import prefill
from tests.support.small_checkpoints import LLAMA, tiny_weights, write_gguf
from tests.support.tiny import FAMILIES, SHARING, RandomSource, plain_rope, tiny_config

CONFIG = LLAMA | {"hidden_size": 64, "max_position_embeddings": 600}


def source(path: Path) -> Path:
    calm = {
        name: value / 8 if value.ndim == 2 else 1 + value / 10
        for name, value in tiny_weights(CONFIG).items()
    }
    return write_gguf(path / "tiny.gguf", CONFIG, weights=calm)


@pytest.mark.parametrize("family", FAMILIES | SHARING)
def test_layer_by_layer_is_the_whole_model(tmp_path: Path, family: str) -> None:
    random = RandomSource(tiny_config(family), 3)
    whole = Decoder(export_model(random, tmp_path / "fp32"), provider="cpu")
    tokens = (5 * np.arange(50)) % 128
    parts = []
    exact = Reference(random, random.config, tmp_path)
    states = exact.states(tokens, lambda: parts.append(1))
    assert len(parts) == exact.parts
    result = exact.logits(states, 128)[20:]
    wanted = prefill(whole, 0, tokens, rows=30).logits
    np.testing.assert_allclose(result, wanted, atol=2e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp32"]


@pytest.mark.parametrize(("context", "length"), [(256, 50), (256, 90), (64, 50)])
def test_a_text_is_read_by_the_rotary_factors_of_the_artifact(
    tmp_path: Path, context: int, length: int
) -> None:
    """LongRoPE has others beyond 64 positions; an artifact that goes beyond has them throughout."""
    short, long = plain_rope(1e4, 16), plain_rope(1e6, 16)
    rope = msgspec.structs.replace(short, long=long.frequencies, short_context=64)
    random = RandomSource(tiny_config(pattern=(Layer(rope),), context=context), 3)
    whole = Decoder(export_model(random, tmp_path / "fp32", context=context), provider="cpu")
    tokens = (5 * np.arange(length)) % 128
    exact = Reference(random, random.config, tmp_path)
    result = exact.logits(exact.states(tokens, lambda: None), 128)
    wanted = prefill(whole, 0, tokens, rows=length).logits
    np.testing.assert_allclose(result, wanted, atol=2e-4)


def test_the_cost_is_that_of_both_exports_side_by_side(tmp_path: Path) -> None:
    path = source(tmp_path)
    made = export_model(str(path), tmp_path / "int4", precision="int4", check=True)
    result = Artifact.open(made.path).manifest.cost
    assert result is not None
    tokenizer = Tokenizer(made.tokenizer_path)
    tokens = tokenizer.encode(TEXT)[: cost.LONGEST]
    assert result.tokens == len(tokens)
    exact = Decoder(export_model(str(path), tmp_path / "fp32"), provider="cpu")
    p, q = (
        np.exp(each - np.logaddexp.reduce(each, axis=1, keepdims=True))
        for each in (
            prefill(decoder, 0, tokens, rows=len(tokens)).logits.astype(np.float64)
            for decoder in (exact, Decoder(made, provider="cpu"))
        )
    )
    assert result.kl == pytest.approx((p * np.log(p / q)).sum(axis=1).mean(), rel=0.02)
    assert result.acceptance == pytest.approx(np.minimum(p, q).sum(axis=1).mean(), abs=1e-4)
    assert 0.5 < result.acceptance < 1.0
    assert {file.name for file in made.path.iterdir()} == {*made.manifest.files, "manifest.json"}
    made.verify()


def test_a_finer_precision_costs_less(tmp_path: Path) -> None:
    path = str(source(tmp_path))
    int4, int8 = (
        export_model(path, tmp_path / name, precision=name, check=True).manifest.cost
        for name in ("int4", "int8")
    )
    assert int4 is not None
    assert int8 is not None
    assert int8.kl < int4.kl
    assert int8.acceptance > int4.acceptance


def test_float32_and_what_is_not_checked_say_nothing(tmp_path: Path) -> None:
    path = str(source(tmp_path))
    for precision, check in (("fp32", True), ("int8", False)):
        made = export_model(path, tmp_path / precision, precision=precision, check=check)
        assert made.manifest.cost is None
        assert b'"cost"' not in (made.path / "manifest.json").read_bytes()


@pytest.mark.parametrize("short", ["memory", "runtime"])
def test_what_cannot_be_measured_is_told_and_exported_all_the_same(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    short: str,
) -> None:
    path = str(source(tmp_path))
    if short == "memory":
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 9 kB\n")
        monkeypatch.setattr(cost, "MACHINE", tmp_path)
    else:
        monkeypatch.setattr("pilotfish.export.reference.CPU", "NoExecutionProvider")
    made = export_model(path, tmp_path / "a", precision="int8", check=True)
    assert made.manifest.cost is None
    reasons = {"memory": "of memory", "runtime": "built without"}
    assert reasons[short] in caplog.text
    made.verify()
    assert {file.name for file in made.path.iterdir()} == {*made.manifest.files, "manifest.json"}


@pytest.mark.parametrize(("precision", "factor"), [("fp16", 1e4), ("int8", 1e17), ("int4", 1e17)])
def test_logits_that_are_no_numbers_are_told_and_exported_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, precision: Precision, factor: float
) -> None:
    """The weights are within the precision's range, but the logits are not."""
    weights = tiny_weights(CONFIG)
    for part in ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj"):
        weights[f"model.layers.0.{part}.weight"] *= np.float32(factor)
    path = write_gguf(tmp_path / "m.gguf", CONFIG, weights=weights)
    made = export_model(str(path), tmp_path / "a", precision=precision, check=True)
    assert made.manifest.cost is None
    assert "was not measured: logits are NaN or infinite" in caplog.text


def test_the_measurement_writes_graphs_without_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    opened = reference.open_session

    def measure(graph: Path, *args: Any, **options: Any) -> Any:
        sizes.append(sum(file.stat().st_size for file in graph.parent.glob("*.onnx")))
        return opened(graph, *args, **options)

    made = export_model(str(source(tmp_path)), tmp_path / "a", precision="int8")
    size = sum(file.stat().st_size for file in made.path.iterdir())
    monkeypatch.setattr(reference, "open_session", measure)
    weights = open_source(str(source(tmp_path)))
    assert cost.measure_cost(weights, weights.config, made.path)
    assert len(sizes) == 1 + weights.config.layers + 2
    assert max(sizes) < size / 4


def test_the_largest_layer_counts_no_table() -> None:
    assert largest_layer(tiny_config(vocab_size=4096)) == largest_layer(tiny_config())
    inner, hidden, kv = 512, 64, 32
    layer = 4 * (2 * hidden + 2 * hidden * hidden + 2 * kv * hidden + 3 * inner * hidden)
    assert largest_layer(tiny_config(intermediate=inner)) == layer


DAMAGES = ["two tensors", "one scale", "rotation"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_the_artifact_costs(tmp_path: Path, damage: str) -> None:
    """What is compared is what was written, not what should have been written."""
    opened = open_source(str(source(tmp_path)))
    made = export_model(opened, tmp_path / "a", precision="int8")
    intact = cost.measure_cost(opened, opened.config, made.path)
    graph = onnx.load(made.graph_path, load_external_data=False)
    places = {
        each.name: {entry.key: entry.value for entry in each.external_data}
        for each in graph.graph.initializer
        if each.external_data
    }
    data = np.memmap(made.path / "model.onnx.data", np.uint8, "r+")

    def part(name: str) -> NDArray[np.uint8]:
        start, length = (int(places[name][key]) for key in ("offset", "length"))
        return data[start : start + length]

    layers = [f"model.layers.{i}.mlp.down_proj.weight" for i in (0, 1)]
    if damage == "two tensors":
        first, second = (part(f"{name}.codes") for name in layers)
        first[:], second[:] = second.copy(), first.copy()
    elif damage == "one scale":
        scales = part(f"{layers[1]}.scales").view(np.float32)
        scales[np.argmax(np.abs(scales))] *= -1
    else:
        cos, sin = (part(name) for name in ("rotary.0.cos", "rotary.0.sin"))
        cos[:], sin[:] = sin.copy(), cos.copy()
    data.flush()
    damaged = cost.measure_cost(opened, opened.config, made.path)
    assert intact is not None
    assert damaged is not None
    assert damaged.kl > 1.02 * intact.kl


@pytest.mark.parametrize("flags", [(), ("--no-check",)])
def test_the_command_tells_it(tmp_path: Path, flags: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "pilotfish", "export", "model", str(source(tmp_path))]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "a"), "--precision", "int8", *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'a'}\n"
    result = Artifact.open(tmp_path / "a").manifest.cost
    match = re.search(r"int8 against float32.* KL (\S+) nats per token, α (\S+)", done.stderr)
    if flags:
        assert (result, match) == (None, None)
    else:
        assert result is not None
        assert match is not None
        assert float(match[1]) == pytest.approx(result.kl, abs=1e-4)


def test_a_manifest_with_a_cost_is_checked(tmp_path: Path) -> None:
    made = export_model(str(source(tmp_path)), tmp_path / "a", precision="int8", check=True)
    text = (made.path / "manifest.json").read_text()
    wrong = msgspec.json.decode(text) | {"cost": {"kl": -1.0, "acceptance": 0.5, "tokens": 3}}
    (made.path / "manifest.json").write_bytes(msgspec.json.encode(wrong))
    with pytest.raises(Exception, match=r"cost\.kl"):
        Artifact.open(made.path)
