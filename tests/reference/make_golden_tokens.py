"""Write tests/data/golden_tokens.npz: llama.cpp's ids for the 1,000 strings of tokenizer_strings.

In: the default model's GGUF file (fetched if need be). Its vocabulary is tokenized under each
pre-tokenizer that this project knows, by way of copies of its metadata with another
`tokenizer.ggml.pre`. Needs llama-cpp-python:  python -m tests.reference.make_golden_tokens
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

from pilotfish.export.sources.default import fetch_default
from pilotfish.export.sources.gguf_file import GgufFile
from tests.support.tokenizer_strings import make_strings

GOLDEN = Path(__file__).parent.parent / "data" / "golden_tokens.npz"
PRETOKENIZERS = ("smollm", "gpt-2", "llama-bpe", "qwen2", "default")


def main() -> None:
    """Tokenize everything and write the file."""
    strings = make_strings()
    arrays = {"strings_sha256": np.array(strings_sha256(strings))}
    metadata = GgufFile(fetch_default(lambda label, done, total: None)).metadata
    with tempfile.TemporaryDirectory() as folder:
        for name in PRETOKENIZERS:
            path = Path(folder) / f"{name}.gguf"
            write_vocabulary(path, metadata, name)
            for special in (False, True) if name == "smollm" else (False,):
                ids = tokenize(path, strings, special=special)
                key = f"{name}-special" if special else name
                arrays[f"{key}/ids"] = np.concatenate([np.array(i, np.uint16) for i in ids])
                arrays[f"{key}/lengths"] = np.array([len(i) for i in ids], np.uint16)
    GOLDEN.parent.mkdir(exist_ok=True)
    np.savez_compressed(GOLDEN, **arrays)
    print(f"{GOLDEN}: {GOLDEN.stat().st_size} bytes")


def strings_sha256(strings: list[str]) -> str:
    """A hash that tells whether a golden file belongs to these strings."""
    return hashlib.sha256("\x00\x00".join(strings).encode("utf-8")).hexdigest()


def write_vocabulary(path: Path, metadata: dict[str, object], pretokenizer: str) -> None:
    """A GGUF file with the vocabulary of `metadata`, another pre-tokenizer, and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(pretokenizer)
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    if scores := metadata.get("tokenizer.ggml.scores"):
        writer.add_token_scores(scores)
    if merges := metadata.get("tokenizer.ggml.merges"):
        writer.add_token_merges(merges)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokenize(path: Path, strings: list[str], *, special: bool) -> list[list[int]]:
    """llama.cpp's ids, without BOS."""
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return [model.tokenize(s.encode("utf-8"), add_bos=False, special=special) for s in strings]


if __name__ == "__main__":
    main()
