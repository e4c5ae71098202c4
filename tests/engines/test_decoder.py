"""The decoder: one sequence gives the same logits however it is fed, in every dialect."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from pilotfish.engines.engine_errors import ArtifactError, CapacityError, ProviderError
from pilotfish.engines.onnx_decoder import Decoder, Pass
from tests.support.examples import examples
from tests.support.prefill import prefill
from tests.support.runnable import hide_gpus, needs, runnable
from tests.support.tiny import BASE, FAMILIES, SHARING, RandomSource, tiny_artifact, tiny_config

CONTEXT = 256
SLOTS = 5
TOKENS = np.random.default_rng(0).integers(0, 100, 150)


@pytest.fixture(scope="module", params=runnable())
def decoder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("decoder") / request.param
    return Decoder(tiny_artifact(path, dialect=request.param), slots=SLOTS)


@pytest.fixture(autouse=True)
def _empty(request):
    if "decoder" in request.fixturenames:
        empty(request.getfixturevalue("decoder"))


def empty(decoder):
    for slot in range(decoder.slots):
        decoder.rollback(slot, 0)


def whole(decoder, tokens, slot=0):
    """Logits of all positions in one chain from an empty slot."""
    decoder.rollback(slot, 0)
    logits = decoder.forward([Pass(slot=slot, tokens=np.asarray(tokens))])[0].logits.copy()
    decoder.rollback(slot, 0)
    return logits


def same(got, wanted):
    np.testing.assert_allclose(got, wanted, atol=1e-4)


def numpy_llama(source, tokens):
    """Logits and last states of llama [S, V], [S, hidden], in plain numpy float64."""
    c = source.config
    w = {name: source.tensor(name).astype(np.float64) for name in source.names()}
    angles = c.layer(0).rope.angles(len(tokens))
    cos, sin = (np.tile(f(angles), 2)[:, None] for f in (np.cos, np.sin))

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_eps) * w[f"{name}.weight"]

    def rotate(x):
        half = c.head_dim // 2
        return x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(c.layers):
        layer = f"model.layers.{i}"
        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            (h @ w[f"{layer}.self_attn.{n}_proj.weight"].T).reshape(len(tokens), -1, c.head_dim)
            for n in "qkv"
        )
        group = c.heads // c.kv_heads
        q, k, v = rotate(q), rotate(k).repeat(group, 1), v.repeat(group, 1)
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(c.head_dim)
        scores = np.where(np.tri(len(tokens), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        attended = np.einsum("hij,jhd->ihd", weights, v).reshape(len(tokens), -1)
        x = x + attended @ w[f"{layer}.self_attn.o_proj.weight"].T
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (h @ w[f"{layer}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{layer}.mlp.down_proj.weight"].T
    x = norm(x, "model.norm")
    output = "model.embed_tokens" if c.tied else "lm_head"
    return x @ w[f"{output}.weight"].T, x


@pytest.mark.parametrize("family", ["llama", "llama3", "mistral"])
@pytest.mark.parametrize("dialect", runnable())
def test_llama_equals_plain_numpy(tmp_path, family, dialect):
    source = RandomSource(tiny_config(family), seed=3, sharpness=2.0)
    artifact = tiny_artifact(tmp_path / "a", architecture=family, seed=3, dialect=dialect)
    logits, hidden = numpy_llama(source, TOKENS)
    assert logits.std() > 0.5
    out = Decoder(artifact).forward([Pass(slot=0, tokens=TOKENS)])[0]
    np.testing.assert_allclose(out.logits, logits, atol=1e-3)
    np.testing.assert_allclose(out.hidden, hidden, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES | SHARING)
def test_dialects_agree(tmp_path, family):
    outs = []
    for dialect in runnable():
        artifact = tiny_artifact(tmp_path / dialect, architecture=family, dialect=dialect)
        outs.append(Decoder(artifact).forward([Pass(slot=0, tokens=TOKENS)])[0])
    for out in outs[1:]:
        same(out.logits, outs[0].logits)
        same(out.hidden, outs[0].hidden)


@given(cuts=st.lists(st.integers(1, 149), max_size=6, unique=True))
@examples(20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_sequence_in_pieces_is_the_sequence_at_once(decoder, cuts):
    wanted = whole(decoder, TOKENS)
    pieces = np.split(TOKENS, sorted(cuts))
    got = [decoder.forward([Pass(slot=1, tokens=piece)])[0].logits.copy() for piece in pieces]
    same(np.concatenate(got), wanted)
    assert decoder.length(1) == len(TOKENS)
    decoder.rollback(1, 0)


def test_slots_of_different_lengths_share_a_pass(decoder):
    lengths = [3, 90, 0, 17, 40]
    for slot, length in enumerate(lengths):
        if length:
            prefill(decoder, slot, TOKENS[slot : slot + length], rows=0)
    for subset in ([0, 1, 3, 4], [4, 0], [1], [3, 1, 0]):
        passes = [
            Pass(slot=slot, tokens=TOKENS[slot + lengths[slot] :][: 1 + slot], rows=1)
            for slot in subset
        ]
        outputs = [out.logits.copy() for out in decoder.forward(passes)]
        for item, logits in zip(passes, outputs, strict=True):
            decoder.rollback(item.slot, lengths[item.slot])
            end = item.slot + lengths[item.slot] + len(item.tokens)
            fresh = whole(decoder, TOKENS[item.slot : end], slot=2)
            same(logits[0], fresh[-1])
            same(decoder.forward([item])[0].logits, logits)  # alone as in company
            decoder.rollback(item.slot, lengths[item.slot])


@pytest.mark.parametrize("dialect", runnable())
def test_a_cache_that_grows_amid_a_pass_keeps_what_the_pass_appended(tmp_path, dialect):
    """Where passes run one after the other, a later one's tokens may need more cells."""
    artifact = tiny_artifact(tmp_path / "a", dialect=dialect)
    tokens = np.random.default_rng(7).integers(0, 100, 200)
    wanted = prefill(Decoder(artifact, threads=1), 0, tokens[:90], rows=90).logits
    several = Decoder(artifact, slots=4, threads=1)
    several.forward([Pass(0, tokens[:60]), Pass(3, tokens[:150])])
    logits = several.forward([Pass(0, tokens[60:90])])[0].logits
    np.testing.assert_allclose(logits, wanted[60:], atol=1e-4)


