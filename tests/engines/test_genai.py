"""The decoder's own tests over graphs as ONNX Runtime GenAI's builder writes them."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from pilotfish.engines.engine_errors import ArtifactError, CapacityError, ProviderError, TreeError
from pilotfish.engines.genai import backend as genai_backend
from pilotfish.engines.language_model import open_model
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.export.model import export_model
from tests.engines.test_decoder import (  # noqa: F401  # collected here once more, with another fixture
    CONTEXT,
    SLOTS,
    TOKENS,
    _empty,
    same,
    test_a_full_context_is_refused_and_nothing_is_appended,
    test_a_sequence_in_pieces_is_the_sequence_at_once,
    test_passes_of_which_no_row_is_wanted_stand_beside_others,
    test_rollback_forgets,
    test_senseless_passes_are_refused,
    test_slots_of_different_lengths_share_a_pass,
    whole,
)
from tests.support.examples import examples
from tests.support.genai_folders import FAMILIES, change, genai_artifact, genai_folder
from tests.support.prefill import prefill

FULL = np.random.default_rng(8).integers(0, 100, CONTEXT)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def decoder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("genai") / "a"
    return open_model(genai_artifact(path, architecture=request.param), slots=SLOTS, threads=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_engines_compute_the_same(tmp_path, family):
    """Window, soft caps, biases, norms a head, a graph that reads positions; beyond the window."""
    artifact = genai_artifact(tmp_path / "a", architecture=family, hidden_states=True)
    theirs, ours = open_model(artifact), Decoder(tmp_path / "a-folder-ours")
    assert (theirs.vocab_size, theirs.hidden_size) == (ours.vocab_size, ours.hidden_size)
    for step in (
        lambda model: model.forward([Pass(0, FULL[:70])]),
        lambda model: model.rollback(0, 31),
        lambda model: model.forward([Pass(0, FULL[31:36], 2)]),
        lambda model: model.keep_path(0, [0, 1, 2]),
        lambda model: model.forward([Pass(0, FULL[34:35])]),
        lambda model: [prefill(model, 0, FULL[35:240], rows=150)],  # more rows than a run has
    ):
        got, wanted = step(theirs), step(ours)
        assert theirs.length(0) == ours.length(0)
        for item, other in zip(got or [], wanted or [], strict=True):
            same(item.logits, other.logits)
            same(item.hidden, other.hidden)


@given(data=st.data())
@examples(25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_drafts_kept_and_taken_back_leave_the_text_alone(decoder, data):
    """A random play over several slots; in the end each slot goes on as a fresh one does."""
    texts = [[] for _ in range(3)]
    for slot in range(3):
        decoder.rollback(slot, 0)
    number = st.integers(0, 99)
    for _ in range(data.draw(st.integers(1, 8))):
        slots = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
        drafts = {slot: data.draw(st.lists(number, min_size=1, max_size=30)) for slot in slots}
        decoder.forward([Pass(slot, np.array(draft), 1) for slot, draft in drafts.items()])
        for slot, draft in drafts.items():
            drawn_value = data.draw(st.integers(0, len(draft)))
            decoder.keep_path(slot, range(drawn_value))
            texts[slot] += draft[:drawn_value]
            if data.draw(st.booleans()):
                del texts[slot][data.draw(st.integers(0, len(texts[slot]))) :]
                decoder.rollback(slot, len(texts[slot]))
    for slot, text in enumerate(texts):
        assert decoder.length(slot) == len(text)
        got = decoder.forward([Pass(slot, np.array([5, 6, 7]))])[0].logits.copy()
        same(got, whole(decoder, [*text, 5, 6, 7], slot=4)[len(text) :])


def test_trees_are_refused_and_a_tree_that_is_a_chain_is_read(decoder):
    prefill(decoder, 0, TOKENS[:9], rows=0)
    with pytest.raises(
        TreeError, match=r"a-folder has a graph without a mask .* cannot read token trees"
    ):
        decoder.forward([Pass(0, TOKENS[:3], parents=np.array([-1, 0, 0]))])
    assert decoder.length(0) == 9
    chain = decoder.forward([Pass(0, TOKENS[9:12], parents=np.arange(-1, 2))])[0].logits.copy()
    same(chain, whole(decoder, TOKENS[:12], slot=1)[9:])
    with pytest.raises(ValueError, match="first tokens"):
        decoder.keep_path(0, [0, 2])


def test_wide_passes_are_cut_and_answers_stay_in_their_rows(decoder, monkeypatch):
    wanted = whole(decoder, TOKENS[:50])
    monkeypatch.setattr(decoder._backend, "widest", 7)
    requests = [Pass(1, TOKENS[:50], 33), Pass(0, TOKENS[:20], 0), Pass(3, TOKENS[:9], 1)]
    first, none, last = decoder.forward(requests)
    same(first.logits, wanted[17:])
    assert len(none.logits) == 0
    same(last.logits, wanted[8:9])


def test_a_graph_without_hidden_states_says_so(decoder):
    assert decoder.hidden_size == 0
    assert decoder.artifact.manifest.hidden_states is False
    assert decoder.forward([Pass(0, TOKENS[:4])])[0].hidden.shape == (4, 0)


def test_a_window_that_the_graph_does_not_keep_to_is_never_passed(tmp_path, caplog):
    """As the builder writes Mistral: the window stands in genai_config.json alone."""
    folder = genai_folder(tmp_path / "mistral", architecture="mistral")
    change(folder, {"sliding_window": {"window_size": 16, "layers": []}})
    artifact = export_model(str(folder), tmp_path / "a", dialect="genai")
    assert "limited to 16 positions" in caplog.text
    decoder = open_model(artifact, context=CONTEXT)
    assert decoder.context == artifact.manifest.dimensions.context == 16
    prefill(decoder, 0, TOKENS[:16])
    with pytest.raises(CapacityError, match="17 tokens do not fit"):
        decoder.forward([Pass(0, TOKENS[16:17])])


@pytest.mark.parametrize("provider", ["cuda", "tensorrt", "tensorrt-ep"])
def test_other_providers_are_refused(decoder, provider):
    with pytest.raises(ProviderError, match=f"only on the CPU, not on {provider}"):
        open_model(decoder.artifact, provider=provider)
    with pytest.raises(ProviderError, match="open_model"):
        Decoder(decoder.artifact)


def test_files_that_were_replaced_are_told(tmp_path):
    artifact = genai_artifact(tmp_path / "a")
    other = genai_artifact(tmp_path / "b", layers=3)
    for name, reply in (("model.onnx", "model.onnx"), ("genai_config.json", "genai_config.json")):
        content = (artifact.path / name).read_bytes()
        (artifact.path / name).unlink()
        (artifact.path / name).write_bytes((other.path / name).read_bytes())
        with pytest.raises(ArtifactError, match=rf"{reply} is not the file that was exported"):
            open_model(artifact)
        (artifact.path / name).write_bytes(content)
    assert open_model(artifact).provider == "cpu"


def test_answers_of_a_run_have_bounded_room(decoder):
    prefill(decoder, 0, FULL[: genai_backend.MOST_RUN_TOKENS + 40], rows=0, chunk=CONTEXT)
    assert len(decoder._backend.rows("logits", 1).base) <= genai_backend.MOST_RUN_TOKENS
