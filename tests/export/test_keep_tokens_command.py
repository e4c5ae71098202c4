"""`pilotfish export model … --keep-tokens N --for TEXT|DIR|ADDRESS`, as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pilotfish import Device, EdgeServer
from pilotfish.cli import main
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.tokenizer import Tokenizer
from tests.device_runtime.test_unigram import artifact as unigram_artifact
from tests.support.small_checkpoints import LLAMA, write_gguf
from tests.support.tiny import tiny_artifact


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("source") / "m.gguf", LLAMA)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    out = tmp_path_factory.mktemp("whole") / "whole"
    assert main(["export", "model", str(source), "--out", str(out)]) == 0
    return Artifact.open(out)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "a.jsonl"
    path.write_text(json.dumps({"question": "qqq", "answer": "zzzz xyz"}) + "\n")
    return path


def export(source: Path, out: Path, *words: object) -> int:
    try:
        return main(["export", "model", str(source), "--out", str(out), *map(str, words)])
    except SystemExit as ended:  # as argparse ends wrong usage
        return int(ended.code or 0)


def test_the_tokens_of_a_text_are_kept_first(
    source: Path, whole: Artifact, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert export(source, out, "--keep-tokens", 40, "--for", text, "--precision", "int8") == 0
    output = capsys.readouterr()
    assert output.out.strip() == str(out)
    assert f"kept 40 of {whole.manifest.vocab_size} tokens, 100.00%" in output.err
    assert "the texts are short" in output.err
    cut = Artifact.open(out)
    cut.verify()
    head_tokens = cut.head_tokens
    assert head_tokens is not None
    tokenizer = Tokenizer(cut)
    assert {*tokenizer.encode("zzzz xyz"), *cut.manifest.eos_ids} <= {*head_tokens.tolist()}
    rest = np.setdiff1d(head_tokens, [*tokenizer.encode("zzzz xyz"), *cut.manifest.eos_ids])
    assert rest.max() < 60  # the lowest ids


@pytest.mark.parametrize("away", [False, True], ids=["an artifact", "an edge"])
def test_a_target_is_asked(
    source: Path, whole: Artifact, tmp_path: Path, away: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what the target says at temperature 1, it drafts as well as the whole head."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\nhello\n")
    out = tmp_path / "out"
    with EdgeServer(whole.path, rate=1e6, context=200, threads=1) as edge:
        target = edge.endpoint if away else whole.path
        options = ("--keep-tokens", 60, "--for", target, "--prompts", prompts)
        assert export(source, out, *options) == 0
        assert "kept 60 of" in capsys.readouterr().err
        with Device(out, edge.endpoint, threads=1) as device:
            for protocol in ("greedy", "ahead"):
                wanted = device.generate("a", protocol="stream", max_tokens=16)
                assert device.generate("a", protocol=protocol, max_tokens=16).tokens == (
                    wanted.tokens
                )


def test_of_another_vocabulary_what_it_lacks_is_kept_last(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = [*"abcdefgh", "Ġ"]
    target = tiny_artifact(tmp_path / "target", tokens=tokens, sharpness=0.1)
    out = tmp_path / "out"
    assert export(source, out, "--keep-tokens", 20, "--for", target.path) == 0
    assert "the target, too, has" in capsys.readouterr().err
    cut = Artifact.open(out)
    assert cut.head_tokens is not None
    tokenizer = Tokenizer(cut)
    assert {tokenizer.encode(letter)[-1] for letter in "abcdefgh"} <= {*cut.head_tokens.tolist()}


def test_beside_a_target_that_has_all_tokens_none_is_useless(
    source: Path, whole: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = tiny_artifact(tmp_path / "some", tokens=[*"abcdefgh", "Ġ"], sharpness=0.1)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\n")
    options = ("--keep-tokens", 20, "--for", some.path, "--for", whole.path, "--prompts", prompts)
    assert export(source, tmp_path / "out", *options) == 0
    assert "the target, too, has" not in capsys.readouterr().err


def test_a_target_that_it_cannot_draft_for_is_not_asked(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = unigram_artifact(tmp_path / "target", 1)
    assert export(source, tmp_path / "out", "--keep-tokens", 20, "--for", target) == 76
    err = capsys.readouterr().err
    assert "the target answers" not in err
    assert "a Unigram vocabulary cannot be sent" in err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--keep-tokens", "40"], "--keep-tokens needs the target's texts"),
        (["--for", "a.txt"], "--for goes with --keep-tokens"),
        (["--keys", "."], "--keys goes with --keep-tokens"),
        (["--keep-tokens", "0", "--for", "a.txt"], "0 is not between 1 and"),
        (
            ["--keep-tokens", "9", "--for", "a.txt", "--prompts", "b.txt"],
            "--prompts needs a target",
        ),
        (
            ["--keep-tokens", "9", "--for", "a.txt", "--dialect", "llamacpp"],
            "--dialect llamacpp keeps the source's head",
        ),
    ],
)
def test_wrong_usage_ends_in_a_sentence(
    source: Path, tmp_path: Path, words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(source, tmp_path / "out", *words) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "count", "reason"),
    [
        (b"abc", 100_000, "--keep-tokens must be less than that number, not 100000"),
        (b"", 40, "contains no text"),
        (b"\xff\xfe\0\0", 40, "is not UTF-8 text"),
        (None, 40, "cannot be read"),
    ],
)
def test_what_cannot_be_ends_in_a_sentence(
    source: Path,
    tmp_path: Path,
    content: bytes | None,
    count: int,
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_bytes(content)
    assert export(source, tmp_path / "out", "--keep-tokens", count, "--for", path) == 65
    lines = capsys.readouterr().err.strip().splitlines()
    assert reason in lines[-1]
    assert lines[-1].startswith("pilotfish: ")
    assert not (tmp_path / "out").exists()


def test_a_target_with_a_cut_head_is_none(
    source: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(source, tmp_path / "cut", "--keep-tokens", 40, "--for", text) == 0
    options = ("--keep-tokens", 30, "--for", tmp_path / "cut")
    assert export(source, tmp_path / "out", *options) == 66
    assert "computes logits for only 40 of its tokens" in capsys.readouterr().err
