"""Exporting: what is written, what is refused, what stays when it is interrupted, what it costs."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.export.atomic import replacing
from pilotfish.export.catalog import list_artifacts
from pilotfish.export.dialects import choose_dialect
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from tests.support.small_checkpoints import LLAMA, write_directory
from tests.support.tiny import RandomSource, tiny_artifact, tiny_config

MIB = 2**20


def test_the_manifest_says_what_the_artifact_is(tmp_path):
    artifact = tiny_artifact(tmp_path / "a", architecture="qwen2", vocab=100, padded_vocab=128)
    manifest = Artifact.open(tmp_path / "a").manifest
    assert manifest == artifact.manifest
    assert (manifest.architecture, manifest.precision) == ("qwen2", "fp32")
    assert (manifest.vocab_size, manifest.padded_vocab_size) == (100, 128)
    assert manifest.eos_ids == [99]
    assert manifest.dimensions.kv_heads == 2
    artifact.verify()
    (artifact.path / "model.onnx.data").write_bytes(b"other")
    with pytest.raises(Exception, match="SHA-256"):
        artifact.verify()


def test_the_same_vocabulary_has_the_same_fingerprint(tmp_path):
    a, b = (
        tiny_artifact(tmp_path / name, architecture=name, precision=precision).manifest
        for name, precision in (("llama", "fp32"), ("qwen3", "int8"))
    )
    other = tiny_artifact(tmp_path / "other", vocab=64).manifest
    assert a.tokenizer_fingerprint == b.tokenizer_fingerprint != other.tokenizer_fingerprint


def test_artifacts_are_found_and_listed(tmp_path):
    tiny_artifact(tmp_path / "x" / "one")
    tiny_artifact(tmp_path / "two", precision="int4")
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "manifest.json").write_text("{}")
    entries = list_artifacts(tmp_path)
    assert [Path(entry.path).name for entry in entries] == ["two", "one"]
    assert {entry.precision for entry in entries} == {"fp32", "int4"}


def test_the_command_lists_and_exports(tmp_path):
    tiny_artifact(tmp_path / "one")
    command = [sys.executable, "-m", "pilotfish", "export"]
    listed = subprocess.run(
        [*command, "list", str(tmp_path), "--json"], capture_output=True, text=True, check=True
    )
    (entry,) = json.loads(listed.stdout)
    assert {"path", "model", "precision", "dialect"} <= entry.keys()
    refused = subprocess.run(
        [*command, "model", "no/such/thing", "--out", str(tmp_path / "two")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode != 0
    assert "no/such/thing" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize(
    ("dialect", "precision", "names"),
    [("opset17", "int4", "opset17 cannot express int4"), ("esperanto", "fp32", "esperanto")],
)
def test_what_a_dialect_cannot_say_is_refused_by_name(dialect, precision, names):
    with pytest.raises(ExportError, match=names):
        choose_dialect(dialect, precision, (1, 31))


def test_heads_that_contribs_attention_does_not_take_are_refused(tmp_path):
    path = write_directory(tmp_path / "m", LLAMA | {"hidden_size": 48})  # heads of 12 channels
    with pytest.raises(ExportError, match="choose --dialect opset24"):
        export_model(str(path), tmp_path / "out", dialect="contrib")
    assert export_model(str(path), tmp_path / "out").manifest.dimensions.head_dim == 12


@pytest.mark.parametrize("runtime", [(1, 23), (1, 24), (1, 25), (1, 31)])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4"])
def test_auto_always_finds_a_dialect_that_the_runtime_knows(precision, runtime):
    dialect = choose_dialect("auto", precision, runtime)
    assert precision in dialect.precisions
    assert dialect.name != "opset24" or runtime >= (1, 25)


class Failing(RandomSource):
    """A source that breaks off half-way."""

    def tensor(self, name):
        if name.startswith("model.layers.1"):
            raise OSError("the disk is gone")
        return super().tensor(name)


def test_an_interrupted_export_leaves_what_was_there(tmp_path):
    before = tiny_artifact(tmp_path / "a", seed=1).manifest
    with pytest.raises(OSError, match="disk"):
        export_model(Failing(tiny_config(), seed=2), tmp_path / "a")
    with pytest.raises(OSError, match="disk"):
        export_model(Failing(tiny_config(), seed=2), tmp_path / "b")
    assert Artifact.open(tmp_path / "a").manifest == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.support.tiny import tiny_artifact
rename = Path.rename
def once(path, to):
    rename(path, to)
    os.kill(os.getpid(), signal.SIGKILL)
Path.rename = once
tiny_artifact(sys.argv[1], seed=2)
"""


