"""The decoder's own tests through llama.cpp, and both engines beside each other on one file."""

import numpy as np
import pytest

from pilotfish.engines.engine_errors import ArtifactError, CapacityError, ProviderError
from pilotfish.engines.language_model import open_model
from pilotfish.engines.llamacpp import native
from pilotfish.engines.llamacpp.llama_decoder import MOST_LEAVES, LlamaDecoder
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.engines.tokenizer import Tokenizer
from pilotfish.export.model import export_model
from tests.engines.engine_tests import *  # noqa: F403  # collects these tests for the fixture `decoder` below
from tests.engines.test_decoder import (
    SLOTS,
    empty,
    same,
)
from tests.engines.test_decoder_trees import expand, grow
from tests.support.gguf_models import (
    FAMILIES,
    gguf_artifact,
    gguf_file,
    llama_cpp,
    sliding_window,
    write_foreign,
)
from tests.support.prefill import prefill

llama_cpp()
TEXT = np.random.default_rng(3).integers(0, 256, 600)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    return open_model(gguf_artifact(tmp_path_factory.mktemp("gguf")), slots=SLOTS, threads=1)


@pytest.fixture
def decoder(opened):
    empty(opened)
    return opened


@pytest.mark.parametrize("family", FAMILIES)
def test_both_engines_compute_the_same(tmp_path, family):
    file = gguf_file(tmp_path / "tiny.gguf", family)
    ours = Decoder(export_model(str(file), tmp_path / "ours"), slots=3)
    theirs = open_model(
        export_model(str(file), tmp_path / "theirs", dialect="llamacpp"), slots=3, threads=1
    )
    assert (theirs.vocab_size, theirs.hidden_size) == (ours.vocab_size, ours.hidden_size)
    assert (theirs.context, theirs.slots) == (ours.context, ours.slots)
    parents, levels = expand((2, 2, 2))
    nodes = TEXT[: len(parents)]
    for step in (
        lambda model: model.forward([Pass(0, TEXT[:40]), Pass(2, TEXT[40:55], 1)]),
        lambda model: [prefill(model, 1, TEXT[:170], rows=4)],  # rows of another run
        lambda model: model.rollback(0, 31),
        lambda model: model.forward([Pass(0, nodes[: levels[0]], parents=parents[: levels[0]])]),
        lambda model: model.forward(
            [Pass(0, nodes[levels[0] :], 9, parents), Pass(1, TEXT[5:9]), Pass(2, TEXT[:3], 0)]
        ),
        lambda model: model.keep_path(0, [1, 5]),
        lambda model: model.forward([Pass(2, TEXT[9:12]), Pass(0, TEXT[:2])]),
    ):
        got, wanted = step(theirs), step(ours)
        for item, other in zip(got or [], wanted or [], strict=True):
            assert item.logits.shape == other.logits.shape
            same(item.logits, other.logits)
            same(item.hidden, other.hidden)
        lengths = [theirs.length(slot) for slot in range(3)]
        assert lengths == [ours.length(slot) for slot in range(3)]


def test_cells_grow_with_what_is_held_and_keep_it(tmp_path):
    artifact = gguf_artifact(tmp_path, max_position_embeddings=1024)
    decoder = open_model(artifact, slots=3, threads=1)
    assert decoder._cells.capacity == native.FIRST_CELLS
    parents, _ = expand((2, 2))
    prefill(decoder, 0, TEXT[:200], rows=0)
    prefill(decoder, 1, TEXT[:90], rows=0)
    decoder.forward([Pass(1, TEXT[:6], 0, parents)])  # a tree that is moved with the rest
    prefill(decoder, 2, TEXT, rows=0)
    assert decoder._cells.capacity >= 2 * native.FIRST_CELLS
    fresh = open_model(artifact, slots=1, context=640, threads=1)
    decoder.keep_path(1, [1, 4])
    for slot, text in ((0, TEXT[:200]), (1, [*TEXT[:90], *TEXT[[1, 4]]]), (2, TEXT)):
        fresh.rollback(0, 0)
        wanted = prefill(fresh, 0, [*text, 7, 8], rows=2).logits.copy()
        same(decoder.forward([Pass(slot, np.array([7, 8]))])[0].logits, wanted)


def test_a_pass_wider_than_a_run_is_cut_chains_and_trees(decoder):
    parents = np.concatenate([np.arange(-1, 199), [199, 199, 200, 201]])
    tokens = TEXT[: len(parents)]
    tree = decoder.forward([Pass(0, tokens, parents=parents)])[0].logits.copy()
    same(decoder.forward([Pass(1, tokens[:200])])[0].logits, tree[:200])
    same(decoder.forward([Pass(1, tokens[[201, 203]])])[0].logits, tree[[201, 203]])
    decoder.keep_path(0, [*range(200), 201, 203])
    item, other = decoder.forward([Pass(slot, np.array([9])) for slot in (0, 1)])
    same(item.logits, other.logits)


