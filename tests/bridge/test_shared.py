"""What two vocabularies share, by a definition too plain to be wrong."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tokenizers import AddedToken, Tokenizer, decoders, models

from pilotfish.base.errors import PairMismatchError
from pilotfish.bridge.shared import SharedTokens
from pilotfish.engines.token_bytes import BYTE_OF_CHARACTER, BYTE_TOKEN
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.export.tokenizers.gguf import GgufVocabulary
from pilotfish.speculation.distributions import Sampling, probabilities
from pilotfish.speculation.projection import Projection
from tests.support.tiny import tiny_artifact
from tests.support.vocabularies import sentencepiece_metadata, smollm2_metadata

CHARACTER = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("PILOTFISH_CACHE", str(folder))
    return folder / "bridges"


def vocabulary(
    pieces: list[str],
    *,
    special: tuple[str, ...] = (),
    added: tuple[str, ...] = (),
    ends: tuple[str, ...] = (),
    spells: str = "bytes",
    padded: int = 0,
) -> Vocabulary:
    """One with these tokens, in this order: text, added text, special ones; `spells` is the family.

    padded: ids at its end that stand for nothing.
    """
    tokenizer = Tokenizer(models.BPE({piece: id for id, piece in enumerate(pieces)}, []))
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in added])
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in special])
    tokenizer.decoder = decoders.ByteLevel()
    if spells == "pieces":
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence(steps)
    return Vocabulary(
        model=f"{len(pieces)} pieces",
        tokenizer_json=tokenizer.to_str(),
        vocab_size=tokenizer.get_vocab_size() + padded,
        bos_id=None,
        eos_ids=[tokenizer.token_to_id(end) for end in ends],
        chat_template=None,
    )


def spelled(data: bytes) -> str:
    """In GPT-2's characters."""
    return "".join(CHARACTER[byte] for byte in data)


def pairs(shared: SharedTokens) -> dict[int, int]:
    """Target id → drafter's id."""
    return dict(zip(shared.target.tolist(), shared.draft_ids.tolist(), strict=True))


def by_piece(drafter: Vocabulary, target: Vocabulary) -> dict[str, str]:
    """The target's spelling → the drafter's."""
    result = pairs(SharedTokens.find(drafter, target))
    return {
        target.tokenizer.piece(id): drafter.tokenizer.piece(ours) for id, ours in result.items()
    }


# What is shared


def naive(drafter: Vocabulary, target: Vocabulary) -> dict[int, int]:
    """Target id → drafter's id, over all pairs of tokens (but for the end of a turn)."""

    def rank(of: Vocabulary, id: int) -> tuple[bool, bool, int]:
        text = of.tokenizer.token_bytes(id).decode("utf-8", "replace")
        encoded = of.tokenizer.encode(text) == [id]
        return not encoded, bool(BYTE_TOKEN.fullmatch(of.tokenizer.piece(id))), id

    def canonical(of: Vocabulary, id: int) -> bool:
        same = [
            other
            for other in range(of.vocab_size)
            if not of.tokenizer.is_special(other)
            and of.tokenizer.token_bytes(other) == of.tokenizer.token_bytes(id)
        ]
        return min(same, key=lambda other: rank(of, other)) == id

    results = {}
    for number in range(drafter.vocab_size):
        for id in range(target.vocab_size):
            special = drafter.tokenizer.is_special(number), target.tokenizer.is_special(id)
            if special == (True, True):
                same = drafter.tokenizer.piece(number) == target.tokenizer.piece(id)
            else:
                data = drafter.tokenizer.token_bytes(number)
                same = (
                    special == (False, False)
                    and data != b""
                    and data == target.tokenizer.token_bytes(id)
                    and canonical(drafter, number)
                    and canonical(target, id)
                )
            if same:
                results[id] = number
    return results


TEXTS = st.sampled_from(
    [b"A", b" ", b" a", b"\n", b"<", b"\xc3\xa9", b"\xc3", b"\xe6\x97\xa5", b"<s>"]
)
CONTROLS = st.lists(st.sampled_from(["<s>", "</s>", "A", "<x>"]), unique=True, max_size=3)