def test_passes_of_which_no_row_is_wanted_stand_beside_others(decoder):
    decoder = type(decoder)(decoder.artifact, slots=SLOTS)  # with buffers that are as yet small
    decoder.forward([Pass(slot=0, tokens=TOKENS[:3])])
    quiet = Pass(slot=4, tokens=TOKENS[:5], rows=0)
    wanted, none = decoder.forward([Pass(slot=0, tokens=TOKENS[3:6]), quiet])
    assert none.logits.shape[0] == none.hidden.shape[0] == 0
    logits = wanted.logits.copy()
    same(logits, whole(decoder, TOKENS[:6], slot=1)[3:])
    after = decoder.forward([Pass(slot=4, tokens=TOKENS[5:6])])[0].logits.copy()
    same(after, whole(decoder, TOKENS[:6], slot=1)[5:])


def test_rollback_forgets(decoder):
    prefill(decoder, 0, TOKENS[:30], rows=0)
    decoder.forward([Pass(slot=0, tokens=np.array([1, 2, 3]))])
    decoder.rollback(0, 25)
    got = decoder.forward([Pass(slot=0, tokens=np.array([9]))])[0].logits.copy()
    same(got[0], whole(decoder, [*TOKENS[:25], 9], slot=1)[-1])
    with pytest.raises(ValueError, match="tokens"):
        decoder.rollback(0, 27)


def test_a_full_context_is_refused_and_nothing_is_appended(decoder):
    prefill(decoder, 0, np.zeros(CONTEXT, np.int64), rows=1)
    prefill(decoder, 1, TOKENS[:7], rows=0)
    ahead = [Pass(slot=1, tokens=np.array([3])), Pass(slot=0, tokens=np.array([1]))]
    with pytest.raises(CapacityError, match="context"):
        decoder.forward(ahead)
    assert [decoder.length(slot) for slot in (0, 1)] == [CONTEXT, 7]
    with pytest.raises(CapacityError):
        prefill(decoder, 1, np.zeros(CONTEXT, np.int64))
    assert decoder.length(1) == 7


@pytest.mark.parametrize(
    "wrong",
    [
        Pass(slot=SLOTS, tokens=np.array([1])),
        Pass(slot=0, tokens=np.array([], np.int64)),
        Pass(slot=0, tokens=np.array([128])),
        Pass(slot=0, tokens=np.array([-1])),
        Pass(slot=0, tokens=np.array([1]), rows=2),
    ],
)
def test_senseless_passes_are_refused(decoder, wrong):
    with pytest.raises(ValueError, match=r"\w"):
        decoder.forward([wrong])
    assert decoder.length(0) == 0


