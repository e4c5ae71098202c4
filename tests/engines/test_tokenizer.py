"""Tokenizers: ids against llama.cpp's (a golden file), text ↔ ids, streams, fingerprints."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st

from pilotfish.engines.engine_errors import ArtifactError, TextTooLongError
from pilotfish.engines.tokenizer import TextStream, Tokenizer
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.gguf_file import GgufFile
from pilotfish.export.tokenizers.gguf import GgufVocabulary
from pilotfish.export.tokenizers.gpt2 import gpt2_tokenizer_json
from tests.support.examples import examples
from tests.support.small_checkpoints import SPECIAL, TOKENS, tokenizer_json, write_gguf
from tests.support.thinned import thinned
from tests.support.tokenizer_strings import make_strings
from tests.support.vocabularies import (
    HERE,
    merge_by_score,
    sentencepiece,
    sentencepiece_metadata,
    smollm2,
    smollm2_metadata,
)

GOLDEN = Path(__file__).parents[1] / "data" / "golden_tokens.npz"


@cache
def known_bytes(tokenizer: Tokenizer) -> set[int]:
    """Bytes that the vocabulary can write: SmolLM2's lacks some that only rare planes use."""
    return {byte for id in range(tokenizer.vocab_size) for byte in tokenizer.token_bytes(id)}


@pytest.mark.parametrize(
    "key",
    thinned(
        ["smollm", "smollm-special", "gpt-2", "llama-bpe", "qwen2", "default"],
        ["smollm-special", "llama-bpe", "qwen2"],
    ),
)
def test_ids_equal_llama_cpps(key: str) -> None:
    golden, strings = np.load(GOLDEN), make_strings()
    digest = hashlib.sha256("\x00\x00".join(strings).encode()).hexdigest()
    assert golden["strings_sha256"] == digest, "make the golden file again"
    tokenizer = smollm2(key.removesuffix("-special"))
    expected = np.split(golden[f"{key}/ids"], np.cumsum(golden[f"{key}/lengths"])[:-1])
    for text, ids in zip(strings, expected, strict=True):
        assert tokenizer.encode(text, special=key.endswith("special")) == ids.tolist(), text


def test_sentencepiece_joins_the_best_scoring_neighbours() -> None:
    metadata, tokenizer = sentencepiece_metadata(), sentencepiece()
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    scores = {
        token: score
        for token, score, kind in zip(
            metadata["tokenizer.ggml.tokens"],
            metadata["tokenizer.ggml.scores"],
            kinds,
            strict=True,
        )
        if kind == 1
    }
    for text in make_strings():
        if not text:
            continue
        expected: list[str] = []
        for piece in merge_by_score("▁" + text.replace(" ", "▁"), scores):
            raw = [f"<0x{byte:02X}>" for byte in piece.encode()]
            expected += [piece] if piece in scores else raw
        # A control token's name in a text is text.
        assert [tokenizer.piece(id) for id in tokenizer.encode(text)] == expected


@pytest.mark.parametrize("make", [smollm2, sentencepiece])
def test_text_survives_encode_and_decode(make) -> None:
    tokenizer = make()
    for text in make_strings():
        if make is sentencepiece:
            text = text.replace("▁", "_")  # that character is how SentencePiece writes a space
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_text_unless_asked_for() -> None:
    tokenizer = smollm2()
    assert tokenizer.encode("<|im_start|>", special=True) == [1]
    assert tokenizer.encode("<|im_start|>") == tokenizer.encode("<|") + tokenizer.encode("im") + (
        tokenizer.encode("_start") + tokenizer.encode("|>")
    )
    assert tokenizer.decode([1, 19556, 2]) == "Hello"
    assert tokenizer.decode([1, 19556, 2], special=True) == "<|im_start|>Hello<|im_end|>"
    assert tokenizer.is_special(1)
    assert not tokenizer.is_special(19556)


