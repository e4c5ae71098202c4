"""`pilotfish export model … --board NAME`, as a user calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from math import prod
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from pilotfish.boards.board import ALL_BOARDS
from pilotfish.cli import main
from pilotfish.engines.artifact import Artifact
from pilotfish.export.sources.huggingface import describe_directory
from pilotfish.export.weight_recorder import shapes
from tests.support.hub import serving_hub
from tests.support.small_checkpoints import LLAMA, tokenizer_json, write_directory, write_gguf

SEVEN_B = {
    **LLAMA,
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_directory(tmp_path_factory.mktemp("checkpoint") / "m")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint of 8 billion weights as a file with a hole, which holds none of them."""
    path = tmp_path_factory.mktemp("large") / "m"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SEVEN_B))
    (path / "tokenizer.json").write_text(tokenizer_json())
    header, end = {}, 0
    for name, shape in shapes(describe_directory(path, "m", ()).config).items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path


def export(source: Path, out: Path, *words: object) -> int:
    try:
        return main(["export", "model", str(source), "--out", str(out), *map(str, words)])
    except SystemExit as ended:  # as argparse ends wrong usage
        return int(ended.code or 0)


@pytest.mark.parametrize("board", ALL_BOARDS)
def test_every_board_says_what_it_chose_and_why(
    board: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(checkpoint, tmp_path / "out", "--board", board, "--dry-run") == 0
    lines = capsys.readouterr().err.splitlines()
    kinds = [line.removeprefix("pilotfish: ").split(":")[0] for line in lines]
    assert set(kinds) >= {"board", "form", "why", "memory", "speed", "sources"}
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "dialect", "precision"),
    [
        (["orin-nano"], "opset17", "fp16"),
        (["orin-nano", "--jetpack", "7.2"], "tensorrt", "int4"),
        (["thor", "--role", "edge"], "opset24", "fp16"),
        (["rtx"], "opset24", "fp16"),
        (["cpu"], "contrib", "int8"),
        (["orin-nano", "--cpu"], "contrib", "int8"),
        (["orin-nx", "--precision", "fp32"], "opset17", "fp32"),
    ],
)
def test_the_artifact_has_the_boards_form(
    words: list[str], dialect: str, precision: str, checkpoint: Path, tmp_path: Path
) -> None:
    assert export(checkpoint, tmp_path / "out", "--no-check", "--board", *words) == 0
    manifest = Artifact.open(tmp_path / "out").manifest
    assert (manifest.dialect, manifest.precision) == (dialect, precision)


