"""GGUF files kept as they are: the artifact, and what is refused. Runs without llama.cpp."""

import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from pilotfish.base.extras import install_command
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_errors import ArtifactError, ProviderError
from pilotfish.engines.language_model import open_model
from pilotfish.engines.llamacpp import native
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.export import atomic
from pilotfish.export.catalog import list_artifacts
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from pilotfish.export.split import split_artifact
from tests.support.gguf_models import gguf_artifact, gguf_file, write_foreign
from tests.support.prefill import prefill
from tests.support.tiny import tiny_artifact

HYBRID = {
    "block_count": 4,
    "context_length": 4096,
    "embedding_length": 32,
    "attention.head_count": [4, 0, 4, 4],
    "attention.head_count_kv": [2, 0, 1, 2],
    "attention.key_length": 16,
    "expert_feed_forward_length": 24,
}
SOME = {"token_embd.weight": (264, 32)} | {f"blk.{i}.attn_norm.weight": (32,) for i in range(4)}


@pytest.fixture
def without_llama_cpp(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    native._library.cache_clear()
    yield
    native._library.cache_clear()


def keep(file: Path, out: Path) -> Artifact:
    return export_model(str(file), out, dialect="llamacpp")


def test_the_artifact_is_the_file_with_a_tokenizer_and_a_manifest(tmp_path):
    file = gguf_file(tmp_path / "tiny-Q8_0.gguf", "qwen3")
    selection, ours = keep(file, tmp_path / "kept"), export_model(str(file), tmp_path / "ours")
    manifest, other = selection.manifest, ours.manifest
    assert os.path.samefile(selection.gguf_path, file)  # no second copy
    assert (manifest.dialect, manifest.precision, manifest.opset) == ("llamacpp", "gguf", None)
    assert manifest.files.keys() == {"model.gguf", "tokenizer.json"}
    for same in (
        "model", "architecture", "dimensions", "vocab_size", "padded_vocab_size", "bos_id",
        "eos_ids", "chat_template", "tokenizer_fingerprint", "source", "origin",
    ):  # fmt: skip
        assert getattr(manifest, same) == getattr(other, same), same
    assert Artifact.open(selection.path).manifest == manifest
    assert selection.tokenizer_path.read_bytes() == ours.tokenizer_path.read_bytes()
    assert {entry.precision for entry in list_artifacts(tmp_path)} == {"gguf", "fp32"}
    selection.verify()
    content = bytearray(selection.gguf_path.read_bytes())
    content[-1] ^= 1
    selection.gguf_path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"model\.gguf.*SHA-256"):
        selection.verify()
    selection.gguf_path.unlink()
    with pytest.raises(ArtifactError, match=r"lacks model\.gguf"):
        Artifact.open(selection.path)


def test_a_file_on_another_file_system_is_copied(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    file = gguf_file(tmp_path / "tiny.gguf")
    monkeypatch.setattr(atomic.os, "link", refuse)
    selection = keep(file, tmp_path / "kept")
    assert not os.path.samefile(selection.gguf_path, file)
    assert selection.gguf_path.read_bytes() == file.read_bytes()


def test_an_architecture_that_our_exporter_does_not_know_is_kept(tmp_path):
    file = write_foreign(tmp_path / "odd.gguf", "granitemoe", HYBRID, SOME)
    sizes = keep(file, tmp_path / "kept").manifest.dimensions
    assert (sizes.layers, sizes.heads, sizes.kv_heads, sizes.head_dim) == (4, 4, 2, 16)
    assert (sizes.intermediate, sizes.context, sizes.hidden) == (24, 4096, 32)
    with pytest.raises(ExportError, match="granitemoe"):
        export_model(str(file), tmp_path / "ours")


@pytest.mark.parametrize(
    ("changes", "architecture", "message"),
    [
        ({"ssm.conv_kernel": 4}, "jamba", "jamba has recurrent states"),
        ({"shortconv.l_cache": 3}, "lfm2", "lfm2 has recurrent states"),
        ({"wkv.head_size": 64}, "rwkv7", "rwkv7 has recurrent states"),
        ({"attention.causal": False}, "bert", "token by token"),
        ({"decoder_start_token_id": 0}, "t5", "token by token"),
        ({"block_count": 0}, "gemma2", "gemma2.block_count"),
        ({"context_length": 1.5}, "gemma2", "gemma2.context_length"),
    ],
)
def test_models_of_no_use_are_refused(tmp_path, changes, architecture, message):
    file = write_foreign(tmp_path / "odd.gguf", architecture, {**HYBRID, **changes})
    with pytest.raises(ExportError, match=message):
        keep(file, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": 3}, "block_count is 3, but the file has tensors of 4"),
        ({"block_count": 4096}, "block_count is 4096, but the file has tensors of 4"),
        ({"expert_count": 4}, "expert_count is 4, but no tensor has experts"),
        ({"expert_used_count": 9}, "expert_used_count is 9, but there are 0 experts"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "epsilon is nan"),
        ({"attention.layer_norm_rms_epsilon": -1.0}, "epsilon is -1.0"),
        ({"attention.layer_norm_epsilon": float("inf")}, "epsilon is"),
    ],
)
def test_what_would_end_llama_cpps_process_is_refused(tmp_path, changes, message):
    file = write_foreign(tmp_path / "odd.gguf", "llama", {**HYBRID, **changes}, SOME)
    with pytest.raises(ExportError, match=message):
        keep(file, tmp_path / "kept")


def test_a_tokenizer_that_is_not_known_is_refused_with_its_name(tmp_path):
    file = write_foreign(tmp_path / "odd.gguf", "gemma2", HYBRID, SOME, pretokenizer="martian")
    with pytest.raises(ExportError, match="martian"):
        keep(file, tmp_path / "kept")


@pytest.mark.parametrize(
    "options", [{"precision": "int4"}, {"first_layers": 1}, {"ignore_keys": ["a"]}]
)
def test_what_would_change_the_file_is_refused(tmp_path, options):
    file = gguf_file(tmp_path / "tiny.gguf")
    with pytest.raises(ExportError, match="unchanged"):
        export_model(str(file), tmp_path / "kept", dialect="llamacpp", **options)
    for other in (str(tmp_path), "some/model"):
        with pytest.raises(ExportError, match="not a GGUF file"):
            keep(Path(other), tmp_path / "kept")


def test_without_llama_cpp_the_error_says_what_to_install(tmp_path, without_llama_cpp):
    artifact = gguf_artifact(tmp_path)
    with pytest.raises(ProviderError, match=re.escape(install_command("llamacpp"))):
        open_model(artifact)
    with pytest.raises(ProviderError, match="not on tensorrt"):
        open_model(artifact, provider="tensorrt")
    with pytest.raises(ProviderError, match="open_model"):
        Decoder(artifact)


def test_one_place_opens_every_artifact(tmp_path):
    model = open_model(tiny_artifact(tmp_path / "a").path, slots=2, context=64)
    assert isinstance(model, Decoder)
    assert (model.slots, model.context) == (2, 64)
    assert np.isfinite(prefill(model, 1, [1, 2, 3]).logits).all()


def test_stages_of_it_are_refused_and_older_manifests_open(tmp_path):
    artifact = gguf_artifact(tmp_path)
    with pytest.raises(ExportError, match="cannot be cut"):
        split_artifact(artifact.path, tmp_path / "stages", stages=2)
    plain = json.loads((tiny_artifact(tmp_path / "b").path / "manifest.json").read_text())
    assert isinstance(plain["opset"], int)  # as before
