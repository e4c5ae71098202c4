"""Published config.json files are accepted, or refused for the reason that is right for them.

tests/data/published.json has for each: `config`, and where it is from; `refused`, a part of the
sentence if it is rightly refused. Parity of the others is tested by
tests/reference/test_published.py.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.huggingface import describe_directory

DATA = Path(__file__).parent.parent / "data" / "published.json"
ENTRIES: list[dict[str, Any]] = json.loads(DATA.read_text("utf-8"))


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry["name"] for entry in ENTRIES])
def test_published_file_is_accepted_or_rightly_refused(
    entry: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(entry["config"]), "utf-8")
    if entry["refused"]:
        with pytest.raises(ExportError) as refusal:
            describe_directory(tmp_path, entry["name"], ())
        assert entry["refused"] in str(refusal.value)
    else:
        describe_directory(tmp_path, entry["name"], ())


BY_NAME = {entry["name"]: entry["config"] for entry in ENTRIES}
GRANITE = {
    "model_type": "granite",
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "logits_scaling": 8.0,
    "tie_word_embeddings": True,
}


def wrapped(model_type: str, text: dict[str, Any], folder: Path) -> Path:
    """Write the configuration of a wrapper with this text model."""
    values = {"model_type": model_type, "text_config": text, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(values), "utf-8")
    return folder


@pytest.mark.parametrize(
    ("model_type", "text", "key"),
    [
        ("llava_next", GRANITE, "logits_scaling"),
        ("aya_vision", BY_NAME["aya-expanse-8b"], "logit_scale"),
        ("cohere2_vision", BY_NAME["Aya Vision 8B"]["text_config"], "logit_scale"),
    ],
)
def test_a_wrapper_that_leaves_out_a_factor_of_the_logits_is_refused(
    model_type: str, text: dict[str, Any], key: str, tmp_path: Path
) -> None:
    folder = wrapped(model_type, text, tmp_path)
    with pytest.raises(ExportError, match="a factor of its logits, which transformers leaves out"):
        describe_directory(folder, "model", ())
    neutral = copy.deepcopy(text) | {key: 1.0}
    describe_directory(wrapped(model_type, neutral, tmp_path), "model", ())


def test_only_wrappers_of_gemma_limit_the_logits(tmp_path: Path) -> None:
    limited = BY_NAME["gemma-4-E4B-it"]["text_config"]
    describe_directory(wrapped("gemma4", limited, tmp_path), "model", ())
    text = BY_NAME["mlc:gemma2_2b"]
    with pytest.raises(ExportError, match="a limit of its logits"):
        describe_directory(wrapped("llava", text, tmp_path), "model", ())


@pytest.mark.parametrize(
    ("model_type", "text", "words"),
    [
        (
            "kimi_k25",
            {"model_type": "kimi_k2", "n_routed_experts": 8},
            r"supported \(kimi_k2\), see",
        ),
        ("mllama", {"model_type": "mllama_text_model"}, "'mllama_text_model' is not supported"),
        ("minimax_m3_vl", {"num_local_experts": 8}, r"not supported \(minimax_m3_vl\), see"),
        (
            "llama4",
            {"model_type": "llama4_text"},
            r"Llama 4 is supported only with moe_layers \[\]",
        ),
        ("maira2", GRANITE, "give its weights with text_config as their config.json"),
    ],
)
def test_an_unknown_wrapper_is_refused_by_what_its_text_model_is(
    model_type: str, text: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=f"{model_type}.*{words}"):
        describe_directory(wrapped(model_type, text, tmp_path), "model", ())
