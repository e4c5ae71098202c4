"""Mutated configurations are read, or refused in one short sentence, in little memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources import open_source
from tests.config_fuzz import Fuzzer
from tests.support.bounded import bounded
from tests.support.small_checkpoints import LLAMA, tiny_weights, write_directory

MIB = 1 << 20


def test_mutated_configurations_end_in_short_errors(tmp_path: Path) -> None:
    fuzzer = Fuzzer(tmp_path, seed=7, only="llama")
    problems = [problem for _ in range(250) if (problem := fuzzer.run_one())]
    assert not problems, problems[0]
    assert len(fuzzer.outcomes) > 50
    assert fuzzer.outcomes["read"]


GEMMA = {**LLAMA, "model_type": "gemma4_text", "head_dim": 16}
HUGE = 10**9


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"head_dim": HUGE}, "1000000000 rotated channels"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers"),
        ({"vocab_size": 2**31 - 1}, "vocab_size"),
        ({"hidden_size": HUGE}, "hidden_size|rotated channels"),
        ({"model_type": "mixtral", "num_local_experts": HUGE}, "at most 4096 experts"),
        ({**GEMMA, "global_head_dim": HUGE}, "rotated channels"),
        ({**GEMMA, "per_layer_config": {"0": {"head_dim": HUGE}}}, "rotated channels|differs"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e308}}, "must be below 1e"),
        ({"model_type": "phi3", "partial_rotary_factor": 1e308}, "must be below|would rotate"),
        ({"model_type": ["llama"], "text_config": {"model_type": ["llama"]}}, "model_type .*llama"),
        ({"model_type": "moe\n"}, r"mixture.* not supported.*'moe\\n'"),
        ({"model_type": "falcon_h1", "mlp_multipliers": [10**400, 1]}, "must be 2 numbers|missing"),
        ({"eos_token_id": [1.5] * 5000}, r"eos_token_id \[1\.5.*…"),
        ({"hidden_size": 10**400}, "hidden_size is 1000"),
    ],
)
def test_huge_and_foreign_settings_are_refused_before_memory_is_allocated(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    path = write_directory(tmp_path / "m", LLAMA | change, weights=tiny_weights(LLAMA))
    with bounded(16 * MIB), pytest.raises(ExportError, match=named) as refused:
        open_source(str(path))
    assert len(str(refused.value)) < 400
    assert str(refused.value).isprintable()
