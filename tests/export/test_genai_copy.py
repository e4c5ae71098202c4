"""Folders of ONNX Runtime GenAI's builder kept as they are: the artifact, and what is refused."""

import json
import os

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_errors import ArtifactError, ProviderError
from pilotfish.engines.language_model import open_model
from pilotfish.export import genai_graph
from pilotfish.export.catalog import list_artifacts
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from pilotfish.export.split import split_artifact
from tests.support.genai_folders import change, genai_artifact, genai_folder
from tests.support.prefill import prefill


@pytest.fixture
def folder(tmp_path):
    return genai_folder(tmp_path / "tiny")


def keep(folder, **options):
    return export_model(str(folder), folder.parent / "kept", dialect="genai", **options)


def edit(folder, how):
    """Change the graph; `how` is given its `GraphProto`."""
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    how(model.graph)
    onnx.save(model, folder / "model.onnx")


def test_the_artifact_is_the_folders_files_with_a_manifest(folder):
    selection = keep(folder)
    manifest, ours = selection.manifest, Artifact.open(folder.with_name("tiny-ours")).manifest
    for name in ("model.onnx", "model.onnx.data", "genai_config.json"):
        assert os.path.samefile(selection.path / name, folder / name)  # no second copy
    assert manifest.files.keys() == {
        "model.onnx", "model.onnx.data", "genai_config.json", "tokenizer.json",
    }  # fmt: skip
    assert (manifest.dialect, manifest.precision, manifest.opset) == ("genai", "genai", 17)
    assert (manifest.trees, manifest.hidden_states, manifest.states) == (False, False, None)
    assert manifest.source.sha256.keys() == {*manifest.files}
    assert (manifest.source.kind, manifest.source.location) == ("directory", "tiny")
    for same in (
        "vocab_size", "padded_vocab_size", "eos_ids", "bos_id", "chat_template",
        "tokenizer_fingerprint", "kv_dtype", "layers", "window",
    ):  # fmt: skip
        assert getattr(manifest, same) == getattr(ours, same), same
    text = (selection.path / "manifest.json").read_text()
    assert json.loads(text)["trees"] is json.loads(text)["hidden_states"] is False
    assert Artifact.open(selection.path).manifest == manifest
    assert {entry.dialect for entry in list_artifacts(folder.parent)} == {"genai", "contrib"}
    selection.verify()


def test_what_the_graph_gives_and_keeps_to_stands_in_the_manifest(tmp_path):
    manifest = genai_artifact(tmp_path / "a", hidden_states=True, architecture="gemma2").manifest
    assert (manifest.hidden_states, manifest.window) == (True, 24)
    assert manifest.dimensions.context == 256  # the graph keeps to its window


def test_a_window_of_other_layers_than_the_graphs_bounds_the_context(tmp_path, caplog):
    folder = genai_folder(tmp_path / "tiny", architecture="gemma2")
    change(folder, {"sliding_window": {"window_size": 24, "layers": [0, 1]}})
    assert keep(folder).manifest.dimensions.context == 24
    change(folder, {"sliding_window": {"window_size": 20, "layers": [0]}})
    assert keep(folder).manifest.dimensions.context == 20
    assert "the graph does not implement" in caplog.text
    change(folder, {"sliding_window": {"window_size": -1, "layers": []}})
    assert keep(folder).manifest.dimensions.context == 256


