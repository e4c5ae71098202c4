"""The data on keys of configurations is what transformers' classes say and compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.reference.make_class_keys import (
    FILE,
    ClassTrials,
    aliases_of,
    classes_of,
    declared,
    foreign_keys,
    read,
    reserved_names,
    wrapper_classes,
    write,
)

pytestmark = pytest.mark.reference
CLASSES = read(FILE)


def config_class(kind: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[kind]


@pytest.mark.parametrize("kind", CLASSES)
def test_defaults_and_names_are_those_of_the_class(kind: str) -> None:
    entry, keys = CLASSES[kind], declared(config_class(kind))
    stated = {key: keys[key] for key in entry["defaults"] if key in keys}
    assert stated == {key: entry["defaults"][key] for key in stated}
    assert set(entry["defaults"]) - set(keys) <= {"rope_theta", "partial_rotary_factor"}
    assert entry["aliases"] == aliases_of(config_class(kind), keys)
    assert entry["classes"] == classes_of(kind)
    listed = {*entry["defaults"], *entry["others"], *entry["without"], *entry["aliases"]}
    assert set(keys) <= listed | {"model_type"}


def test_the_file_is_what_the_script_writes(tmp_path: Path) -> None:
    version = json.loads(FILE.read_text())["transformers"]
    write(tmp_path / FILE.name, version, reserved_names(), CLASSES)
    assert (tmp_path / FILE.name).read_text() == FILE.read_text()
    assert json.loads(FILE.read_text())["all"]["classes"] == wrapper_classes()


@pytest.mark.parametrize("kind", ["bitnet", "cohere2", "mamba2"])
def test_the_keys_of_a_class_have_the_effect_that_the_data_says(kind: str, tmp_path: Path) -> None:
    known = {*CLASSES[kind]["without"], *CLASSES[kind]["others"]}
    trials = ClassTrials(kind, tmp_path, known)
    assert trials.entry(foreign_keys(), set(reserved_names())) == CLASSES[kind]
