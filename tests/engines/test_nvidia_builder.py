"""What NVIDIA's own parser and builder accept (`tests.support.nvidia_builder`); no GPU.

`python -m tests.engines.builder_table` tries every architecture in every dialect and precision.
Here each architecture is built in half precision in both float dialects, and in 4 bits; some are
built in every precision.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from pilotfish.engines.engine_errors import BuildError
from pilotfish.engines.tensorrt.edition import RTX
from pilotfish.export.export_errors import ExportError
from pilotfish.export.split import split_artifact
from tests.support.nvidia_builder import needs_builder, plan_of
from tests.support.tiny import FAMILIES, SHARING, STATEFUL, tiny_artifact

pytestmark = needs_builder
PROMISED = [
    *[("opset17", each) for each in ("fp32", "fp16")],
    *[("opset24", each) for each in ("fp32", "fp16")],
    *[("tensorrt", each) for each in ("int8", "int4", "stored")],
]
USUAL = [("opset17", "fp16"), ("opset24", "fp16"), ("tensorrt", "int4")]
# Plain layers; windows and caps; experts with sinks and windows.
IN_ALL = ("llama", "gemma2", "gpt_oss")


@pytest.mark.parametrize(
    ("family", "dialect", "precision"),
    [(family, *each) for family in FAMILIES | SHARING for each in USUAL]
    + [(family, *each) for family in IN_ALL for each in PROMISED if each not in USUAL],
)
def test_every_architecture_is_parsed_and_built(
    tmp_path: Path, family: str, dialect: str, precision: Any
) -> None:
    artifact = tiny_artifact(
        tmp_path / "a", architecture=family, dialect=dialect, precision=precision
    )
    assert plan_of(artifact)


@pytest.mark.parametrize(("dialect", "precision"), [("opset17", "fp16"), ("tensorrt", "int4")])
def test_a_cut_head_is_built(tmp_path: Path, dialect: str, precision: Any) -> None:
    made = tiny_artifact(
        tmp_path / "a", dialect=dialect, precision=precision, head_tokens=[*range(0, 120, 7), 127]
    )
    assert plan_of(made, slots=1)


@pytest.mark.parametrize("precision", ["int8", "int4", "stored"])
def test_quantised_weights_of_opset24_are_refused_before_nvidia_reads_them(
    tmp_path: Path, precision: Any
) -> None:
    artifact = tiny_artifact(tmp_path / "a", dialect="opset24", precision=precision)
    with pytest.raises(BuildError, match=f"--dialect tensorrt --precision {precision}$"):
        plan_of(artifact)


@pytest.mark.parametrize("family", STATEFUL)
def test_states_are_refused_at_export_and_before_a_build(tmp_path: Path, family: str) -> None:
    with pytest.raises(ExportError, match="recurrent states, which only the CPU supports"):
        tiny_artifact(tmp_path / "a", architecture=family, dialect="tensorrt", precision="int4")
    artifact = tiny_artifact(tmp_path / "b", architecture=family, dialect="opset24")
    with pytest.raises(BuildError, match="recurrent states, which only the CPU supports"):
        plan_of(artifact)


def test_contrib_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no operator of the dialect contrib"):
        plan_of(tiny_artifact(tmp_path / "c", dialect="contrib"))


@pytest.mark.parametrize("family", [*IN_ALL, "opt"])
@pytest.mark.parametrize(("dialect", "precision"), USUAL)
def test_stages_and_heads_are_built(
    tmp_path: Path, family: str, dialect: str, precision: Any
) -> None:
    whole = tiny_artifact(
        tmp_path / "whole", architecture=family, dialect=dialect, precision=precision
    )
    stages = split_artifact(whole.path, tmp_path / "cut", stages=2)
    assert all(map(plan_of, stages))
    assert plan_of(stages[0], head=True)


@pytest.mark.parametrize("family", SHARING)
def test_shared_keys_and_values_are_not_cut(tmp_path: Path, family: str) -> None:
    whole = tiny_artifact(tmp_path / "whole", architecture=family, dialect="tensorrt")
    with pytest.raises(ExportError, match="keys and values of earlier layers"):
        split_artifact(whole.path, tmp_path / "cut", stages=2)


# Why the dialect `tensorrt` is as it is: what NVIDIA refuses


def refusal(nodes: list[Any], **constants: Any) -> str:
    """NVIDIA's message about a graph from `ids` [T] to `rows` [T, 32]; "" if it is built."""
    trt = RTX.load()
    messages = trt.Logger(trt.Logger.INTERNAL_ERROR)
    builder = trt.Builder(messages)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, messages)
    if not parser.parse(model(nodes, constants)):
        return "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    profile.set_shape("ids", (1,), (4,), (8,))
    config.add_optimization_profile(profile)
    return "" if builder.build_serialized_network(network, config) is not None else "not built"


def model(nodes: list[Any], constants: dict[str, Any]) -> bytes:
    ids = helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["T"])
    rows = helper.make_tensor_value_info("rows", onnx.TensorProto.FLOAT, ["T", 32])
    stored = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "small", [ids], [rows], stored)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)])
    made.ir_version = 10
    result: bytes = made.SerializeToString()
    return result


@pytest.mark.parametrize(("dtype", "wanted"), [("int8", "not built"), ("int32", "")])
def test_a_table_of_bytes_is_not_built_and_one_of_words_is(dtype: str, wanted: str) -> None:
    look_up = helper.make_node("Gather", ["codes", "ids"], ["chosen"])
    floats = helper.make_node("Cast", ["chosen"], ["rows"], to=onnx.TensorProto.FLOAT)
    assert refusal([look_up, floats], codes=np.ones((64, 32), dtype)) == wanted


@pytest.mark.parametrize(
    ("scale", "zero", "wanted"),
    [
        pytest.param(0.1, 0, "", id="as the dialect has them"),
        pytest.param(-0.1, 0, "must all be positive", id="a negative scale"),
        pytest.param(0.1, 1, "Non-zero zero point", id="a zero point"),
    ],
)
def test_scales_are_positive_and_zero_points_zero(scale: float, zero: int, wanted: str) -> None:
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node(
            "DequantizeLinear", ["codes", "scales", "zeros"], ["weight"], axis=0, block_size=32
        ),
        helper.make_node("Gemm", ["x", "weight"], ["rows"]),
    ]
    scales = np.full((1, 32), 0.1, np.float32)
    scales[0, 7] = scale
    result = refusal(
        nodes,
        table=np.ones((64, 32), np.float32),
        codes=np.ones((32, 32), np.int8),
        scales=scales,
        zeros=np.full((1, 32), zero, np.int8),
    )
    assert wanted in result
    assert bool(result) == bool(wanted)