def test_a_graph_whose_rotary_factors_grow_is_right_as_far_as_the_short_ones_go(folder, caplog):
    """As the builder writes longrope: an If over the mask's width."""

    def branch(graph):
        constant = numpy_helper.from_array(np.array(40), "original")
        table = next(each for each in graph.initializer if each.name == "rotary.0.cos")
        where = [
            helper.make_graph(
                [helper.make_node("Identity", ["rotary.0.cos"], [f"{name}_cos"])],
                name, [],
                [helper.make_tensor_value_info(f"{name}_cos", TensorProto.FLOAT, table.dims)],
            )
            for name in ("large", "small")
        ]  # fmt: skip
        for node in graph.node:
            node.input[:] = ["cos" if name == "rotary.0.cos" else name for name in node.input]
        at = next(i for i, node in enumerate(graph.node) if "total" in node.output) + 1
        for node in (
            helper.make_node("If", ["long"], ["cos"], then_branch=where[0], else_branch=where[1]),
            helper.make_node("Greater", ["total", "original"], ["long"]),
            helper.make_node("Constant", [], ["original"], value=constant),
        ):
            graph.node.insert(at, node)

    edit(folder, branch)
    selection = keep(folder)
    assert selection.manifest.dimensions.context == 40
    assert "other rotary factors" in caplog.text
    assert prefill(open_model(selection), 0, np.arange(40)).logits.shape == (1, 128)
    edit(folder, lambda graph: graph.node.remove(_single(graph, "Greater")))
    with pytest.raises(ExportError, match="an If operator"):
        keep(folder)


def _single(graph, kind):
    return next(node for node in graph.node if node.op_type == kind)


CONFIGS = [
    (b"", "does not describe"),
    (b"[]", "does not describe"),
    (b'{"model": {"decoder": {}}}', "does not describe"),
    (b"[" * 100_000, "does not describe"),
    (b"\xff\xfe", "does not describe"),
    (b" " * 2_000_000, "too large"),
]


@pytest.mark.parametrize(("content", "message"), CONFIGS, ids=range(len(CONFIGS)))
def test_damaged_configurations_are_refused(folder, content, message):
    (folder / "genai_config.json").write_bytes(content)
    with pytest.raises(ExportError, match=message):
        keep(folder)
    assert not (folder.parent / "kept").exists()


CHANGES = [
    ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"num_hidden_layers": 3}, "past_key_values.2.key"),
    ({"num_hidden_layers": 1}, "past_key_values.1.key"),
    ({"head_size": -4}, "head_size"),
    ({"num_key_value_heads": 4}, r"past_key_values\.0\.key is float32 \[batch_size, 2, .*any, 4"),
    ({"context_length": 10**12}, "context_length"),
    ({"context_length": "many"}, "context_length"),
    ({"filename": "../model.onnx"}, "lacks the graph"),
    ({"filename": "other.onnx"}, "lacks the graph"),
    ({"pipeline": [{}]}, "several graphs"),
    ({"eos_token_id": 128}, "eos_token_id 128 is not in the vocabulary"),
    ({"outputs": {"logits": "logits"}}, "does not name the present"),
    ({"outputs": {"hidden_states": "x"}}, "no logits"),
    ({"inputs": {"inputs_embeds": "inputs_embeds"}}, "unknown inputs: inputs_embeds"),
    ({"inputs": {"input_ids": "input_ids"}}, "no attention_mask"),
    (
        {"inputs": {"input_ids": "input_ids", "past_conv_names": "past.%d.conv"}},
        "cannot roll back",
    ),
    (
        {
            "inputs": {
                "input_ids": "input_ids",
                "attention_mask": "attention_mask",
                "past_key_names": "%9999999999d",
                "past_value_names": "%s%d",
            }
        },
        "does not name the past",
    ),
    (
        {
            "inputs": {
                "input_ids": "attention_mask",
                "attention_mask": "input_ids",
                "position_ids": "where",
                "past_key_names": "past_key_values.%d.key",
                "past_value_names": "past_key_values.%d.value",
            }
        },
        "only one of the two has where",
    ),
]


@pytest.mark.parametrize(("changes", "message"), CHANGES, ids=range(len(CHANGES)))
def test_configurations_that_are_not_the_graphs_are_refused(folder, changes, message):
    change(folder, changes)
    with pytest.raises(ExportError, match=message) as info:
        keep(folder)
    assert "\n" not in str(info.value)
    assert not (folder.parent / "kept").exists()


def _retype(name, kind):
    def how(graph):
        for value in (*graph.input, *graph.output):
            if value.name == name:
                value.type.tensor_type.elem_type = kind

    return how


def _more_inputs(graph):
    graph.input.append(helper.make_tensor_value_info("pixels", TensorProto.FLOAT, [1]))


