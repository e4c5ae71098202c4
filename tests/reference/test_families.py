"""Every family in every dialect and precision against transformers, and trees in every family.

Only arithmetic may differ, since the checkpoints' weights lie on grids that each precision holds:

- fp32: 10⁻³ on logits and hidden states; 3·10⁻⁵ was the most when this was written.
- fp16: ‖Δ‖ / ‖logits‖ at most twice that of transformers' own model in fp16, which differs from
  family to family, as attention is sharper here and softer there. 0.3 to 0.7 times was measured.
- int8, int4: on the CPU, runtimes round what enters a product to 8 bits by blocks. Transformers
  does so here, too; what differs then is which way a tie goes, at most 8·10⁻³ (to transformers
  without this rounding it is up to 5·10⁻²).
"""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest

from pilotfish.engines.engine_errors import TreeError
from pilotfish.engines.manifest import Precision
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.export.dialects import DIALECTS
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.huggingface_config import UNBOUNDED
from tests.reference.families import CHOICE_BIASES, CONTEXT, EVERY, FAMILIES, LATER, ORIGINAL
from tests.reference.parity import (
    TEXT,
    Answer,
    Floats,
    Library,
    Reference,
    answer,
    read_in_pieces,
)
from tests.support.prefill import prefill
from tests.support.runnable import needs

pytestmark = pytest.mark.reference
TOLERANCE = 1e-3
HALF = 2.0  # times the error of transformers in fp16
EIGHTHS = 0.02  # of the norm: ties in rounding to 8 bits
MIXED = 0.03  # what enters an expert's second product is not rounded in transformers
# What contrib had to express before any of this; of others it may say that it cannot.
CONTRIB = {
    "llama", "llama-3.2", "llama-biases", "llama-wide", "mistral-v0.3", "mistral-nemo", "qwen2.5",
    "qwen3-0.6b", "qwen3-8b", "opt-125m", "opt-350m", "galactica",
}  # fmt: skip
STATELESS = ("opset17", "tensorrt")  # dialects without recurrent states
BIASED = {"lfm2_moe", "glm4_moe", "ernie4_5_moe", "exaone_moe", "minimax_m2"}
RECURRENT = ("A_log", "dt_bias")  # keep what transformers gives them
ONE_SENTENCE = re.compile(r"[^\n]{20,400}")
NEXT_SENTENCE = re.compile(r"[.!?]\s+[A-Z]")


def decoder_of(
    library: Library, name: str, dialect: str, precision: Precision = "fp32", slots: int = 1
) -> Decoder:
    """Open the artifact; skip where a dialect says rightly that another one can."""
    needs(dialect)
    try:
        artifact = library.artifact(name, dialect, precision)
    except ExportError as refusal:
        stateless = dialect in STATELESS and "states" in FAMILIES[name].kinds
        if not stateless and (dialect != "contrib" or name in CONTRIB):
            raise
        refused = str(refusal)
    else:
        refused = ""
    if refused:
        check_refusal(refused)
        others = [other for other in DIALECTS if re.search(rf"\b{other}\b", refused)]
        possible = [other for other in others if other != dialect]
        assert possible, f"{refused}\ndoes not say which dialect can"
        for other in possible:
            fits = precision if precision in DIALECTS[other].precisions else "fp32"
            library.artifact(name, other, fits)
        pytest.skip(refused)
    manifest = artifact.manifest
    assert (manifest.dialect, manifest.precision) == (dialect, precision)
    context = {"longrope": ORIGINAL, "unbounded": UNBOUNDED}
    wanted = [context[kind] for kind in context if kind in FAMILIES[name].kinds]
    assert [manifest.dimensions.context] == (wanted or [CONTEXT])
    return Decoder(artifact, slots=slots, threads=1)


def is_biased(name: str) -> bool:
    """Whether a bias may choose the experts of a family."""
    return FAMILIES[name].model_type in BIASED or name.startswith("nemotron-3")


def check_refusal(text: str) -> None:
    assert ONE_SENTENCE.fullmatch(text), text
    assert not NEXT_SENTENCE.search(text), text


def close(values: Floats, wanted: Floats, what: str = "") -> None:
    np.testing.assert_allclose(values, wanted, atol=TOLERANCE, rtol=0, err_msg=what)


