"""Models with states: right after any rollback, and refused where states are not kept."""

import msgspec
import numpy as np
import onnxruntime.capi.onnxruntime_pybind11_state as native
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.backends import Load
from pilotfish.engines.backends.cuda import CudaBackend
from pilotfish.engines.backends.tensorrt import TensorRTBackend
from pilotfish.engines.backends.tensorrt_ep import TensorRTProviderBackend
from pilotfish.engines.engine_errors import ArtifactError, ProviderError, TreeError
from pilotfish.engines.manifest import CachedLayer, RecurrentStates
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.engines.states import WINDOW, StateCache
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from pilotfish.export.model_config import Layer
from pilotfish.export.split import split_artifact
from tests.support.examples import examples
from tests.support.prefill import prefill
from tests.support.runnable import runnable
from tests.support.tiny import STATEFUL, RandomSource, tiny_artifact, tiny_config

TEXT = np.random.default_rng(0).integers(0, 100, 200)
SLOTS = 3
CASES = [
    (family, dialect)
    for family in STATEFUL
    for dialect in runnable()
    if dialect != "tensorrt"  # the export refuses states in it
    if family not in {"qwen3_5", "mamba"} or dialect != "opset17"
]


def has_linear_attention():
    return any(schema.name == "LinearAttention" for schema in native.get_all_operator_schema())


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def decoder(request, tmp_path_factory):
    family, dialect = request.param
    if family != "lfm2" and dialect != "opset17" and not has_linear_attention():
        pytest.skip("this onnxruntime has no LinearAttention")
    path = tmp_path_factory.mktemp("states") / "a"
    return Decoder(tiny_artifact(path, architecture=family, dialect=dialect, seed=3), slots=SLOTS)


@pytest.fixture(autouse=True)
def _empty(request):
    if "decoder" in request.fixturenames:
        decoder = request.getfixturevalue("decoder")
        for slot in range(SLOTS):
            decoder.rollback(slot, 0)


def feed(decoder, tokens, slot=0):
    return decoder.forward([Pass(slot, np.asarray(tokens))])[0].logits.copy()


def whole(decoder, text):
    """Logits of all positions of a text, read at once by the last slot."""
    decoder.rollback(SLOTS - 1, 0)
    return feed(decoder, text, SLOTS - 1)


def same(got, wanted):
    np.testing.assert_allclose(got, wanted, atol=2e-4)


def test_windows_and_their_rejections_leave_no_trace(decoder):
    """As in speculation: pass, verdict, pass; drafted one by one or read at once."""
    wanted, random = whole(decoder, TEXT), np.random.default_rng(1)
    held = 0
    while held < len(TEXT) - 20:
        right, wrong = random.integers(1, 12), random.integers(0, 9)
        tokens = [*TEXT[held : held + right], *random.integers(0, 100, wrong)]
        if random.integers(2):
            got = np.concatenate([feed(decoder, [token]) for token in tokens])
        else:
            got = feed(decoder, tokens)
        same(got[:right], wanted[held : held + right])
        held += right
        decoder.rollback(0, held)


def test_after_a_rollback_to_anywhere_it_goes_on_right(decoder):
    random, text = np.random.default_rng(2), list(TEXT[:30])
    feed(decoder, text)
    for _ in range(25):
        number = int(random.integers(0, len(text) + 1))
        new = random.integers(0, 100, random.integers(1, 60)).tolist()
        text = [*text[:number], *new][:200]
        if len(text) == number:
            continue
        decoder.rollback(0, number)
        same(feed(decoder, text[number:]), whole(decoder, text)[number:])


def test_rollbacks_add_up_before_the_next_pass(decoder):
    feed(decoder, TEXT[:100])
    for length in (90, 40, 3):
        decoder.rollback(0, length)
    assert decoder.length(0) == 3
    same(feed(decoder, TEXT[3:9]), whole(decoder, TEXT[:9])[3:])


def test_a_kept_chain_is_its_beginning(decoder):
    feed(decoder, TEXT[:20])
    feed(decoder, TEXT[20:26])
    decoder.keep_path(0, [0, 1, 2])
    assert decoder.length(0) == 23
    same(feed(decoder, TEXT[23:30]), whole(decoder, TEXT[:30])[23:])
    with pytest.raises(ValueError, match="first tokens of a chain, not \\[1, 2\\]"):
        decoder.keep_path(0, [1, 2])
    assert decoder.length(0) == 30


def test_trees_are_refused_unless_they_are_chains(decoder):
    feed(decoder, TEXT[:10])
    with pytest.raises(TreeError, match="tiny has recurrent states, which follow one chain"):
        decoder.forward([Pass(0, TEXT[10:13], parents=np.array([-1, 0, 0]))])
    chain = Pass(0, TEXT[10:13], parents=np.array([-1, 0, 1]))
    got = decoder.forward([chain])[0].logits.copy()
    same(got, whole(decoder, TEXT[:13])[10:])