def _outside(graph):
    for tensor in graph.initializer:
        for entry in tensor.external_data:
            entry.value = "../../secret" if entry.key == "location" else entry.value


def _pruned(graph):
    for value in graph.output:
        if value.name == "logits":
            value.type.tensor_type.shape.dim[1].dim_value = 1


def _other_attention(graph):
    _single(graph, "GroupQueryAttention").op_type = "MultiHeadAttention"


GRAPHS = [
    (_more_inputs, "only one of the two has pixels"),
    (_outside, "outside the folder"),
    (_pruned, "a row for each"),
    (_other_attention, "layers without GroupQueryAttention"),
    (_retype("logits", TensorProto.BFLOAT16), "logits is type 16"),
    (_retype("input_ids", TensorProto.INT32), "input_ids is type 6"),
    (_retype("past_key_values.0.key", TensorProto.FLOAT16), "more than one data type|0.key is"),
    (lambda graph: graph.output.pop(), "has no"),
]


@pytest.mark.parametrize(("how", "message"), GRAPHS, ids=range(len(GRAPHS)))
def test_graphs_of_another_kind_are_refused(folder, how, message):
    edit(folder, how)
    with pytest.raises(ExportError, match=message):
        keep(folder)


def test_what_is_missing_or_damaged_is_named(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(genai_graph, "MOST_BYTES", 100)
        with pytest.raises(ExportError, match="too large to be a graph"):
            keep(folder)
    (folder / "model.onnx.data").rename(folder / "elsewhere")
    with pytest.raises(ExportError, match=r"lacks model\.onnx\.data"):
        keep(folder)
    (folder / "model.onnx").write_bytes(b"\x00graph")
    with pytest.raises(ExportError, match=r"not an ONNX graph"):
        keep(folder)
    (folder / "genai_config.json").unlink()
    with pytest.raises(ExportError, match=r"has no genai_config\.json"):
        keep(folder)
    with pytest.raises(ExportError, match=r"has no genai_config\.json"):
        export_model("default", folder.parent / "kept", dialect="genai")


def test_without_the_dialect_the_error_names_it(folder):
    with pytest.raises(ExportError, match=r"has no config\.json: .* --dialect genai"):
        export_model(str(folder), folder.parent / "kept")


def test_tokenizers_that_do_not_fit_are_refused(folder):
    big = genai_folder(folder.parent / "big", vocab=200)
    (folder / "tokenizer.json").write_bytes((big / "tokenizer.json").read_bytes())
    with pytest.raises(ExportError, match="has 200 tokens, but its graph has logits of only 128"):
        keep(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ExportError, match="tokenizer"):
        keep(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ExportError, match=r"tokenizer\.json"):
        keep(folder)


@pytest.mark.parametrize(
    "options",
    [{"precision": "int4"}, {"first_layers": 1}, {"context": 64}, {"ignore_keys": ["a"]}],
)
def test_what_would_change_the_graph_is_refused(folder, options):
    with pytest.raises(ExportError, match="copies a folder unchanged"):
        keep(folder, **options)


def test_stages_of_it_are_refused(tmp_path):
    artifact = genai_artifact(tmp_path / "a")
    with pytest.raises(ExportError, match="ONNX Runtime GenAI, which cannot be cut"):
        split_artifact(artifact.path, tmp_path / "stages", stages=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trees": True}, "must not have trees"),
        ({"files": {"model.onnx": "0" * 64, "tokenizer.json": "0" * 64}}, "genai_config"),
    ],
)
def test_manifests_that_say_otherwise_are_refused(tmp_path, changes, message):
    path = genai_artifact(tmp_path / "a").path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ArtifactError, match=message):
        Artifact.open(path.parent)


@pytest.mark.parametrize("changes", [{"hidden_states": True}, {"padded_vocab_size": 200}])
def test_manifests_of_other_graphs_do_not_open(tmp_path, changes):
    path = genai_artifact(tmp_path / "a").path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ProviderError, match="describes another graph"):
        open_model(path.parent)
