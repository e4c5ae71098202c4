"""GGUF's blocks in an artifact as they are: `--precision stored`."""

from pathlib import Path

import gguf
import numpy as np
import onnx
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pilotfish.engines import runtime
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.manifest import Precision
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.export.blocks import Quantized
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from pilotfish.export.sources import open_source
from pilotfish.export.sources.gguf_blocks import FORMATS, keep_blocks
from pilotfish.export.sources.layer_selection import keep_first_layers
from pilotfish.export.split import split_artifact
from tests.support.runnable import needs
from tests.support.small_checkpoints import LLAMA, random_blocks, tiny_weights, write_gguf
from tests.support.staged import Staged
from tests.support.tiny import tiny_artifact

SIZES = LLAMA | {"hidden_size": 64, "intermediate_size": 96}
WIDE = LLAMA | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
K_M = {"v_proj": Kind.Q6_K, "down_proj": Kind.Q6_K, "embed": Kind.Q6_K, "gate": Kind.Q5_K}


@given(
    name=st.sampled_from(sorted(FORMATS)),
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 5),
    supers=st.integers(1, 3),
)
def test_kept_blocks_have_the_values_of_the_file(
    name: str, seed: int, rows: int, supers: int
) -> None:
    stored = random_blocks(np.random.default_rng(seed), Kind[name], rows, 256 * supers)
    selection = keep_blocks(stored, FORMATS[name])
    wanted = gguf.dequantize(stored, Kind[name])
    result = selection.floats()
    assert result.shape == wanted.shape
    # exact, but for the rounding of code · scale + offset where there are minima
    most = 0.0 if selection.offsets is None else 1e-6 * float(np.abs(wanted).max())
    assert float(np.abs(result - wanted).max()) <= most


def calm_gguf(path: Path, config: dict[str, object], kind: Kind, kinds=None, **more: bool) -> Path:
    """With weights that let a model's numbers neither vanish nor explode."""
    config = config | more
    weights = {
        name: value / 8 if value.ndim == 2 else 1 + value / 10
        for name, value in tiny_weights(config).items()
    }
    return write_gguf(path, config, kind=kind, kinds=kinds, weights=weights)


def exact(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """Run it with activations in float32, not rounded to 8 bits."""
    monkeypatch.setitem(runtime.SESSION_CONFIG, "session.qdq_matmulnbits_accuracy_level", "1")
    model = onnx.load(artifact.graph_path, load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 1
    artifact.graph_path.write_bytes(model.SerializeToString())
    return Decoder(artifact, provider="cpu")


def logits(decoder: Decoder) -> NDArray[np.float32]:
    tokens = (7 * np.arange(40)) % decoder.vocab_size
    [out] = decoder.forward([Pass(0, tokens)])
    return out.logits.copy()


@pytest.mark.parametrize("dialect", ["opset24", "contrib", "tensorrt"])
@pytest.mark.parametrize(
    ("config", "kind", "kinds", "tied"),
    [
        pytest.param(SIZES, Kind.Q4_0, None, False, id="Q4_0"),
        pytest.param(SIZES, Kind.Q4_1, {"embed": Kind.Q8_0}, True, id="Q4_1, tied Q8_0"),
        pytest.param(SIZES, Kind.Q4_1, None, True, id="Q4_1, tied"),
        pytest.param(SIZES, Kind.Q5_1, {"o_proj": Kind.F16, "k_proj": Kind.Q4_0}, False, id="mix"),
        pytest.param(SIZES, Kind.Q8_0, {"embed": Kind.F32, "up": Kind.F32}, True, id="half floats"),
        pytest.param(WIDE, Kind.Q4_K, K_M, True, id="Q4_K_M, tied"),
        pytest.param(WIDE, Kind.Q3_K, {"down_proj": Kind.Q5_K}, False, id="Q3_K_M"),
        pytest.param(WIDE, Kind.Q2_K, {"v_proj": Kind.Q3_K}, False, id="Q2_K"),
    ],
)
def test_a_stored_export_computes_what_the_file_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, object],
    kind: Kind,
    kinds: dict[str, Kind] | None,
    tied: bool,
    dialect: str,
) -> None:
    needs(dialect)
    path = calm_gguf(tmp_path / "m.gguf", config, kind, kinds, tie_word_embeddings=tied)
    plain = export_model(str(path), tmp_path / "fp32")
    model = export_model(str(path), tmp_path / "kept", precision="stored", dialect=dialect)
    assert model.manifest.precision == "stored"
    if dialect != "contrib":
        onnx.checker.check_model(str(model.graph_path), full_check=True)
    wanted = logits(Decoder(plain, provider="cpu"))
    rounded = logits(Decoder(model, provider="cpu"))
    assert float((rounded - wanted).std()) < 0.05 * float(wanted.std())
    result = logits(exact(model, monkeypatch))
    np.testing.assert_allclose(result, wanted, atol=1e-4 * float(np.abs(wanted).max()))