def test_a_gguf_file_keeps_its_blocks_where_the_board_takes_them(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", kind=GGMLQuantizationType.Q8_0)
    assert export(source, tmp_path / "a", "--no-check", "--board", "thor") == 0
    assert Artifact.open(tmp_path / "a").manifest.precision == "stored"
    assert export(source, tmp_path / "b", "--no-check", "--board", "orin-nano") == 0
    assert Artifact.open(tmp_path / "b").manifest.precision == "fp16"


def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_read(
    large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = time.process_time()
    assert export(large, tmp_path / "out", "--board", "orin-nano") == 65
    assert time.process_time() - start < 5
    assert os.stat(large / "model.safetensors").st_size > 15e9
    message = capsys.readouterr().err
    assert "m does not fit into Jetson Orin Nano 8 GB: it needs weights of 15.0 GiB" in message
    assert "choose a smaller model, or a board with more memory" in message
    assert not (tmp_path / "out").exists()


def test_a_model_of_the_hub_is_refused_before_it_is_downloaded(large: Path, tmp_path: Path) -> None:
    with serving_hub(large) as hub:
        words = ["-m", "pilotfish", "export", "model", "owner/tiny", "--out", str(tmp_path / "out")]
        for board, more, code in (("orin-nano", (), 65), ("thor", ("--dry-run",), 0)):
            done = subprocess.run(
                [sys.executable, *words, "--board", board, *more],
                env=hub.environment(tmp_path / "home"),
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert done.returncode == code, done.stderr
            answer = "does not fit into" if code else "form: --dialect tensorrt --precision int4"
            assert answer in done.stderr
        assert set(hub.sent) == {"config.json"}


def test_a_folder_without_weights_is_judged_by_its_configuration(
    large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_bytes((large / "config.json").read_bytes())
    for words, code in (("orin-nano", 65), ("orin-nano --dry-run", 65), ("thor --dry-run", 0)):
        answers = []
        for source in (large, folder):
            assert export(source, tmp_path / "out", "--board", *words.split()) == code
            answers.append(capsys.readouterr().err)
        assert answers[0] == answers[1]
    assert export(folder, tmp_path / "out", "--board", "thor") == 65
    assert "no model.safetensors" in capsys.readouterr().err


def test_a_context_that_does_not_fit_is_shortened_or_refused(
    large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--board", "orin-nx", "--jetpack", "7.2", "--dry-run"]
    assert export(large, tmp_path / "out", *words) == 0
    assert "a longer one does not fit into the memory" in capsys.readouterr().err
    assert export(large, tmp_path / "out", *words, "--context", 131072) == 65
    assert "choose --context" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "clause"),
    [
        (["orin-nano", "--dialect", "contrib", "--precision", "int4"], "the dialect contrib"),
        (["orin-nano", "--jetpack", "6.2", "--precision", "int4"], "TensorRT 10.3"),
        (["rtx", "--dialect", "contrib"], "the dialect contrib"),
    ],
)
def test_a_gpu_that_would_idle_is_refused_in_a_sentence(
    words: list[str],
    clause: str,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert export(checkpoint, tmp_path / "out", "--board", *words) == 65
    message = capsys.readouterr().err
    assert "idle" in message
    assert clause in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "clause"),
    [
        (["orin-nano", "--context", "1000000"], "positions, not 1000000"),
        (["rtx", "--dialect", "opset17", "--precision", "int8"], "opset17 cannot express int8"),
        (["thor", "--precision", "stored"], "no blocks to keep"),
    ],
)
def test_a_dry_run_refuses_what_the_export_refuses(
    words: list[str],
    clause: str,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for dry in (["--dry-run"], []):
        assert export(checkpoint, tmp_path / "out", "--board", *words, *dry) == 65
        assert clause in capsys.readouterr().err


def test_a_target_is_not_told_of_quantised_weights(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--board", "orin-nano", "--dry-run", "--role", "edge")
    assert export(checkpoint, tmp_path / "out", *words) == 0
    assert "--jetpack 7.2 would allow half the keys and values" in capsys.readouterr().err


def test_a_provider_that_takes_the_form_suffices(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--board", "rtx", "--dialect", "opset24", "--precision", "int4", "--dry-run")
    assert export(checkpoint, tmp_path / "out", *words) == 0
    assert "provider: cuda" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--jetpack", "6.2"], "need --board"),
        (["--cpu"], "need --board"),
        (["--board", "cpu", "--precision", "auto"], "leave it out with --board"),
        (["--board", "cpu", "--dialect", "llamacpp"], "leave out --board"),
    ],
)
def test_flags_that_do_not_go_together_are_wrong_usage(
    words: list[str],
    message: str,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert export(checkpoint, tmp_path / "out", *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["xavier"], "'xavier' is no board that this version knows: choose orin-nano"),
        (["thor", "--jetpack", "6.2"], "does not run JetPack 6.2: choose 7.2"),
    ],
)
def test_an_unknown_board_or_jetpack_is_refused(
    words: list[str],
    message: str,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert export(checkpoint, tmp_path / "out", "--board", *words) == 64
    assert message in capsys.readouterr().err


def test_a_part_of_a_model_has_the_parts_size(
    large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--board", "agx-orin", "--dry-run")
    assert export(large, tmp_path / "out", *words, "--first-layers", 16) == 0
    assert "weights about 8.5 GiB" in capsys.readouterr().err


def test_the_boards_are_listed_with_the_sources_of_their_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["export", "list", "--boards"]) == 0
    text = capsys.readouterr().out
    for board in ALL_BOARDS.values():
        for name, source in board.sources.items():
            assert f"{board.name}: {name}: {source}" in text
    assert main(["export", "list", "--boards", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in listed["boards"]] == [*ALL_BOARDS]
    assert {each["version"] for each in listed["jetpacks"]} == {"6.2", "7.2"}
