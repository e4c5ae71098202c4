"""Every architecture in every dialect against transformers: logits and hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.export.model import export_model
from pilotfish.export.sources import open_source
from tests.reference.test_checkpoints import MODELS
from tests.support.prefill import prefill
from tests.support.runnable import DISTINCT, needs
from tests.support.vocabularies import HERE, sentencepiece_metadata

pytestmark = pytest.mark.reference
TOLERANCE = 1e-3


def liven(model: Any) -> Any:
    """Larger weights than at the start of a training, so that a mistake shows in the logits."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def reference(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits [S, V] and last hidden states [S, hidden], after the final norm."""
    import torch

    with torch.no_grad():
        out = model(torch.from_numpy(tokens)[None], output_hidden_states=True)
    return out.logits[0].numpy(), out.hidden_states[-1][0].numpy()


@pytest.mark.parametrize("dialect", DISTINCT)
@pytest.mark.parametrize("name", MODELS)
def test_architecture_equals_transformers(name: str, dialect: str, tmp_path: Path) -> None:
    import torch
    import transformers

    from pilotfish.export.tokenizers.gguf import GgufVocabulary

    needs(dialect)
    family, settings = MODELS[name]
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**settings)
    model = liven(getattr(transformers, f"{family}ForCausalLM")(config))
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    text = GgufVocabulary(sentencepiece_metadata(), HERE).tokenizer_json
    (tmp_path / "model" / "tokenizer.json").write_text(text, "utf-8")
    export_model(str(tmp_path / "model"), tmp_path / "artifact", dialect=dialect)

    tokens = np.random.default_rng(1).integers(0, 500, 80)
    logits, hidden = reference(model, tokens)
    assert logits.std() > 0.5  # else the tolerance would mean nothing
    decoder = Decoder(tmp_path / "artifact")
    prefill(decoder, 0, tokens[:66], rows=0)  # beyond the first capacity of the cache
    out = decoder.forward([Pass(slot=0, tokens=tokens[66:])])
    width = out[0].logits.shape[1]
    np.testing.assert_allclose(out[0].logits, logits[66:, :width], atol=TOLERANCE)
    np.testing.assert_allclose(out[0].hidden, hidden[66:], atol=TOLERANCE)


def smollm2() -> Any:
    """The default model in transformers, fp32."""
    import torch
    import transformers

    source = open_source("default")
    config = source.config
    rope = config.layer(0).rope
    assert rope is not None
    theta = rope.frequencies[1] ** (-config.head_dim / 2)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden,
            intermediate_size=config.intermediate,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.context,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
            tie_word_embeddings=True,
        )
    ).eval()
    weights = {name: torch.from_numpy(source.tensor(name).copy()) for name in source.names()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    return model


@pytest.mark.parametrize("dialect", DISTINCT)
def test_smollm2_equals_transformers(dialect: str, tmp_path: Path) -> None:
    needs(dialect)
    export_model("default", tmp_path / "artifact", dialect=dialect)
    decoder = Decoder(tmp_path / "artifact")
    from pilotfish.engines.tokenizer import Tokenizer

    text = "The sky is blue because sunlight is scattered by the molecules of the air. 2 + 2 = 4."
    tokens = np.array(Tokenizer(tmp_path / "artifact").encode(text))
    logits, hidden = reference(smollm2(), tokens)
    out = decoder.forward([Pass(slot=0, tokens=tokens)])[0]
    np.testing.assert_allclose(out.logits, logits, atol=TOLERANCE)
    np.testing.assert_allclose(out.hidden, hidden, atol=TOLERANCE)