@pytest.mark.parametrize("dialect", ["opset24", "contrib", "tensorrt"])
@pytest.mark.parametrize("tied", [False, True])
def test_int4_of_mixed_blocks_loses_no_more_than_8_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, dialect: str
) -> None:
    needs(dialect)
    path = calm_gguf(tmp_path / "m.gguf", WIDE, Kind.Q4_K, K_M, tie_word_embeddings=tied)
    plain = export_model(str(path), tmp_path / "fp32")
    made, wide = (
        export_model(str(path), tmp_path / name, precision=name, dialect=dialect, check=False)
        for name in ("int4", "int8")
    )
    wanted = logits(Decoder(plain, provider="cpu"))
    loss, most = (
        float((logits(exact(each, monkeypatch)) - wanted).std()) / float(wanted.std())
        for each in (made, wide)
    )
    assert loss < 1.2 * most < 0.03
    sizes = [(each.path / "model.onnx.data").stat().st_size for each in (made, wide)]
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize("kind", [Kind.Q6_K, Kind.Q8_0, Kind.Q5_K])
def test_int4_of_wider_codes_alone_is_calibrated(tmp_path: Path, kind: Kind) -> None:
    """All matrices have 4 bits, but for v_proj and the head."""
    path = calm_gguf(tmp_path / "m.gguf", WIDE, kind)
    made = export_model(str(path), tmp_path / "a", precision="int4", dialect="contrib", check=False)
    bits = {
        node.input[1].removesuffix(".weight.codes"): attribute.i
        for node in onnx.load(made.graph_path, load_external_data=False).graph.node
        for attribute in node.attribute
        if attribute.name == "bits"
    }
    assert len(bits) > 4
    fine = ("v_proj", "lm_head", "embed_tokens")
    assert bits == {name: 8 if name.endswith(fine) else 4 for name in bits}
    assert sorted(set(bits.values())) == [4, 8]
    assert made.manifest.calibrated_matrices


def test_a_tied_head_and_its_embedding_share_their_blocks(tmp_path: Path) -> None:
    path = calm_gguf(tmp_path / "m.gguf", SIZES, Kind.Q8_0, tie_word_embeddings=True)
    made = export_model(str(path), tmp_path / "kept", precision="stored", dialect="contrib")
    graph = onnx.load(made.graph_path, load_external_data=False).graph
    rows = [item for item in graph.initializer if item.dims[:1] == [SIZES["vocab_size"]]]
    assert [item.name.rpartition(".")[2] for item in rows] == ["codes", "scales"]


def test_stored_blocks_go_into_stages_and_first_layers(tmp_path: Path) -> None:
    needs("opset24")
    path = calm_gguf(tmp_path / "m.gguf", SIZES, Kind.Q4_1, {"v_proj": Kind.Q8_0})
    whole = export_model(str(path), tmp_path / "whole", precision="stored", dialect="opset24")
    split_artifact(whole.path, tmp_path / "cut", stages=2)
    passes = [Pass(0, np.arange(20))]
    [wanted] = Decoder(whole).forward(passes)
    [result] = Staged(tmp_path / "cut", whole).forward(passes)
    np.testing.assert_array_equal(result.logits, wanted.logits)
    source = keep_first_layers(open_source(str(path)), 1)
    name = "model.layers.{}.mlp.up_proj.weight"
    first = source.quantized(name.format(0))
    assert first is not None
    np.testing.assert_allclose(first.floats(), source.tensor(name.format(0)), atol=1e-6)
    with pytest.raises(ExportError, match="has no weight"):
        source.quantized(name.format(1))


def test_a_stored_export_is_refused_where_nothing_is_stored_so(tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match="stores its weights as floats, so there are no blocks to keep"
    ):
        export_model(str(write_gguf(tmp_path / "m.gguf")), tmp_path / "a", precision="stored")
    path = calm_gguf(tmp_path / "q.gguf", SIZES, Kind.Q8_0)
    with pytest.raises(ExportError, match="opset17 cannot express stored"):
        export_model(str(path), tmp_path / "a", precision="stored", dialect="opset17")
    assert not (tmp_path / "a").exists()


def test_blocks_that_no_kernel_holds_are_refused_and_dequantised_otherwise(tmp_path: Path) -> None:
    path = calm_gguf(tmp_path / "m.gguf", WIDE, Kind.Q8_0, {"up_proj": Kind.TQ2_0})
    with pytest.raises(ExportError, match=r"type TQ2_0, but only Q4_0, .*--precision int8"):
        export_model(str(path), tmp_path / "a", precision="stored")
    assert not (tmp_path / "a").exists()
    assert export_model(str(path), tmp_path / "a", precision="int8").manifest.precision == "int8"


def test_random_weights_say_nothing_of_blocks(tmp_path: Path) -> None:
    assert b"cost" not in tiny_artifact(tmp_path / "a", precision="int8").manifest.encode()


@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0])
def test_all_dialects_have_the_same_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, precision: Precision
) -> None:
    """Where a head is tied to its embedding, too, and whether or not blocks are kept."""
    needs("opset24")
    path = str(calm_gguf(tmp_path / "m.gguf", SIZES, kind, tie_word_embeddings=True))
    results = [
        logits(
            exact(
                export_model(path, tmp_path / each, precision=precision, dialect=each, check=False),
                monkeypatch,
            )
        )
        for each in ("contrib", "opset24", "tensorrt")
    ]
    for result in results[1:]:
        assert np.abs(result - results[0]).max() < 1e-3 * results[0].std()


@pytest.mark.parametrize("width", [64, 8])
def test_columns_move_with_their_blocks_or_by_an_order(width: int) -> None:
    rng = np.random.default_rng(1)
    scales, offsets = rng.standard_normal((2, 3, 12), np.float32)
    codes = rng.integers(0, 16, (3, 12 * 32)).astype(np.uint8)
    weight = Quantized(4, codes, scales, offsets)
    columns = rng.permutation(384 // width)[:, None] * width + np.arange(width)
    moved = weight.take_columns(columns.ravel())
    assert (moved.order is None) == (width == 64)
    np.testing.assert_array_equal(moved.floats(), weight.floats()[:, columns.ravel()])