@st.composite
def vocabularies(draw: st.DrawFn) -> Vocabulary:
    """Of both families, with several tokens for the same bytes, and padding."""
    data = draw(st.lists(TEXTS, unique=True, max_size=7))
    special = draw(CONTROLS)
    added: list[str] = []
    if draw(st.booleans()):
        pieces = [spelled(each) for each in data]
        # characters that are not of GPT-2's alphabet stand for themselves
        added = draw(st.lists(st.sampled_from([" ", " a", "日", "\n"]), unique=True))
        spells = "bytes"
    else:
        texts = [each.decode("utf-8", "ignore").replace(" ", "▁") for each in data]
        raw = draw(st.lists(st.sampled_from([0x41, 0x20, 0x0A, 0xC3, 0x3C]), unique=True))
        pieces = draw(st.permutations([*texts, *(f"<0x{byte:02X}>" for byte in raw)]))
        spells = "pieces"
    pieces = [piece for piece in dict.fromkeys(pieces) if piece and piece not in special]
    return vocabulary(
        pieces or ["z"],
        special=tuple(special),
        added=tuple(added),
        spells=spells,
        padded=draw(st.integers(0, 3)),
    )


@settings(max_examples=150)
@given(vocabularies(), vocabularies())
def test_shared_is_what_the_definition_says(drafter: Vocabulary, target: Vocabulary) -> None:
    expected = naive(drafter, target)
    if all(target.tokenizer.is_special(id) for id in expected):
        with pytest.raises(PairMismatchError, match="cannot draft"):
            SharedTokens.find(drafter, target)
        return
    for _ in ("found", "kept"):
        shared = SharedTokens.find(drafter, target)
        assert pairs(shared) == expected
        assert shared.target.tolist() == sorted(expected)
        assert len(set(shared.draft_ids.tolist())) == len(shared)  # no mass counts twice
        assert {id for id, ours in enumerate(shared.to_draft_ids) if ours >= 0} == set(expected)
        assert all(shared.to_draft_ids[id] == ours for id, ours in expected.items())
        special = {id: ours for id, ours in expected.items() if target.tokenizer.is_special(id)}
        assert shared.specials == special
        assert (shared.draft_size, shared.target_size) == (drafter.vocab_size, target.vocab_size)


def test_the_spelling_does_not_matter() -> None:
    byte_level = vocabulary(
        [spelled(data) for data in (b" the", b"\n", b"A", b"\xc3\xa9", b"\xff")]
    )
    pieces = vocabulary(["<0x41>", "▁the", "<0x0A>", "A", "é", "<0xFF>"], spells="pieces")
    expected = {"▁the": "Ġthe", "<0x0A>": "Ċ", "A": "A", "é": "Ã©", "<0xFF>": "ÿ"}
    assert by_piece(byte_level, pieces) == expected
    assert by_piece(pieces, byte_level) == {ours: piece for piece, ours in expected.items()}


def test_of_several_tokens_for_a_text_the_one_that_it_is_encoded_as_is_shared() -> None:
    drafter = vocabulary(["Ġa", "Ġ", "a"], added=(" a",))
    assert drafter.tokenizer.encode(" a") == [3]
    assert by_piece(drafter, vocabulary(["Ġa"])) == {"Ġa": " a"}
    assert by_piece(vocabulary(["Ġa"]), drafter) == {" a": "Ġa"}


def test_special_tokens_are_not_text() -> None:
    drafter = vocabulary(["a", "<s>"], special=("<x>", "<y>"))
    target = vocabulary(["a", "<x>"], special=("<s>", "<y>"))
    assert by_piece(drafter, target) == {"a": "a", "<y>": "<y>"}
    # an end of generation is special even where its tokenizer takes it for text
    drafter = vocabulary(["a", "<x>"], ends=("<x>",))
    assert by_piece(drafter, target) == {"a": "a"}


@pytest.mark.parametrize(
    ("own_ends", "ends", "expected"),
    [
        (["<a>"], ["<b>"], {"<b>": "<a>", "<c>": "<c>"}),
        (["<a>", "<c>"], ["<b>", "<c>"], {"<b>": "<a>", "<c>": "<c>"}),  # both turn ends are alone
        (["<c>"], ["<c>"], {"<c>": "<c>"}),
        (["<c>"], ["<b>", "<c>"], {"<c>": "<c>"}),  # it ends the target too, by its own name
        (["<a>", "<c>"], ["<c>"], {"<c>": "<c>"}),
        (["<c>"], ["<b>"], {"<b>": "<c>"}),  # <c> is something else there
        (["<a>"], ["<c>"], {"<c>": "<a>"}),  # and here
        ([], ["<b>"], {"<c>": "<c>"}),
        (["<a>"], [], {"<c>": "<c>"}),
    ],
)
def test_ends_of_a_turn_are_the_same_by_role(
    own_ends: list[str], ends: list[str], expected: dict[str, str]
) -> None:
    drafter = vocabulary(["t"], special=("<a>", "<c>"), ends=tuple(own_ends))
    target = vocabulary(["t"], special=("<b>", "<c>"), ends=tuple(ends))
    assert by_piece(drafter, target) == {"t": "t"} | expected
    shared = SharedTokens.find(drafter, target)
    assert {target.tokenizer.piece(id) for id in shared.specials} == set(expected)


