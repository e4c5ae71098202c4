"""Times of masks over one vocabulary, and what that takes; for `constraints.py` only."""

import json
import os
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from _common import Rows
from _daemons import memory_mib
from structured import schemas

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_errors import GrammarError
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.speculation.logits_options import Grammar

LARGE, LONGEST = 151_936, 200  # tokens: of a vocabulary, of an answer


def _grammars() -> dict[str, Grammar]:
    nested: dict[str, Any] = {"type": "number"}
    for _ in range(4):
        nested = {"type": "array", "items": nested, "minItems": 1, "maxItems": 4}
    return {
        "small schema": Grammar.from_schema(schemas()[17]),
        "enum of 500": Grammar.from_schema(
            {"enum": [f"{i * 7919:x} word {i}" for i in range(500)]}
        ),
        "nested arrays": Grammar.from_schema(nested),
        "patterns": Grammar.from_schema({"type": "object", "properties": {
            f"p{i}": {"type": "string", "pattern": f"^[A-Z]{{{i + 1}}}-[0-9a-f]{{2,{i + 4}}}$"}
            for i in range(8)}}),
        "string of 500": Grammar.from_schema({"type": "string", "maxLength": 500}),
        "words": Grammar("regex", r"\p{L}+( \p{L}+)*"),
        "200 words": Grammar("regex", r"(\p{L}+[ ,.]){1,200}[0-9]{3}(a|b|cd)*"),
        "any JSON": Grammar.from_schema({"type": "object"}),
    }  # fmt: skip


def synthetic(vocabulary: Vocabulary, size: int) -> Vocabulary:
    """The same tokens and more of two of them each, which no text is encoded with."""
    parsed = json.loads(vocabulary.tokenizer_json)
    known, dice = parsed["model"]["vocab"], random.Random(0)
    pieces = [piece for piece in known if not piece.startswith("<|")]
    taken = {*known, *(each["content"] for each in parsed["added_tokens"])}
    at = vocabulary.vocab_size
    while at < size:
        piece = "".join(dice.choices(pieces, k=2))
        if piece not in taken:
            taken.add(piece)
            known[piece] = at
            at += 1
    text = json.dumps(parsed, ensure_ascii=False)
    return Vocabulary(
        model="synthetic", tokenizer_json=text, vocab_size=size, bos_id=vocabulary.bos_id,
        eos_ids=vocabulary.eos_ids, chat_template=None,
    )  # fmt: skip


def masks_of(place: Path, size: int, rows: int) -> Rows:
    """The rows of one vocabulary; size: make it so large, 0: as it is. For a fresh process."""
    vocabulary = Vocabulary.from_artifact(Artifact.open(place))
    name = str(vocabulary.model)
    if size:
        vocabulary, name = synthetic(vocabulary, size), "synthetic"
    assert vocabulary.tokenizer.vocab_size <= vocabulary.vocab_size
    before, begun_s = memory_mib(os.getpid())[0], time.monotonic()
    vocabulary.grammars.warm()
    same = {
        "vocabulary": name, "V": vocabulary.vocab_size,
        "read_s": time.monotonic() - begun_s, "read_mib": memory_mib(os.getpid())[0] - before,
    }  # fmt: skip
    return [
        {**same, "grammar": kind, **_masked(vocabulary, grammar, rows)}
        for kind, grammar in _grammars().items()
    ]


def _masked(vocabulary: Vocabulary, grammar: Grammar, rows: int) -> dict[str, float]:
    compiled_s = []
    for _ in range(6):
        begun_s = time.monotonic()
        vocabulary.grammars.constraint(grammar)
        compiled_s.append(time.monotonic() - begun_s)
    dice = np.random.default_rng(0)
    taken_s: list[float] = []
    constraint, answer = vocabulary.grammars.constraint(grammar), np.empty(0, np.uint32)
    answers, costly, shortest = 1, 0, 0
    while len(taken_s) < rows:
        logits = np.zeros((1, vocabulary.vocab_size), np.float32)
        begun_s, over = time.monotonic(), False
        try:
            constraint.forbid(logits, answer, [()])
        except GrammarError as error:
            over = True
            if error.costly:
                costly, shortest = costly + 1, min(shortest or len(answer), len(answer))
        taken_s.append(time.monotonic() - begun_s)
        token = dice.choice(np.flatnonzero(np.isfinite(logits[0])))
        answer = np.append(answer, np.uint32(token))
        if over or token in vocabulary.eos_ids or len(answer) >= LONGEST:
            constraint, answer = vocabulary.grammars.constraint(grammar), answer[:0]
            answers += 1
    p50, p99, worst = np.percentile(taken_s, (50, 99, 100)) * 1e3
    return {
        "first_ms": 1e3 * compiled_s[0], "again_ms": 1e3 * median(compiled_s[1:]),
        "p50_ms": float(p50), "p99_ms": float(p99), "worst_ms": float(worst),
        "mean_ms": 1e3 * float(np.mean(taken_s)),
        "answers": answers, "too_costly": costly, "earliest": shortest,
    }  # fmt: skip
