"""Load a drafter as a torch model that can be trained; save it in files that `export` reads.

The forward pass comes from transformers. It loads a Hugging Face folder or a hub's model. From a
GGUF file it reads only the configuration; `export.sources` reads the weights. `running` checks that
the model and the artifact choose the same tokens, because transformers may interpret a model
differently from `export`.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.extras import install_command
from pilotfish.engines.engine_errors import EngineError
from pilotfish.export.atomic import replacing
from pilotfish.export.sources import DEFAULT, Progress, WeightSource, open_source
from pilotfish.export.sources.default import fetch_default

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_TIED = "lm_head.weight"


def expect_torch() -> None:
    """Raise `EngineError` unless torch and transformers are installed."""
    for name in ("torch", "transformers"):
        if find_spec(name) is None:
            raise EngineError(
                f"Training needs {name}, which is not installed: {install_command('distill')}."
            )


class TrainableDrafter:
    """A drafter that can be trained. model: the model of transformers, with f32 weights."""

    def __init__(self, source: str, progress: Progress) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.source: WeightSource = open_source(source, progress)
        file = fetch_default(progress) if source == DEFAULT else Path(source)
        try:
            if file.is_file():
                config = _shape(file)
                self.model: PreTrainedModel = AutoModelForCausalLM.from_config(
                    config, dtype=torch.float32
                )
                self._fill(progress)
            else:
                self.model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        except (ValueError, OSError, KeyError, NotImplementedError, RuntimeError) as error:
            problem = str(error).strip().splitlines() or [type(error).__name__]
            raise UnsupportedError(
                f"{source} cannot be trained, since transformers cannot load it: {problem[0]}"
            ) from error

    def _fill(self, progress: Progress) -> None:
        """Copy the weights of ``self.source`` into the model."""
        import torch

        names, state = sorted(self.source.names()), {}
        for number, name in enumerate(names, 1):
            state[name] = torch.from_numpy(np.array(self.source.tensor(name)))
            progress("weights", number, len(names))
        if self.source.config.tied:
            state[_TIED] = state["model.embed_tokens.weight"]
        loaded = self.model.load_state_dict(state, strict=False)
        mismatched = [*loaded.missing_keys, *loaded.unexpected_keys]
        if mismatched:
            raise UnsupportedError(
                f"{self.source.config.name} cannot be trained: the model class in transformers "
                f"has other weights ({mismatched[0]}). Give the model's Hugging Face folder."
            )
        self.model.tie_weights()

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder, atomically; replace an earlier run's folder."""
        with replacing(folder, _is_model, lambda path: open_source(str(path))) as partial:
            try:
                self.model.save_pretrained(partial)
            except Exception as error:
                if "SafetensorError" not in type(error).__name__:
                    raise
                raise OSError(f"{folder} cannot be written: {error}") from error
            vocabulary = self.source.vocabulary
            (partial / "tokenizer.json").write_text(vocabulary.tokenizer_json, encoding="utf-8")
            special = vocabulary.special_tokens or {}
            settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
            (partial / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
            ends = {"bos_token_id": vocabulary.bos_id, "eos_token_id": vocabulary.eos_ids}
            (partial / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
            if vocabulary.chat_template is not None:
                path = partial / "chat_template.jinja"
                path.write_text(vocabulary.chat_template, encoding="utf-8")
            further = partial / "additional_chat_templates"
            for name, template in vocabulary.chat_templates.items():
                further.mkdir(exist_ok=True)
                (further / f"{name}.jinja").write_text(template, encoding="utf-8")


def _shape(file: Path) -> PretrainedConfig:
    """Read the model configuration of a GGUF file with transformers."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)
    # Drop the values that a config.json would not have. They may contain paths of this machine.
    known_keys = type(config)().to_dict()
    shape_values = {name: value for name, value in config.to_dict().items() if name in known_keys}
    return type(config).from_dict(shape_values)


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file()