def test_user_defined_tokens_are_one_token_always() -> None:
    metadata = dict(smollm2_metadata())
    kinds = list(metadata["tokenizer.ggml.token_type"])
    kinds[3] = 4  # <repo_name>
    tokenizer = Tokenizer.from_json(
        GgufVocabulary(metadata | {"tokenizer.ggml.token_type": kinds}, HERE).tokenizer_json
    )
    assert tokenizer.encode("a<repo_name>b")[1] == 3
    assert tokenizer.decode([3]) == "<repo_name>"


def test_lone_surrogates_do_not_fail() -> None:
    assert smollm2().decode(smollm2().encode("a\ud800b")) == "a?b"


def test_padding_ids_have_no_text() -> None:
    assert smollm2().decode([60000, 19556]) == "Hello"
    assert smollm2().piece(60000) == ""


@examples(300, deadline=None)
@given(st.data(), st.sampled_from([smollm2, sentencepiece]), st.booleans())
def test_stream_equals_decode_whatever_the_split(data, make, special: bool) -> None:
    tokenizer = make()
    token = st.one_of(
        st.integers(0, tokenizer.vocab_size + 10),
        st.integers(0, 300),  # single bytes and control tokens, so that UTF-8 breaks often
        st.sampled_from(tokenizer.encode("🐟 wörld 漢字 👩‍👩‍👧")),
    )
    ids = data.draw(st.lists(token, max_size=40))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    stream, pieces = TextStream(tokenizer, special=special), []
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        pieces.append(stream.push(ids[start:end]))
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids, special=special)


@examples(100, deadline=None)
@given(st.text(max_size=60), st.sampled_from([smollm2, sentencepiece]))
def test_stream_of_a_valid_text_never_shows_half_a_character(text: str, make) -> None:
    text = text.replace("\ufffd", "").replace("▁", "").encode("utf-8", "ignore").decode()
    tokenizer = make()
    assume(make is sentencepiece or set(text.encode()) <= known_bytes(tokenizer))
    stream, display = TextStream(tokenizer), ""
    for id in tokenizer.encode(text):
        display += stream.push([id])
        assert text.startswith(display)
    assert display + stream.flush() == text


def test_stream_costs_the_same_at_the_end_as_at_the_start() -> None:
    tokenizer = smollm2()
    ids = tokenizer.encode("The quick brown fox 🦊 jumps. ") * 100

    def cost(stream: TextStream) -> float:
        began = time.perf_counter()
        for id in ids:
            stream.push([id])
        return time.perf_counter() - began

    long = TextStream(tokenizer)
    for _ in range(100):
        long.push(ids)
    # A stream that looked at its past would take a hundred times as long here.
    at_start = min(cost(TextStream(tokenizer)) for _ in range(5))
    assert min(cost(long) for _ in range(5)) < 10 * at_start


def test_equal_vocabularies_have_equal_fingerprints(tmp_path: Path) -> None:
    from_gguf = GgufVocabulary(GgufFile(write_gguf(tmp_path / "a.gguf")).metadata, HERE)
    tokenizer = Tokenizer.from_json(from_gguf.tokenizer_json)
    tree = json.loads(tokenizer_json())
    # In Hugging Face's files the model often lacks the special tokens, which stand apart.
    del tree["model"]["vocab"][SPECIAL]
    same = Tokenizer.from_json(json.dumps(tree))
    assert same.fingerprint == tokenizer.fingerprint
    assert same.vocab_size == tokenizer.vocab_size == len(TOKENS)
    tree["added_tokens"][0]["content"] = "<|stop|>"
    assert Tokenizer.from_json(json.dumps(tree)).fingerprint != tokenizer.fingerprint


