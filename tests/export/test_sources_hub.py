"""Hub ids, against a small hub on this machine (`tests.support.hub`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hub import COMMIT, Hub, serving_hub
from tests.support.sentencepieces import trained, write_model
from tests.support.small_checkpoints import LLAMA, write_directory

# Opens the sources in a fresh process, for the hub's client reads its environment when imported.
SCRIPT = """
import sys
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources import open_source
for name in sys.argv[1:]:
    try:
        source = open_source(name)
    except ExportError as error:
        print(type(error).__name__, error)
    else:
        d = source.description
        print(d.kind, d.location, d.revision, source.config.name, *sorted(d.sha256))
        print(source.tensor("model.norm.weight").shape)
"""


def open_in_process(hub: Hub, home: Path, *sources: str) -> str:
    """Return what the script prints on stdout, and then on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *sources],
        env=hub.environment(home),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_hub_id(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "served", shards=2)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "consolidated.safetensors").write_bytes(b"the same again")
    with serving_hub(folder) as hub:
        for source in ("owner/tiny", "owner/tiny@main"):
            output = open_in_process(hub, tmp_path / "home", source)
            assert output.startswith(f"hub owner/tiny {COMMIT} tiny config.json model-00001")
            assert "(32,)" in output
        # Only what is needed, and once.
        assert sorted(hub.sent) == [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
        ]


def test_a_tokenizer_in_another_form_and_named_templates_are_fetched(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "served", LLAMA | {"vocab_size": 700})
    (folder / "tokenizer.json").unlink()
    write_model(folder, trained("bpe"))
    (folder / "chat_template.jinja").write_text("usual")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    (folder / "onnx").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / "onnx" / name).write_text("of no use")
    with serving_hub(folder) as hub:
        output = open_in_process(hub, tmp_path / "home", "owner/tiny")
        assert "config.json model.safetensors tokenizer.model\n" in output
        assert sorted(hub.sent) == [
            "additional_chat_templates/tool_use.jinja",
            "chat_template.jinja",
            "config.json",
            "model.safetensors",
            "tokenizer.model",
        ]


def test_what_is_not_supported_costs_no_download(tmp_path: Path) -> None:
    for number, change in enumerate(
        ({"model_type": "bloom"}, {"is_causal": False}, {"quantization_config": {"bits": 4}})
    ):
        folder = write_directory(tmp_path / f"served-{number}", LLAMA | change)
        with serving_hub(folder) as hub:
            output = open_in_process(hub, tmp_path / f"home-{number}", "owner/tiny")
            assert "ExportError" in output
            assert "config.json: " in output
            assert hub.sent == ["config.json"]


def test_an_unreachable_hub(tmp_path: Path) -> None:
    with serving_hub(write_directory(tmp_path / "served")) as hub:
        pass
    unreachable = open_in_process(hub, tmp_path / "home", "owner/tiny")
    assert "DownloadError owner/tiny could not be fetched" in unreachable
    assert "give a directory" in unreachable


def test_absent_private_and_gated_models_say_which_names_there_are_and_how_to_log_in(
    tmp_path: Path,
) -> None:
    names = ("owner/x", "another/tiny-model", "owner/private", "owner/gated", "owner/tiny@v9")
    with serving_hub(write_directory(tmp_path / "served")) as hub:
        absent, near, private, gated, revision = (
            open_in_process(hub, tmp_path / "home", *names).strip().splitlines()
        )
    assert absent.startswith("DownloadError the hub has no model owner/x")
    assert "did you mean" not in absent  # the search found nothing like it
    assert "did you mean owner/tiny?" in near
    assert "HF_TOKEN" in private
    assert "accept its licence" in gated
    assert "HF_TOKEN" in gated
    assert "owner/tiny has no revision v9" in revision


def test_a_cut_download_goes_on_where_it_ended_and_says_so(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "served")
    # the client writes whole chunks of 10 MiB
    (folder / "large.json").write_bytes(b" " * (24 << 20))
    with serving_hub(folder) as hub:
        hub.cut.add("large.json")
        output = open_in_process(hub, tmp_path / "home", "owner/tiny")
        assert hub.ranges == [f"bytes={10 << 20}-"]
    assert "(32,)" in output
    assert "Trying to resume download" in output


def test_a_file_of_another_size_than_announced_is_refused(tmp_path: Path) -> None:
    with serving_hub(write_directory(tmp_path / "served")) as hub:
        hub.short.add("model.safetensors")
        output = open_in_process(hub, tmp_path / "home", "owner/tiny")
        assert "DownloadError" in output
        assert "should be of size" in output
        hub.short.clear()
        assert "(32,)" in open_in_process(hub, tmp_path / "home", "owner/tiny")
        assert hub.sent.count("config.json") == 1  # what had arrived whole was kept


def test_a_full_disk_says_where_to_free_space(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "served")
    (folder / "large.json").write_bytes(b" " * (2 << 20))
    home = tmp_path / "home"
    home.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(home)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        with serving_hub(folder) as hub:
            output = open_in_process(hub, home, "owner/tiny")
        assert f"the disk is full, so owner/tiny could not be fetched into {home}/hub" in output
        assert "HF_HOME" in output
    finally:
        subprocess.run(["umount", home], check=True)