def test_a_pass_that_fails_appends_nothing(decoder, monkeypatch):
    parents, levels = expand((2, 2, 2))
    prefill(decoder, 0, TEXT[:20], rows=0)
    first = grow(decoder, 0, TEXT[:2], parents[:2], [])
    run, left = native.Cells.run, [1]

    def failing(cells, *values):
        if not left:
            raise ProviderError("no more memory")
        left.pop()
        run(cells, *values)

    passes = [Pass(0, TEXT[2:14], 12, parents), Pass(1, TEXT[:150])]
    with monkeypatch.context() as patch:
        patch.setattr(native.Cells, "run", failing)  # its second run fails
        with pytest.raises(ProviderError, match="memory"):
            decoder.forward(passes)
    assert [decoder.length(slot) for slot in (0, 1)] == [22, 0]
    rest = [output.logits.copy() for output in decoder.forward(passes)]
    decoder.rollback(0, 20)
    decoder.rollback(1, 0)
    whole = grow(decoder, 0, TEXT[:14], parents, levels)
    same(np.concatenate([first, rest[0]]), whole)
    same(rest[1], decoder.forward([Pass(1, TEXT[:150])])[0].logits)


@pytest.mark.parametrize(
    "wrong",
    [
        Pass(slot=SLOTS, tokens=np.array([1])),
        Pass(slot=0, tokens=np.array([], np.int64)),
        Pass(slot=0, tokens=np.array([260])),  # one that pads the embedding
        Pass(slot=0, tokens=np.array([-1])),
        Pass(slot=0, tokens=np.array([1]), rows=2),
        Pass(slot=0, tokens=np.array([1]), parents=np.array([1])),
    ],
)
def test_senseless_passes_are_refused(decoder, wrong):
    with pytest.raises(ValueError, match=r"\w"):
        decoder.forward([wrong])
    assert decoder.length(0) == 0


