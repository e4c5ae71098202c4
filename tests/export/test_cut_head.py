"""`--keep-tokens`: the head of the kept tokens is the whole head's; nothing else has changed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.language_model import open_model
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.engines.tokenizer import Tokenizer
from pilotfish.export.dialects import DIALECTS
from pilotfish.export.export_errors import ExportError
from pilotfish.export.head_tokens import (
    choose_tokens,
    count_tokens,
    needed_tokens,
    read_texts,
)
from pilotfish.export.model import export_model
from pilotfish.export.sources import open_source
from pilotfish.export.split import split_artifact
from tests.support.examples import examples
from tests.support.prefill import prefill
from tests.support.small_checkpoints import LLAMA, write_gguf
from tests.support.tiny import RandomSource, tiny_artifact, tiny_config

TOKENS = np.arange(1, 40)
KEPT = np.array([*range(0, 120, 7), 127])
BIASED = {"form": msgspec.structs.replace(tiny_config().form, biases=("lm_head",))}


# The network


@pytest.mark.parametrize(
    ("dialect", "precision"),
    [(name, each) for name, kind in DIALECTS.items() for each in kind.precisions],
)
@pytest.mark.parametrize(
    "changes", [{"tied": True}, {"tied": False, **BIASED}], ids=["tied", "own"]
)
def test_the_logits_are_the_whole_heads(
    tmp_path: Path, dialect: str, precision: Any, changes: dict[str, Any]
) -> None:
    made = {"precision": precision, "dialect": dialect, "seed": 3, **changes}
    whole = tiny_artifact(tmp_path / "whole", **made)
    cut = tiny_artifact(tmp_path / "cut", head_tokens=KEPT.tolist(), **made)
    wanted, got = (prefill(Decoder(each, threads=1), 0, TOKENS, rows=9) for each in (whole, cut))
    assert got.logits.shape == (9, len(KEPT))
    assert np.array_equal(got.hidden, wanted.hidden)
    # a product of fewer columns may add up in another order
    np.testing.assert_allclose(got.logits, wanted.logits[:, KEPT], rtol=1e-5, atol=1e-5)
    assert cut.head_tokens is not None
    assert np.array_equal(cut.head_tokens, KEPT)
    assert whole.head_tokens is None


@pytest.mark.parametrize("family", ["gemma2", "cohere", "opt-post-norm", "gemma3n", "mamba2"])
def test_caps_scales_and_narrow_embeddings_stay(tmp_path: Path, family: str) -> None:
    made = {"architecture": family, "dialect": "opset24", "seed": 1}
    whole = tiny_artifact(tmp_path / "whole", **made)
    cut = tiny_artifact(tmp_path / "cut", head_tokens=KEPT.tolist(), **made)
    wanted, got = (prefill(Decoder(each, threads=1), 0, TOKENS, rows=4) for each in (whole, cut))
    np.testing.assert_allclose(got.logits, wanted.logits[:, KEPT], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["int8", "stored"])
def test_blocks_of_a_file_are_kept_and_the_file_is_smaller(tmp_path: Path, precision: Any) -> None:
    source = str(write_gguf(tmp_path / "tiny.gguf", LLAMA, kind=GGMLQuantizationType.Q8_0))
    whole = export_model(source, tmp_path / "whole", precision=precision)
    selection = np.arange(0, whole.manifest.vocab_size, 4)
    cut = export_model(
        source, tmp_path / "cut", precision=precision, head_tokens=selection, check=True
    )
    wanted, got = (prefill(Decoder(each, threads=1), 0, TOKENS, rows=4) for each in (whole, cut))
    np.testing.assert_allclose(got.logits, wanted.logits[:, selection], rtol=1e-5, atol=1e-5)
    assert cut.manifest.cost is not None  # against float32 with the same head
    assert cut.manifest.cost.acceptance > 0.8
    assert cut.manifest.origin == whole.manifest.origin  # heads that judge by states go with both
    assert cut.manifest.digest != whole.manifest.digest
    cut.verify()


def test_the_first_layers_of_a_model_can_have_a_cut_head(tmp_path: Path) -> None:
    source = RandomSource(tiny_config(layers=3), 1)
    whole = export_model(source, tmp_path / "whole", first_layers=2)
    cut = export_model(source, tmp_path / "cut", first_layers=2, head_tokens=KEPT)
    wanted, got = (prefill(Decoder(each, threads=1), 0, TOKENS, rows=4) for each in (whole, cut))
    np.testing.assert_allclose(got.logits, wanted.logits[:, KEPT], rtol=1e-5, atol=1e-5)


# The artifact


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not an ascending list of 3 token ids below 10"),
        (np.array([1, 2], "<u4").tobytes(), "not an ascending list"),
        (np.array([1, 2, 3, 4], "<u4").tobytes(), "not an ascending list"),
        (np.array([1, 2, 3], "<u4").tobytes() + b"\0", "not an ascending list"),
        (np.array([2, 1, 3], "<u4").tobytes(), "not an ascending list"),
        (np.array([1, 1, 3], "<u4").tobytes(), "not an ascending list"),
        (np.array([1, 2, 10], "<u4").tobytes(), "not an ascending list"),
        (None, "lacks head_tokens.bin"),
    ],
)
def test_a_list_of_tokens_that_is_wrong_is_refused(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = _with_head_tokens(tmp_path / "a", content)
    with pytest.raises(ArtifactError, match=reason):
        Artifact.open(path)


def test_an_altered_list_is_noticed_at_once(tmp_path: Path) -> None:
    path = _with_head_tokens(tmp_path / "a", np.array([1, 2, 3], "<u4").tobytes())
    head_tokens = Artifact.open(path).head_tokens
    assert head_tokens is not None
    assert head_tokens.tolist() == [1, 2, 3]
    (path / "head_tokens.bin").write_bytes(np.array([1, 2, 4], "<u4").tobytes())
    with pytest.raises(ArtifactError, match=r"head_tokens\.bin is not the file that was exported"):
        Artifact.open(path)


@pytest.mark.parametrize("tokens", [0, 10, 11])
def test_a_manifest_with_an_impossible_head_is_refused(tmp_path: Path, tokens: int) -> None:
    path = _with_head_tokens(tmp_path / "a", b"", tokens)
    with pytest.raises(ArtifactError, match="is not valid"):
        Artifact.open(path)


def _with_head_tokens(path: Path, content: bytes | None, tokens: int = 3) -> Path:
    """Write an artifact of ten tokens whose head is said to have some of them."""
    tiny_artifact(path, vocab=10)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["head_tokens"] = tokens
    manifest["files"]["head_tokens.bin"] = hashlib.sha256(content or b"").hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))
    if content is not None:
        (path / "head_tokens.bin").write_bytes(content)
    return path


@pytest.mark.parametrize("kept", [None, [1, 2], [1, 2, 3, 4]])
def test_a_graph_with_another_head_than_the_manifests_is_refused(
    tmp_path: Path, kept: list[int] | None
) -> None:
    path = tiny_artifact(tmp_path / "a", vocab=10, head_tokens=[1, 2, 3]).path
    manifest = json.loads((path / "manifest.json").read_text())
    if kept is None:
        del manifest["head_tokens"], manifest["files"]["head_tokens.bin"]
    else:
        content = np.array(kept, "<u4").tobytes()
        (path / "head_tokens.bin").write_bytes(content)
        manifest["head_tokens"] = len(kept)
        manifest["files"]["head_tokens.bin"] = hashlib.sha256(content).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match="its graph computes logits of 3 tokens"):
        open_model(path, drafts=True)


def test_a_whole_head_is_written_as_before(tmp_path: Path) -> None:
    made = tiny_artifact(tmp_path / "a")
    assert b"head_tokens" not in (made.path / "manifest.json").read_bytes()
    assert not (made.path / "head_tokens.bin").exists()


def test_it_drafts_and_does_nothing_else(tmp_path: Path) -> None:
    cut = tiny_artifact(tmp_path / "cut", head_tokens=KEPT.tolist(), dialect="opset24")
    assert open_model(cut, drafts=True).vocab_size == 128
    with pytest.raises(ArtifactError, match="computes logits for only 19 of its tokens"):
        open_model(cut)
    with pytest.raises(ArtifactError, match="computes logits for only 19 of its tokens"):
        split_artifact(cut.path, tmp_path / "stages", stages=2)


@pytest.mark.parametrize("kept", [[], range(128), [3, 2], [2, 2], [-1, 4], [4, 128]])
def test_tokens_that_make_no_head_are_refused(tmp_path: Path, kept: Any) -> None:
    with pytest.raises(ExportError, match="head"):
        tiny_artifact(tmp_path / "cut", head_tokens=[*kept])
    assert not (tmp_path / "cut").exists()


@pytest.mark.parametrize("dialect", ["llamacpp", "genai"])
def test_copies_keep_their_head(tmp_path: Path, dialect: str) -> None:
    with pytest.raises(ExportError, match="--keep-tokens"):
        export_model(str(tmp_path), tmp_path / "out", dialect=dialect, head_tokens=KEPT)


# Which tokens


@given(st.data(), st.integers(1, 127), st.booleans())
@examples(60)
def test_the_most_frequent_are_kept_and_then_the_lowest(
    data: st.DataObject, count: int, some: bool
) -> None:
    source = RandomSource(tiny_config(), 1)
    counts = np.array(data.draw(st.lists(st.integers(0, 3), min_size=128, max_size=128)))
    useful = np.array(data.draw(st.lists(st.booleans(), min_size=128, max_size=128)))
    tokens = choose_tokens(source, count, counts, useful if some else None)
    assert len(tokens) == count
    assert (np.diff(tokens) > 0).all()
    assert {*source.vocabulary.eos_ids} <= {*tokens.tolist()}

    def rank(id: int) -> tuple[bool, int, int]:
        return (some and not useful[id], -int(counts[id]), id)

    inside = [rank(id) for id in tokens.tolist() if id not in source.vocabulary.eos_ids]
    outside = [rank(id) for id in range(128) if id not in tokens]
    assert not inside or not outside or max(inside) < min(outside)


def test_numbers_that_cannot_be_are_refused() -> None:
    source = RandomSource(tiny_config(), 1)
    counts = np.zeros(128, np.int64)
    for count in (128, 500):
        with pytest.raises(ExportError, match=f"has 128 tokens: .* not {count}"):
            choose_tokens(source, count, counts)
    source.change_vocabulary(eos_ids=[3, 127])
    with pytest.raises(ExportError, match="needs 2 tokens to end answers and turns"):
        choose_tokens(source, 1, counts)


def test_control_tokens_that_a_template_writes_are_kept(tmp_path: Path) -> None:
    source = open_source("default")
    needed = {
        Tokenizer.from_json(source.vocabulary.tokenizer_json).piece(id)
        for id in needed_tokens(source).tolist()
    }
    assert {"<|im_start|>", "<|im_end|>"} <= needed
    assert len(needed) < 5  # not what the vocabulary reserves


def test_tokens_are_counted() -> None:
    source = RandomSource(tiny_config(), 1)
    tokenizer = Tokenizer.from_json(source.vocabulary.tokenizer_json)
    counts = count_tokens(["abc", "", "a b"], tokenizer, 128)
    expected = np.zeros(128, np.int64)
    for id in (*tokenizer.encode("abc"), *tokenizer.encode("a b")):
        expected[id] += 1
    assert np.array_equal(counts, expected)


# Texts


def _lines(path: Path, *entries: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, entries)) + "\n\n")
    return path


def test_of_json_lines_the_answers_are_read(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    path = _lines(
        tmp_path / "a.jsonl",
        {"question": "why", "answer": "so"},
        {"messages": chat, "source": "x"},
        {"one": ["two", {"three": "four"}], "n": 3},
        "plain",
        {"text": "half \ud800"},
    )
    assert sorted(text for text in read_texts(path) if text) == sorted(
        ["so", "ho", "two", "four", "plain", "half ?"]
    )


@given(st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"]), min_size=1))
@examples(30)
def test_a_text_is_read_whole(tmp_path_factory: Any, text: str) -> None:
    path = tmp_path_factory.mktemp("t") / "a.txt"
    path.write_text("x" + text * 500, "utf-8")
    assert "".join(read_texts(path)) == "x" + text * 500


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", b"", "contains no text"),
        ("a.txt", b" \n\n", "contains no text"),
        ("a.txt", b"\xff\xfe\x00", "is not UTF-8 text"),
        ("a.txt", b"ab\0cd", "is not a text file"),
        ("a.jsonl", b'{"text": 3}\n', "contains no text"),
        ("a.jsonl", b'{"text": "a"}\n{', "line 2 is not JSON"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("gone.txt", None, "cannot be read"),
    ],
)
def test_what_is_no_text_is_refused(
    tmp_path: Path, name: str, content: bytes | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ExportError, match=reason):
        list(read_texts(tmp_path / name))
