"""The drafter: what it has read follows what is committed, and windows end where they should."""

import numpy as np
import pytest

from pilotfish.drafting.model_drafter import ModelDrafter
from pilotfish.engines.artifact import Artifact
from pilotfish.speculation.acceptance import ENOUGH, predicted_acceptance
from pilotfish.speculation.distributions import Sampling
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, SamplingParams
from tests.support.pass_counter import PassCounter
from tests.support.tiny import tiny_artifact

VOCAB = 64
COMMITTED = np.array([3, 1, 4, 1, 5, 9], dtype=np.uint32)
LAW = SamplingParams(sampling=Sampling(temperature=1.5), seed=1)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    path = tmp_path_factory.mktemp("drafter") / "a"
    return Artifact.open(tiny_artifact(path, vocab=VOCAB, seed=5).path)


def fresh(artifact):
    return ModelDrafter.open(artifact, provider="cpu", threads=1, context=None)


@pytest.mark.parametrize("expansion", [(1, 1, 1), (2, 2, 2), (4, 2, 1), (1, 3, 2)])
def test_what_was_read_follows_the_accepted_path(artifact, expansion):
    """After every possible verdict the next logits are those of the committed text alone."""
    drafter, exchange = fresh(artifact), PROTOCOL_REGISTRY["tree"]
    nodes = len(drafter.draft(COMMITTED, expansion, exchange, LAW, ends=()).ids)
    assert nodes > 2
    for node in range(nodes + 1):
        draft = drafter.draft(COMMITTED, expansion, exchange, LAW, ends=())
        path = draft.path(node)
        text = np.concatenate([COMMITTED, draft.ids[[n - 1 for n in path]], [7]]).astype(np.uint32)
        counter = PassCounter(drafter._shared_model.engine.model)
        got = drafter.logits(text).copy()
        # the path was not forgotten; its last node may not have been read
        assert counter.take() == 1 + (len(path) == len(expansion))
        np.testing.assert_allclose(got, fresh(artifact).logits(text), atol=1e-4)


def test_a_tree_of_equal_candidates_is_a_chain(artifact):
    drafter = fresh(artifact)
    cold = SamplingParams(sampling=Sampling(), seed=1)
    draft = drafter.draft(COMMITTED, (3, 2, 2), PROTOCOL_REGISTRY["tree"], cold, ends=())
    assert draft.parents.tolist() == [-1, 0, 1]
    assert draft.depth == 3


def test_a_window_ends_with_an_end_token(artifact):
    drafter, exchange = fresh(artifact), PROTOCOL_REGISTRY["tslt"]
    whole = drafter.draft(COMMITTED, (1,) * 6, exchange, LAW, ends=()).ids.tolist()
    cut = drafter.draft(COMMITTED, (1,) * 6, exchange, LAW, ends={whole[2]}).ids.tolist()
    assert cut == whole[: whole.index(whole[2]) + 1]


def test_an_auto_window_is_the_beginning_of_the_whole_one(artifact):
    """It stops after the token at which the product of the predictions falls below the bound."""
    drafter, exchange = fresh(artifact), PROTOCOL_REGISTRY["tslt"]
    lengths = set()
    for seed in range(8):
        law = SamplingParams(sampling=LAW.sampling, seed=seed)
        whole = drafter.draft(COMMITTED, (1,) * 8, exchange, law, ends=())
        short = drafter.draft(COMMITTED, (1,) * 8, exchange, law, ends=(), auto=True)
        assert short.ids.tolist() == whole.ids[: len(short.ids)].tolist()
        hope, text, wanted = 1.0, COMMITTED, 0
        reader = fresh(artifact)
        for token in whole.ids:
            hope *= predicted_acceptance(reader.logits(text))
            text = np.append(text, token)
            wanted += 1
            if hope < ENOUGH:
                break
        assert len(short.ids) == wanted
        lengths.add(wanted)
    assert len(lengths) > 1