def test_too_many_leaves_are_refused_and_the_slot_goes_on(decoder):
    prefill(decoder, 0, TEXT[:5], rows=0)
    most = min(MOST_LEAVES, native.MOST_SEQUENCES // SLOTS)
    with pytest.raises(CapacityError, match=f"{most + 1} leaves"):
        decoder.forward([Pass(0, TEXT[: most + 1], parents=np.full(most + 1, -1))])
    wide = decoder.forward([Pass(0, TEXT[:most], parents=np.full(most, -1))])[0].logits
    assert np.ptp(wide, axis=0).max() > 1
    with pytest.raises(ProviderError, match="too few for 257 sessions"):
        LlamaDecoder(decoder.artifact, slots=257)


def test_layers_that_forget_read_again_what_a_rollback_makes_the_past(tmp_path):
    """Cells that have left one slot's window go to another slot."""
    file = sliding_window(tmp_path / "gemma.gguf", window=16)
    artifact = export_model(str(file), tmp_path / "a", dialect="llamacpp")
    assert artifact.manifest.architecture == "gemma2"
    decoder, fresh = (open_model(artifact, slots=slots, context=256, threads=1) for slots in (2, 1))
    prefill(decoder, 1, TEXT[:8], rows=0)
    prefill(decoder, 0, TEXT[:200], rows=0)
    decoder.rollback(1, 4)
    prefill(decoder, 1, TEXT[4:104], rows=0)  # over what slot 0 no longer looks at
    assert decoder._cells.first(0) > 0  # else this shows nothing
    decoder.rollback(0, 50)
    for slot, length in ((0, 50), (1, 104)):
        fresh.rollback(0, 0)
        wanted = prefill(fresh, 0, TEXT[: length + 3], rows=3).logits.copy()
        got = decoder.forward([Pass(slot, TEXT[length : length + 3])])[0].logits
        same(got, wanted)


def test_models_that_cannot_be_rolled_back_are_refused_by_the_library_too(tmp_path):
    file = write_foreign(tmp_path / "mamba.gguf", *mamba())
    artifact = gguf_artifact(tmp_path / "other")
    artifact.gguf_path.unlink()
    artifact.gguf_path.write_bytes(file.read_bytes())
    # a file that is not the exported one is told first, for that is likelier
    with pytest.raises(ArtifactError, match="SHA-256"):
        open_model(artifact)
    with pytest.raises(ProviderError, match="has recurrent states, which llama"):
        native.NativeModel(file, gpu=False)


def mamba():
    hidden, inner, state, rank = 32, 64, 16, 2
    settings = {
        "block_count": 1,
        "context_length": 256,
        "embedding_length": hidden,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": rank,
    }
    tensors = {
        "token_embd.weight": (264, hidden),
        "output_norm.weight": (hidden,),
        "blk.0.attn_norm.weight": (hidden,),
        "blk.0.ssm_in.weight": (2 * inner, hidden),
        "blk.0.ssm_conv1d.weight": (inner, 4),
        "blk.0.ssm_conv1d.bias": (inner,),
        "blk.0.ssm_x.weight": (rank + 2 * state, inner),
        "blk.0.ssm_dt.weight": (inner, rank),
        "blk.0.ssm_dt.bias": (inner,),
        "blk.0.ssm_a": (inner, state),
        "blk.0.ssm_d": (inner,),
        "blk.0.ssm_out.weight": (hidden, inner),
    }
    return "mamba", settings, tensors


def test_a_file_that_llama_cpp_cannot_load_is_told_with_its_words(tmp_path, capfd):
    settings = {"block_count": 1, "context_length": 64, "embedding_length": 32}
    file = write_foreign(tmp_path / "odd.gguf", "marsupial", settings)
    with pytest.raises(ProviderError, match=r"odd\.gguf.*unknown model architecture.*marsupial"):
        native.NativeModel(file, gpu=False)
    assert capfd.readouterr() == ("", "")  # llama.cpp's own lines go to the log


def test_what_llama_cpp_says_goes_to_the_log(decoder, caplog, capfd):
    with caplog.at_level("DEBUG", "pilotfish.engines"):
        open_model(decoder.artifact)
    assert any("llama.cpp: " in line and "n_ctx" in line for line in caplog.messages)
    assert capfd.readouterr() == ("", "")


def test_a_gpu_that_is_not_there_is_refused(decoder):
    if native.load_library().llama_supports_gpu_offload():
        pytest.skip("this llama.cpp is built for a GPU")
    with pytest.raises(ProviderError, match="GGML_CUDA"):
        open_model(decoder.artifact, provider="cuda")


@pytest.fixture(scope="module")
def default_gguf(tmp_path_factory):
    return export_model("default", tmp_path_factory.mktemp("default") / "a", dialect="llamacpp")


def test_the_default_model_says_what_our_own_engine_says(default_gguf, default_artifacts):
    """Greedy, up to ties within the error of llama.cpp's activations, which have 8 bits."""
    theirs, ours = (
        open_model(artifact, context=256, threads=1)
        for artifact in (default_gguf, default_artifacts.target)
    )
    assert default_gguf.manifest.origin == ours.artifact.manifest.origin
    text = Tokenizer(default_gguf.tokenizer_path).encode("The capital of France is")
    got, wanted = (prefill(model, 0, text).logits[0].copy() for model in (theirs, ours))
    alike = 0
    for _ in range(24):
        apart, spread = got - got.mean() - wanted + wanted.mean(), wanted - wanted.mean()
        assert np.linalg.norm(apart) < 0.15 * np.linalg.norm(spread)
        second, first = np.sort(wanted)[-2:]
        alike += got.argmax() == wanted.argmax()
        assert got.argmax() == wanted.argmax() or first - second < 1.5
        token = np.array([wanted.argmax()])
        got, wanted = (
            model.forward([Pass(0, token)])[0].logits[0].copy() for model in (theirs, ours)
        )
    assert alike >= 20


def test_weights_in_blocks_compute_a_token_alone_as_among_others(default_gguf):
    """Bit for bit, so that no draft touches the text: on one thread, and below 64 tokens a run."""
    decoder = open_model(default_gguf, slots=2, context=512, threads=1)
    prefill(decoder, 1, TEXT[100:200], rows=0)
    rows = []
    for width in (1, 5, 16):
        decoder.rollback(0, 0)
        prefill(decoder, 0, TEXT[:40], rows=0)
        pieces = np.split(TEXT[40:60], range(width, 20, width))
        result = [decoder.forward([Pass(0, piece)])[0].logits.copy() for piece in pieces]
        rows.append(np.concatenate(result))
    decoder.rollback(0, 50)
    neighbour = [Pass(0, TEXT[50:60]), Pass(1, TEXT[:9])]
    rows.append(np.concatenate([rows[0][:10], decoder.forward(neighbour)[0].logits]))
    for other in rows[1:]:
        np.testing.assert_array_equal(other, rows[0])