def test_padding_ids_are_cut_off(tmp_path):
    artifact = tiny_artifact(tmp_path / "a", vocab=100, padded_vocab=128)
    decoder = Decoder(artifact)
    assert decoder.vocab_size == 100
    assert decoder.forward([Pass(slot=0, tokens=np.array([1]))])[0].logits.shape == (1, 100)


# Random weights are the worst case of 4 bits: an error of about 0.1 a weight, through two layers.
@pytest.mark.parametrize(("precision", "closeness"), [("int8", 0.999), ("int4", 0.9)])
@pytest.mark.parametrize("dialect", ["opset24", "contrib"])
def test_quantised_models_are_close_to_the_original(tmp_path, precision, closeness, dialect):
    needs(dialect)
    exact = Decoder(tiny_artifact(tmp_path / "fp32"))
    rough = Decoder(tiny_artifact(tmp_path / "q", precision=precision, dialect=dialect))
    a, b = (whole(decoder, TOKENS[:40]).ravel() for decoder in (exact, rough))
    assert np.corrcoef(a, b)[0, 1] > closeness
    size = {path: (path / "model.onnx.data").stat().st_size for path in tmp_path.iterdir()}
    assert size[tmp_path / "q"] < 0.6 * size[tmp_path / "fp32"]


def test_providers_and_artifacts_that_are_not_there(tmp_path, monkeypatch):
    hide_gpus(monkeypatch)
    artifact = tiny_artifact(tmp_path / "a")
    with pytest.raises(ProviderError, match="abacus"):
        Decoder(artifact, provider="abacus")
    with pytest.raises(ProviderError, match="cuda"):
        Decoder(artifact, provider="cuda")
    with pytest.raises(ArtifactError, match="export model"):
        Decoder(tmp_path / "nothing")
    (artifact.path / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(ArtifactError, match=r"model\.onnx is not the file that was exported"):
        Decoder(artifact)


def test_the_context_is_at_most_the_models(tmp_path):
    artifact = tiny_artifact(tmp_path / "a")
    assert Decoder(artifact, context=10_000).context == BASE.context
    assert Decoder(artifact, context=32).context == 32


@pytest.mark.parametrize("dialect", [name for name in runnable() if name != "contrib"])
def test_half_precision_is_close(tmp_path, dialect):
    exact, half = (
        whole(Decoder(tiny_artifact(tmp_path / p, precision=p, dialect=dialect)), TOKENS[:40])
        for p in ("fp32", "fp16")
    )
    assert exact.std() > 1.0
    np.testing.assert_allclose(half, exact, atol=0.05)


def test_the_inputs_of_an_earlier_shape_are_bound_again(tmp_path):
    decoder = Decoder(tiny_artifact(tmp_path / "a", dialect=runnable()[0]), provider="cpu")
    tokens, rows, known = np.arange(3, 33), [], set()
    for size in [1, 2, 1, 2, 5, 2, 1, 1, 5, 2]:
        start = decoder.length(0)
        (output,) = decoder.forward([Pass(0, tokens[start : start + size])])
        rows.append(output.logits.copy())
        binding = decoder._bindings[0, 1]
        shapes = {(name, array.shape) for name, array in binding._inputs.items()}
        known |= shapes
        assert {name for name, _ in shapes} >= {"input_ids", "position_ids"}
        assert set(binding._spares) == known  # nothing is made twice, and nothing is lost
    same(np.concatenate(rows), whole(decoder, tokens[: sum(map(len, rows))]))


def test_a_binding_keeps_few_bytes_for_other_shapes(tmp_path):
    decoder = Decoder(tiny_artifact(tmp_path / "a", dialect=runnable()[0]), provider="cpu")
    first = whole(decoder, [4, 5]).copy()
    binding = decoder._bindings[0, 1]
    for size in range(1, 2000, 7):
        binding.input("input_ids", (size,))[:] = 1
        held = sum(array.nbytes for array, _ in binding._spares.values())
        assert held == binding._spare_bytes <= 1 << 18
    known = set(binding._spares)
    assert binding.input("input_ids", (1 << 14,)).nbytes == 1 << 17  # too large to keep
    assert set(binding._spares) == known
    assert (whole(decoder, [4, 5]) == first).all()