def test_slots_are_independent(decoder):
    texts = TEXT[:40], TEXT[60:120]
    for step in range(0, 40, 8):
        passes = [Pass(slot, text[step : step + 8]) for slot, text in enumerate(texts)]
        got = [output.logits.copy() for output in decoder.forward(passes)]
        decoder.forward([Pass(1, TEXT[:5])])
        decoder.rollback(1, step + 8)
    for slot, text in enumerate(texts):
        same(got[slot], whole(decoder, text[:40])[32:])
    decoder.rollback(0, 2)
    passes = [Pass(0, texts[0][2:9]), Pass(1, texts[1][40:50])]
    got = [output.logits.copy() for output in decoder.forward(passes)]
    same(got[0], whole(decoder, texts[0][:9])[2:])
    same(got[1], whole(decoder, texts[1][:50])[40:])


def test_what_fails_midway_is_not_taken_in(decoder, monkeypatch):
    feed(decoder, TEXT[:100])
    feed(decoder, TEXT[:30], 1)
    run, runs = type(decoder)._run, []

    def failing(*args):
        runs.append(args)
        if len(runs) == 2:
            raise RuntimeError("out of memory")
        run(*args)

    for lengths in ((100, 30), (20, 30)):  # the latter reads again
        for slot, length in enumerate(lengths):
            decoder.rollback(slot, length)
        runs.clear()
        monkeypatch.setattr(type(decoder), "_run", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            decoder.forward([Pass(0, TEXT[40:48]), Pass(1, TEXT[:5])])
        monkeypatch.undo()
        assert (decoder.length(0), decoder.length(1)) == lengths
    same(feed(decoder, TEXT[20:30]), whole(decoder, TEXT[:30])[20:])
    same(feed(decoder, TEXT[30:40], 1), whole(decoder, TEXT[:40])[30:])


@pytest.mark.parametrize("family", STATEFUL)
def test_a_window_taken_back_reads_nothing_again(family, tmp_path, monkeypatch):
    if family != "lfm2" and not has_linear_attention():
        pytest.skip("this onnxruntime has no LinearAttention")
    dialect = "contrib"
    decoder = Decoder(tiny_artifact(tmp_path / "a", architecture=family, dialect=dialect))
    run, tokens = type(decoder)._run, []

    def counting(self, passes_run, row):
        tokens.append(passes_run.total)
        run(self, passes_run, row)

    prefill(decoder, 0, TEXT[:40])
    monkeypatch.setattr(type(decoder), "_run", counting)
    wanted, random = 0, np.random.default_rng(4)
    for _ in range(30):
        window = int(random.integers(1, WINDOW + 1))
        for part in ([window + 1], [1] * (window + 1)):
            held = decoder.length(0)
            for size in part:
                feed(decoder, TEXT[:size])
                wanted += size
            decoder.rollback(0, held + int(random.integers(0, 2)))
    assert sum(tokens) == wanted
    decoder.rollback(0, 4)
    feed(decoder, TEXT[:1])
    assert sum(tokens) > wanted + 1  # further back, some are


@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
@pytest.mark.parametrize("family", STATEFUL)
def test_other_precisions_continue_as_they_read(family, precision, tmp_path):
    if "opset24" not in runnable():
        pytest.skip("this onnxruntime does not run opset24")
    artifact = tiny_artifact(
        tmp_path / "a", architecture=family, precision=precision, dialect="opset24"
    )
    decoder = Decoder(artifact, slots=SLOTS)
    feed(decoder, TEXT[:50])
    decoder.rollback(0, 43)
    got, wanted = feed(decoder, TEXT[43:60]), whole(decoder, TEXT[:60])[43:]
    assert np.abs(got - wanted).max() < 0.05 * np.abs(wanted).max()


def test_the_manifest_says_what_is_kept(tmp_path):
    manifest = tiny_artifact(tmp_path / "a", architecture="lfm2").manifest
    assert manifest.states == RecurrentStates(layers=[0, 2], taps=3, width=64, window=WINDOW)
    assert [each.layer for each in manifest.cached] == [1]
    # the first layer alone has a state, and nothing has keys and values
    source = RandomSource(tiny_config("lfm2"), 0)
    alone = export_model(source, tmp_path / "b", first_layers=1)
    assert alone.manifest.states.layers == [0]
    decoder = Decoder(alone)
    got = np.concatenate([feed(decoder, TEXT[i : i + 5]) for i in range(0, 20, 5)])
    decoder.rollback(0, 0)
    same(got, feed(decoder, TEXT[:20]))


@pytest.mark.parametrize("layers", [[3], [1, 1]])
def test_caches_that_do_not_fit_are_refused(layers, tmp_path):
    artifact = tiny_artifact(tmp_path / "a", architecture="lfm2")
    caches = [CachedLayer(layer=layer, kv_heads=1, head_dim=8) for layer in layers]
    spoilt = msgspec.structs.replace(artifact.manifest, caches=caches)
    (tmp_path / "a" / "manifest.json").write_bytes(spoilt.encode())
    with pytest.raises(ArtifactError, match="caches contradicts the dimensions"):
        Artifact.open(tmp_path / "a")


@pytest.mark.parametrize("changes", [{"layers": [0, 3]}, {"layers": [1, 0]}, {"heads": 2}])
def test_states_that_do_not_fit_are_refused(changes, tmp_path):
    artifact = tiny_artifact(tmp_path / "a", architecture="lfm2")
    states = msgspec.structs.replace(artifact.manifest.states, **changes)
    spoilt = msgspec.structs.replace(artifact.manifest, states=states)
    (tmp_path / "a" / "manifest.json").write_bytes(spoilt.encode())
    with pytest.raises(ArtifactError, match="states contradicts the dimensions"):
        Artifact.open(tmp_path / "a")


@pytest.mark.parametrize("backend", [CudaBackend, TensorRTBackend, TensorRTProviderBackend])
def test_gpus_are_refused_before_anything_loads(backend, tmp_path):
    artifact = tiny_artifact(tmp_path / "a", architecture="lfm2", dialect="opset17")
    with pytest.raises(ProviderError, match="choose --provider cpu"):
        backend(Load(artifact, 1, 64))


def test_stages_are_refused(tmp_path):
    artifact = tiny_artifact(tmp_path / "a", architecture="lfm2", dialect="opset17")
    with pytest.raises(ExportError, match="run the model whole"):
        split_artifact(artifact.path, tmp_path / "stages", stages=2)


def test_state_spaces_of_primitives_are_those_of_linear_attention(tmp_path):
    if "opset24" not in runnable() or not has_linear_attention():
        pytest.skip("this onnxruntime has no LinearAttention")
    results = []
    for dialect in ("opset17", "opset24"):
        decoder = Decoder(tiny_artifact(tmp_path / dialect, architecture="mamba2", dialect=dialect))
        feed(decoder, TEXT[:30])
        decoder.rollback(0, 27)
        results.append(feed(decoder, TEXT[27:150]))
    same(*results)


def test_layers_of_one_part_and_of_both_keep_what_they_have(tmp_path):
    manifest = tiny_artifact(tmp_path / "a", architecture="mamba2", dialect="opset17").manifest
    assert manifest.states.layers == [0, 3, 4]
    assert [each.layer for each in manifest.cached] == [2, 3]
    assert manifest.states.width == 4 * 8 + 2 * 2 * 16 + 4


def test_layers_of_one_part_need_a_state_beside_them(tmp_path):
    pattern = (Layer(kind="none"), Layer(has_mlp=False))
    with pytest.raises(ExportError, match="no layer with a state"):
        tiny_artifact(tmp_path / "a", architecture="mamba2", pattern=pattern, dialect="opset17")


@pytest.mark.parametrize("family", ["qwen3_5", "mamba"])
def test_opset17_has_no_linear_attention(family, tmp_path):
    with pytest.raises(ExportError, match="choose --dialect opset24 or contrib"):
        tiny_artifact(tmp_path / "a", architecture=family, dialect="opset17")


SUMMING = RecurrentStates(
    layers=[0, 2], taps=4, width=1, heads=1, key_dim=1, value_dim=1, window=WINDOW
)
MOVES = st.lists(st.tuples(st.integers(1, 150), st.floats(0, 1), st.booleans()), max_size=40)


@given(moves=MOVES)
@examples(60)
def test_the_state_is_that_of_the_slots_tokens(moves):
    """With the sum of all inputs as the state: numbers are exact, so nothing may be off."""
    cache, text, fresh = StateCache(SUMMING, 2), [], 0

    def run(tokens, end):
        step = cache.step(1, len(tokens))
        before = [0.0] * 3 + text[:end]
        assert step.earlier.shape[1] >= 3
        assert step.earlier[1, :, 0].tolist() == before[-step.earlier.shape[1] :]
        step.inputs[:] = np.array(tokens, np.float32)[None, :, None]
        step.settled[:] = step.past + step.earlier[0, 3:].sum()
        step.present[:] = step.settled + step.inputs[0].sum()
        assert step.settled[0, 0, 0, 0] == sum(text[:end])
        cache.take_in(1, step)

    for count, part, near in moves:
        count = min(count, WINDOW + 1) if near else count
        start = cache.resume(1, len(text))
        if start < len(text):
            run(text[start:], start)
        new = [float(fresh + i) for i in range(count)]
        fresh += count
        run(new, len(text))
        text += new
        keep = len(text) - min(count, WINDOW) if near else int(part * len(text))
        if near:
            assert cache.resume(1, keep) == keep
        text = text[:keep]