def test_nothing_in_common_is_said_with_what_to_do() -> None:
    drafter = vocabulary(["a"], special=("<e>",), ends=("<e>",))
    target = vocabulary(["b"], special=("<e>",), ends=("<e>",))
    with pytest.raises(PairMismatchError, match="share no token"):
        SharedTokens.find(drafter, target)


def of_gguf(metadata: dict[str, object]) -> Vocabulary:
    made = GgufVocabulary(metadata, Path("vocabulary.gguf"))
    return Vocabulary(
        model="gguf",
        tokenizer_json=made.tokenizer_json,
        vocab_size=made.size,
        bos_id=made.bos_id,
        eos_ids=made.eos_ids,
        chat_template=None,
    )


@pytest.fixture(scope="module")
def smollm2() -> Vocabulary:
    """Before the cache is put elsewhere, for the model's file is in it."""
    return of_gguf(smollm2_metadata())


def test_byte_level_and_sentencepiece(smollm2: Vocabulary) -> None:
    drafter = smollm2
    target = of_gguf(sentencepiece_metadata())
    shared = SharedTokens.find(drafter, target)
    ours, other = drafter.tokenizer, target.tokenizer
    assert shared.specials == {2: 2}  # "</s>" and "<|im_end|>"
    for id, its in pairs(shared).items():
        if id not in shared.specials:
            assert other.token_bytes(id) == ours.token_bytes(its)
            assert not ours.is_special(its)
    # SmolLM2 has all printable bytes, and so every single character of ASCII that Llama 2 has
    singles = {other.token_bytes(id) for id in shared.target} & {bytes([b]) for b in range(33, 127)}
    assert len(singles) == 94
    assert shared.to_draft_ids[other._tokenizer.token_to_id("▁")] == ours.encode(" ")[0]
    inverse = {ours: id for id, ours in pairs(shared).items()}
    assert pairs(SharedTokens.find(target, drafter)) == inverse


def test_padding_is_no_token(tmp_path: Path) -> None:
    sizes = ((128, None), (128, 136), (128, 192))
    made = [
        Vocabulary.from_artifact(tiny_artifact(tmp_path / str(i), vocab=vocab, padded_vocab=padded))
        for i, (vocab, padded) in enumerate(sizes)
    ]
    for other in made[1:]:
        assert other.fingerprint == made[0].fingerprint
        shared = SharedTokens.find(made[0], other)
        assert pairs(shared) == {id: id for id in range(128)}
        assert Projection(shared.to_target_ids(), shared.target_size)(
            np.zeros((1, 128), np.float32)
        ).shape == (1, 128)


def test_ids_without_a_token_and_beyond_the_vocabulary_are_not_shared() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 3, "c": 6, "d": 7}, []))  # with holes
    tokenizer.decoder = decoders.ByteLevel()
    vocabularies = [
        Vocabulary(
            model="holes",
            tokenizer_json=tokenizer.to_str(),
            vocab_size=size,
            bos_id=None,
            eos_ids=[eos],
            chat_template=None,
        )
        for size, eos in ((7, 1), (9, 8))  # ends without a token
    ]
    expected = {0: 0, 3: 3, 6: 6, 8: 1}
    assert pairs(SharedTokens.find(*vocabularies)) == expected
    inverse = {ours: id for id, ours in expected.items()}
    assert pairs(SharedTokens.find(*reversed(vocabularies))) == inverse


# Projection


@given(
    arrays.arrays(np.float32, (3, 6), elements=st.floats(-60, 60, width=32)),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
)
def test_projected_is_renormalised_over_the_shared_tokens(
    logits: np.ndarray, rows: list[int]
) -> None:
    shared = SharedTokens(
        draft_ids=np.array([4, 0, 5]),
        target=np.array([1, 2, 7]),
        specials={},
        draft_size=6,
        target_size=9,
    )
    project = Projection(shared.to_target_ids(), shared.target_size)
    for count in rows:
        projected = project(logits[:count])
        assert projected.dtype == np.float32
        expected = np.full((count, 9), -np.inf, np.float32)
        expected[:, [1, 2, 7]] = logits[:count][:, [4, 0, 5]]
        assert np.array_equal(projected, expected)
        assert not np.shares_memory(projected, logits)
        before = probabilities(logits[:count].astype(np.float64), Sampling(temperature=1.0))
        mass = before[:, shared.draft_ids].sum(axis=1, keepdims=True)
        after = probabilities(projected.astype(np.float64), Sampling(temperature=1.0))
        np.testing.assert_allclose(
            after[:, shared.target] * mass, before[:, shared.draft_ids], rtol=1e-9
        )
        assert after.sum(axis=1) == pytest.approx(1.0)