def test_a_kill_between_the_renames_loses_nothing(tmp_path):
    before = tiny_artifact(tmp_path / "a", seed=1).manifest
    line = [sys.executable, "-c", KILLED, str(tmp_path / "a")]
    assert subprocess.run(line, check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "a").exists()
    with pytest.raises(OSError, match="disk"):  # the next export, which fails as well
        export_model(Failing(tiny_config(), seed=3), tmp_path / "a")
    assert Artifact.open(tmp_path / "a").manifest == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_artifact_that_is_not_valid_replaces_nothing(tmp_path):
    """An end of text in a padding row makes a manifest that no program opens."""
    before = tiny_artifact(tmp_path / "a", seed=1).manifest
    source = RandomSource(tiny_config(vocab_size=128), seed=2, vocab=100)
    source.change_vocabulary(eos_ids=[110])
    for out in ("a", "b"):
        with pytest.raises(ExportError, match=f"{out}.* is not valid.*eos id") as caught:
            export_model(source, tmp_path / out)
        assert "partial" not in str(caught.value)
    assert Artifact.open(tmp_path / "a").manifest == before
    Artifact.open(tmp_path / "a").verify()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_is_no_artifact_is_not_overwritten(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    with pytest.raises(ExportError, match="thesis"):
        tiny_artifact(tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter1.txt").read_text() == "years of work"


class Large(RandomSource):
    """2.4 GB of weights that cost nothing to make."""

    def tensor(self, name):
        shape = self._shapes[name]
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        count = int(np.prod(shape))
        base = np.linspace(-0.02, 0.02, 9973, dtype=np.float32)
        return np.resize(base, count).reshape(shape)


LARGE = {"layers": 24, "hidden": 1024, "intermediate": 8192, "heads": 16, "head_dim": 64}


def export_large(out):
    """Export in this process; print its peak memory and that of one tensor, in bytes."""
    baseline = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    export_model(Large(tiny_config(**LARGE), seed=0), Path(out))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"baseline": baseline, "peak": peak}))


@pytest.mark.slow
def test_weights_stream_through_and_may_exceed_two_gigabytes(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from tests.export.test_export import *; export_large({str(tmp_path / 'a')!r})",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    memory = json.loads(done.stdout)
    weights = (tmp_path / "a" / "model.onnx.data").stat().st_size
    largest = 2 * LARGE["intermediate"] * LARGE["hidden"] * 4  # gate and up stand together
    assert weights > 2 * 2**30
    # far below the 1.3 × artifact + one tensor that is allowed: two copies of the largest tensor
    assert memory["peak"] - memory["baseline"] < 4 * largest + 64 * MIB < 0.2 * weights
    decoder = Decoder(tmp_path / "a")
    logits = decoder.forward([Pass(slot=0, tokens=np.array([1, 2, 3]))])[0].logits
    assert np.isfinite(logits).all()


def test_progress_is_told(tmp_path):
    messages = []
    source = RandomSource(tiny_config(), seed=0)
    export_model(source, tmp_path / "a", progress=lambda *step: messages.append(step))
    labels = {label for label, _, _ in messages}
    assert labels
    assert all(total is None or 0 <= done <= total for _, done, total in messages)
    assert any(done == total for _, done, total in messages)


def test_manifests_survive_json(tmp_path):
    manifest = tiny_artifact(tmp_path / "a").manifest
    assert msgspec.json.decode(manifest.encode(), type=type(manifest)) == manifest


def test_a_disk_that_fills_up_is_told_with_the_folder(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match="No space left on device") as caught,
        replacing(tmp_path / "out"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a write to a full disk
    assert caught.value.filename == str(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
