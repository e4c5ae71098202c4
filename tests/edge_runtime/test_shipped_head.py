"""The shipped head: it belongs to the default models, and its card says how much it is worth."""

from __future__ import annotations

from types import SimpleNamespace

from pilotfish.cli.default_models import SKIPPED_LAYERS
from pilotfish.cli.head_verdict import verdict
from pilotfish.edge_runtime.head import DecisionHead
from pilotfish.edge_runtime.head_file import DEFAULT_HEAD, SHIPPED_HEADS
from pilotfish.engines.manifest import Manifest, Source
from pilotfish.export.source_names import MODEL_SHA256, REQUIREMENT
from pilotfish.export.sources.default import MEMBER


def origin(skipped_layers: tuple[int, ...] = ()) -> str:
    """The identity of the default model's weights, which the manifest of an export has."""
    source = Source(
        kind="default",
        location=REQUIREMENT,
        sha256={MEMBER: MODEL_SHA256},
        skipped_layers=[*skipped_layers],
    )
    value = Manifest.origin.fget(SimpleNamespace(source=source, dimensions=None))
    assert isinstance(value, str)
    return value


def test_its_pair_is_the_default_model_and_the_drafter_default_28() -> None:
    card = DecisionHead.load(DEFAULT_HEAD).card
    assert card.target.origin == origin()
    assert card.drafter.origin == origin(SKIPPED_LAYERS)
    assert (card.target.precision, card.drafter.precision) == ("fp32", "int4")


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in SHIPPED_HEADS.iterdir()) < 200_000


def test_a_verdict_without_a_comparison_says_that_the_worth_is_unknown() -> None:
    card = DecisionHead.load(DEFAULT_HEAD).card
    training = card.training.__class__(questions=1, examples=1, task="facts", seed=0)
    card = card.__class__(
        name="a", drafter=card.drafter, target=card.target, link=None, threshold=0.5,
        training=training,
    )  # fmt: skip
    assert "unknown" in verdict(card)


def test_the_card_tells_what_simpler_rules_reach_on_500_questions() -> None:
    card = DecisionHead.load(DEFAULT_HEAD).card
    record = card.training.options
    swept = record["swept"]
    assert isinstance(swept, int)
    assert swept >= 500
    beats = [rule for rule in ("coin", "gap") if float(record[f"{rule}_low"] or 0) > 0]
    assert ("beats neither" in verdict(card)) == (not beats)