@pytest.mark.parametrize("name", EVERY)
def test_transformers_loads_each_and_a_mistake_would_show(name: str, library: Library) -> None:
    reference = library.reference(name)
    assert reference.loaded.clean
    logits = reference.exact.logits
    assert np.isfinite(logits).all()
    assert logits.std() > 0.5
    assert np.abs(logits[len(logits) // 2] - logits[-1]).max() > 0.5
    for weight_name, weight in reference.loaded.model.named_parameters():
        if weight.dim() == 1 and len(weight) > 1 and not weight_name.endswith(RECURRENT):
            assert weight.std() > 0.01, weight_name
    # Without its first tokens a text reads otherwise, unless no layer looks so far back.
    if "window" not in reference.family.kinds.split() or "full_attention" in str(reference.family):
        assert np.abs(reference.continued(reference.text[40:]).logits - logits[40:]).max() > 0.1


@pytest.mark.parametrize("name", [name for name in FAMILIES if is_biased(name)])
def test_a_bias_of_the_choice_of_experts_would_be_missed(name: str, library: Library) -> None:
    reference = library.reference(name)
    model = copy.deepcopy(reference.loaded.model)
    biases = [
        value for key, value in model.state_dict().items() if key.endswith(CHOICE_BIASES)
    ]  # views of the model's own
    for bias in biases:
        bias.zero_()
    changed = np.abs(answer(model, reference.text).logits - reference.exact.logits).max()
    assert (changed > 0.5) == bool(biases) == ("unbiased" not in name)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_family_equals_transformers(name: str, dialect: str, library: Library) -> None:
    reference = library.reference(name)
    in_pieces = read_in_pieces(decoder_of(library, name, dialect), reference.text)
    exact = reference.exact
    close(in_pieces.logits, exact.logits)
    close(in_pieces.hidden, exact.hidden)


@pytest.mark.parametrize(
    ("dialect", "precision"),
    [
        (name, precision)
        for name, dialect in DIALECTS.items()
        for precision in dialect.precisions
        if precision not in {"fp32", "stored"}  # these checkpoints are stored as floats
    ],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_rounded_family_equals_transformers(
    name: str, dialect: str, precision: Precision, library: Library
) -> None:
    reference = library.reference(name)
    if "experts" in reference.family.kinds:
        pytest.skip("a rounding error is another expert, and transformers rounds none of theirs")
    in_pieces = read_in_pieces(decoder_of(library, name, dialect, precision), reference.text)
    assert np.isfinite(in_pieces.logits).all()
    if precision == "fp16":
        assert in_pieces.error(reference.exact) <= HALF * reference.in_half.error(reference.exact)
    else:
        mixed = "experts" in reference.family.kinds
        assert in_pieces.error(reference.in_eighths) <= (MIXED if mixed else EIGHTHS)


# A branch longer than a window, two that leave it early and late, and a second root.
PARENTS = np.array([-1, 0, 0, 1, 2, 3, 5, 5, 6, 8, 9, -1, 10, 12, 13, 14, 11, 15, 17, 18, 19, 19,
                    20, 22, 16, 18])  # fmt: skip
NODES = np.random.default_rng(3).integers(0, 259, len(PARENTS))
LEAVES = (4, 7, 21, 23, 24, 25)
CUT = 12  # nodes of the first of two passes
TRUNK, BEHIND = TEXT[:20], TEXT[20:43]
ASIDE = 50  # tokens before the chain in another slot


def path_to(node: int) -> list[int]:
    """Nodes from the root down to `node`."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = int(PARENTS[node])
    return path


def by_paths(reference: Reference) -> Answer:
    """Answer every node, by way of the leaves' paths."""
    logits, hidden = {}, {}
    for leaf in LEAVES:
        path = path_to(leaf)
        out = reference.continued(TRUNK, NODES[path])
        logits |= dict(zip(path, out.logits[len(TRUNK) :], strict=True))
        hidden |= dict(zip(path, out.hidden[len(TRUNK) :], strict=True))
    count = range(len(NODES))
    return Answer(np.array([logits[i] for i in count]), np.array([hidden[i] for i in count]))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_trees_of_a_family_are_their_paths(name: str, dialect: str, library: Library) -> None:
    """A tree in one slot while another reads a chain; then the longest path is kept."""
    reference = library.reference(name)
    decoder = decoder_of(library, name, dialect, slots=3)
    if "states" in reference.family.kinds:
        with pytest.raises(TreeError):
            decoder.forward([Pass(2, NODES[:CUT], parents=PARENTS[:CUT])])
        return
    nodes = by_paths(reference)
    assert np.ptp(nodes.logits, axis=0).max() > 0.5
    prefill(decoder, 2, TRUNK, rows=0, chunk=7)
    prefill(decoder, 0, TEXT[:ASIDE], rows=0)

    first = [Pass(0, TEXT[ASIDE : ASIDE + 5]), Pass(2, NODES[:CUT], parents=PARENTS[:CUT])]
    chain, tree = decoder.forward(first)
    close(chain.logits, reference.exact.logits[ASIDE : ASIDE + 5], "a chain beside a tree")
    close(tree.logits, nodes.logits[:CUT], "a tree")
    second = [Pass(2, NODES[CUT:], parents=PARENTS), Pass(0, TEXT[ASIDE + 5 : ASIDE + 7])]
    tree, chain = decoder.forward(second)
    close(tree.logits, nodes.logits[CUT:], "a tree that has grown")
    close(tree.hidden, nodes.hidden[CUT:], "hidden states of a tree that has grown")
    close(
        chain.logits, reference.exact.logits[ASIDE + 5 : ASIDE + 7], "a chain beside a grown tree"
    )

    path = path_to(23)
    decoder.keep_path(2, path)
    selection = NODES[path]
    prefill(decoder, 1, [*TRUNK, *selection], rows=0)
    together = decoder.forward([Pass(slot, BEHIND) for slot in (1, 2)])
    wanted = reference.continued(TRUNK, selection, BEHIND).logits[-len(BEHIND) :]
    for info, out in zip(("behind a chain", "behind a kept path"), together, strict=True):
        close(out.logits, wanted, info)


@pytest.mark.parametrize("name", LATER)
def test_what_comes_later_is_refused_in_a_sentence(name: str, library: Library) -> None:
    with pytest.raises(ExportError) as refusal:
        library.artifact(name, "auto")
    check_refusal(str(refusal.value))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_precision_that_a_dialect_lacks_is_refused(
    dialect: str, precision: Precision, library: Library
) -> None:
    if precision in DIALECTS[dialect].precisions:
        return
    with pytest.raises(ExportError) as refusal:
        library.artifact("llama", dialect, precision)
    check_refusal(str(refusal.value))
    able = [name for name, other in DIALECTS.items() if precision in other.precisions]
    assert all(name in str(refusal.value) for name in able)
