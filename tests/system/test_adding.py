"""The samples of docs/adding.md run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pilotfish.wire.protocols import PROTOCOL_REGISTRY, SpeculationProtocol, register
from tests.support.enumeration import p_value
from tests.support.rounds import ONE, Setting, exact_law, frequencies

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
SAMPLES = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
COMPLETE = [sample for sample in SAMPLES if sample.startswith('"""')]
COPIED = [sample for sample in SAMPLES if sample.startswith("# ")]
SEEDS = 600


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The registry as it was before the test."""
    before = dict(PROTOCOL_REGISTRY)
    yield
    PROTOCOL_REGISTRY.clear()
    PROTOCOL_REGISTRY.update(before)


def test_there_are_samples_of_both_kinds() -> None:
    assert COMPLETE
    assert COPIED


@pytest.mark.parametrize("sample", COMPLETE, ids=lambda sample: sample[3:].partition(":")[0])
def test_a_complete_protocol_follows_the_targets_law(sample: str) -> None:
    module: dict[str, Any] = {"__name__": "sample"}
    exec(compile(sample, "docs/adding.md", "exec"), module)
    protocol: Any = next(
        kind
        for kind in module.values()
        if getattr(kind, "__module__", "") == "sample"
        and isinstance(kind, type)
        and issubclass(kind, SpeculationProtocol)
    )
    PROTOCOL_REGISTRY.pop(protocol.name, None)  # a reader may have added the sample to the package
    register(protocol())
    options = protocol.Options(narrow_k=2)
    setting = Setting("dsd", (1, 1))
    wanted = exact_law(setting.models[0], ONE, 2) * SEEDS
    for exchange in (protocol(), protocol(options)):
        counts = frequencies(setting, SEEDS, exchange=exchange, length=2)
        assert p_value(counts.reshape(5, 5).ravel(), wanted) > 1e-4


@pytest.mark.parametrize("sample", COPIED, ids=lambda sample: sample.partition("\n")[0][2:])
def test_a_copied_sample_is_in_its_file(sample: str) -> None:
    name, *lines = [line for line in sample.splitlines() if line]
    rest = iter((ROOT / name[2:]).read_text(encoding="utf-8").splitlines())
    assert [line for line in lines if line not in rest] == []