def test_pair_of_files_of_gpt2(tmp_path: Path) -> None:
    tree = json.loads(GgufVocabulary(smollm2_metadata(), HERE).tokenizer_json)
    (tmp_path / "vocab.json").write_text(json.dumps(tree["model"]["vocab"]), "utf-8")
    merges = "\n".join(" ".join(pair) for pair in tree["model"]["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", "utf-8")
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "eos_token": "<|im_end|>",
        "bos_token": {"content": "<|im_start|>"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_json(gpt2_tokenizer_json(tmp_path))
    for text in make_strings():
        assert tokenizer.encode(text) == smollm2("gpt-2").encode(text)
    assert tokenizer.encode("<|im_end|>", special=True) == [2]
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    with pytest.raises(ExportError, match="BertTokenizer"):
        gpt2_tokenizer_json(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer.ggml.pre": "kimi-k2"}, "pre-tokenizer 'kimi-k2'"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer model 'bert'"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "repeated"),
        ({"tokenizer.ggml.tokens": 3}, "tokens is missing or damaged"),
        ({"tokenizer.ggml.merges": None}, "merges is missing or damaged"),
        ({"tokenizer.ggml.merges": ["x yy"]}, "merges do not fit"),
    ],
)
def test_unsupported_vocabularies_are_refused_by_name(change, named: str) -> None:
    with pytest.raises(ExportError, match=named):
        GgufVocabulary(smollm2_metadata() | change, HERE)


@pytest.mark.parametrize("content", ["", "{}", "[1]", "\x00", '{"version": "1.0"}'])
def test_damaged_tokenizer_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_missing_and_unsupported_tokenizer_files(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be read"):
        Tokenizer(tmp_path)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0}, unk_token="a"))
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ArtifactError, match="WordPiece"):
        Tokenizer(tmp_path)


def test_tokenizer_reads_file_and_directory(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(), "utf-8")
    for location in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path)):
        tokenizer = Tokenizer(location)
        assert tokenizer.vocab_size == len(TOKENS)
        assert tokenizer.encode(f" the{SPECIAL}", special=True) == [258, 259]


@pytest.mark.parametrize(("stated", "beginning"), [({}, [1]), ({"add_bos_token": False}, [])])
def test_a_text_begins_with_bos_where_the_file_wants_it(stated, beginning):
    """SentencePiece models want it unless the file says no; special tokens are never doubled."""
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "▁", "a", "▁a"],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -2.0, -3.0, -1.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in stated.items()}
    tokenizer = Tokenizer.from_json(GgufVocabulary(metadata, Path("x.gguf")).tokenizer_json)
    assert tokenizer.beginning == beginning
    assert tokenizer.encode("a") == [5]


@pytest.mark.parametrize("make", [smollm2, sentencepiece])
def test_ids_are_the_librarys_for_a_single_text(make) -> None:
    tokenizer = make()
    theirs = tokenizers.Tokenizer.from_str(tokenizer._json)
    for text in make_strings():
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, special=True) == expected


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    tokenizer, text = smollm2(), "the quick brown fox " * 100_000
    tokenizer.encode("a")
    turns, ended = [time.perf_counter()], threading.Event()

    def tick() -> None:
        while not ended.wait(0.001):
            turns.append(time.perf_counter())

    ticking = threading.Thread(target=tick)
    ticking.start()
    began = time.perf_counter()
    tokenizer.encode(text)
    took = time.perf_counter() - began
    ended.set()
    ticking.join()
    assert max(np.diff(turns)) < took / 2


@examples(25, deadline=None)
@given(st.text(min_size=1), st.integers(1, 30_000))
def test_what_fits_is_never_too_long(text: str, times: int) -> None:
    for tokenizer in (smollm2(), sentencepiece()):
        whole = text * min(times, 200_000 // len(text))  # of several parts
        ids = tokenizer.encode(whole)
        assert tokenizer.encode(whole, most=len(ids)) == ids


def test_too_long_a_text_costs_no_more_than_its_first_tokens() -> None:
    tokenizer, most = smollm2(), 10_000
    began = time.process_time()
    with pytest.raises(TextTooLongError, match="more than 10000 tokens"):
        tokenizer.encode("the quick brown fox " * 1_000_000, most=most)
    assert time.process_time() - began < 1
    spaces = " " * (32 * most)  # the vocabulary has tokens of many
    assert len(tokenizer.encode(spaces, most=most)) <= most
