"""The graphs themselves: standard dialects are standard, and opset17 is what old parsers know."""

import onnx
import pytest

from pilotfish.engines.tensorrt.gates import FLOATS
from pilotfish.export.dialects import DIALECTS
from tests.support.tiny import FAMILIES, SHARING, tiny_artifact

STANDARD = [
    (name, precision)
    for name, dialect in DIALECTS.items()
    if not dialect.contrib
    for precision in dialect.precisions
    if name != "tensorrt" or precision not in FLOATS  # these are opset24's, see below
]
# Operators that TensorRT 8.6's parser and onnxruntime 1.23 both have.
PRIMITIVES = {
    *("Add", "Cast", "Concat", "Div", "Erf", "Expand", "Gather", "Gemm", "Greater", "Identity"),
    *("MatMul", "Tanh", "Where"),
    *("Clip", "Equal", "GatherElements", "Max", "Min", "ReduceSum", "Slice", "TopK"),
    *("LayerNormalization", "Mul", "Pow", "Range", "ReduceMean", "Relu", "Reshape", "ScatterND"),
    *("Shape", "Sigmoid", "Softmax", "Split", "Sqrt", "Squeeze", "Sub", "Transpose", "Unsqueeze"),
}


@pytest.mark.parametrize("family", FAMILIES | SHARING)
@pytest.mark.parametrize(("dialect", "precision"), STANDARD)
def test_standard_dialects_pass_the_strict_checker(tmp_path, family, dialect, precision):
    artifact = tiny_artifact(
        tmp_path / "a", architecture=family, dialect=dialect, precision=precision
    )
    onnx.checker.check_model(str(artifact.graph_path), full_check=True)
    model = onnx.load(artifact.graph_path)
    assert {node.domain for node in model.graph.node} == {""}
    assert [item.version for item in model.opset_import] == [artifact.manifest.opset]


@pytest.mark.parametrize("precision", FLOATS)
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3n"])
def test_in_floats_the_dialect_tensorrt_is_opset24(tmp_path, family, precision):
    files = [
        tiny_artifact(
            tmp_path / dialect, architecture=family, dialect=dialect, precision=precision
        ).manifest.files
        for dialect in ("opset24", "tensorrt")
    ]
    assert files[0] == files[1]


@pytest.mark.parametrize("family", FAMILIES | SHARING)
def test_opset17_is_primitives_of_at_most_four_dimensions(tmp_path, family):
    artifact = tiny_artifact(tmp_path / "a", architecture=family, dialect="opset17")
    model = onnx.shape_inference.infer_shapes(onnx.load(artifact.graph_path), strict_mode=True)
    assert {node.op_type for node in model.graph.node} <= PRIMITIVES
    ranks = [len(value.type.tensor_type.shape.dim) for value in model.graph.value_info]
    assert ranks
    assert max(ranks) <= 4
    scatters = [node for node in model.graph.node if node.op_type == "ScatterND"]
    assert all(not node.attribute for node in scatters)  # TensorRT 10.1 asserts on `reduction`
    # One index tensor for all layers of as many key heads.
    shapes = {each.kv_heads for each in artifact.manifest.cached}
    assert len({node.input[1] for node in scatters}) == len(shapes)
