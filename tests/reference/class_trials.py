"""Does a key of a configuration change what transformers computes? Asked of small models.

A trial writes keys into the config.json of a checkpoint and loads it: the outcome is "same" if all
weights still fit and the logits are equal, in one pass and with a cache; "invalid" if transformers
refuses the value's type; "fails" if it fails in another way; else "effect".
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.reference import test_experts
from tests.reference.families import EVERY, Family, liven
from tests.reference.parity import TEXT, Floats, load
from tests.reference.test_flags import ABSENT, MEANT, OTHER_TEXTS, changed

SHORT = TEXT[:120]  # beyond windows, and beyond the original context of rotary scalings
CACHED = 118  # tokens before those that are read one by one
EXACT = 1e-5
# Other algorithms for the same, whose results differ by rounding only.
ROUNDED = {"chunk_size": 2e-3, "mamba_chunk_size": 2e-3, "_attn_implementation": 1e-3}
# Values of every type, for keys whose type is not known.
ANY: tuple[Any, ...] = (True, 7, 0.5, "other", [1, 0], {"other": 1}, 2, False, None, 0)
# Values of keys that must have one type.
TYPED: dict[str, tuple[Any, ...]] = {
    "_attn_implementation": ("sdpa", "flash_attention_2", None),
    "attn_implementation": ("sdpa", "flash_attention_2", None),
    "cache_implementation": ("hybrid", "static", None),
    "max_new_tokens": (1, 7, None),
    "num_labels": (1, 3, None),
}
# Keys that code reads, and that cannot matter for the logits of a text. Only other logits count as
# their effect: that a value fails does not.
EXEMPT = """
    attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop residual_dropout
    embedding_dropout dropout activation_dropout layerdrop classifier_dropout summary_first_dropout
    output_router_logits router_aux_loss_coef router_jitter_noise z_loss_coefficient
    initializer_range init_std time_step_min time_step_max time_step_floor time_step_scale
    time_step_init_scheme altup_coef_clip
    use_mamba_kernels use_mambapy use_falcon_mambapy use_associative_scan residual_in_fp32
    mamba_ssm_cache_dtype chunk_size mamba_chunk_size reorder_and_upcast_attn num_logits_to_keep
    output_hidden_states output_attentions return_dict use_cache pad_token_id bos_token_id
    eos_token_id dtype torch_dtype id2label label2id problem_type architectures num_labels
    _attn_implementation image_token_id video_token_id vision_start_token_id vision_end_token_id
    vision_config
    rescale_prenorm_residual num_nextn_predict_layers mtp_layers_block_type
    mtp_hybrid_override_pattern summary_type summary_activation summary_use_proj
    summary_proj_to_labels _sliding_window_pattern
""".split()  # noqa: SIM905  # a list would take a line for each name
"""For training: dropout, losses, initial values, which a file's weights replace. For speed and
half precision: kernels, chunks. The form of outputs, and the tokens of texts. Heads that the models
do not have. Last: a name that classes set before they read it."""
MORE: dict[str, Family] = {
    "vaultgemma": Family("vaultgemma", EVERY["gemma2"].settings),
}  # fmt: skip


def settings_of(model_type: str) -> list[Family]:
    """The small models of a type: those of the families, and the mixtures."""
    mixtures = [Family(kind, dict(settings)) for kind, settings in test_experts.CLASSES.values()]
    known = [*EVERY.values(), *mixtures, *MORE.values()]
    plain = [family for family in known if family.model_type == model_type]
    inside = [
        family
        for family in known
        if family.settings.get("text_config", {}).get("model_type") == model_type
    ]
    return plain or inside


class Base:
    """A small checkpoint, and what transformers computes with it.

    older: whether its config.json has no `rope_parameters`, as transformers 4 wrote it.
    """

    def __init__(self, family: Family, path: Path, *, older: bool = False) -> None:
        self._path, self._auto = path, family.auto
        _write(family, path)
        self._whole = json.loads((path / "config.json").read_text())
        self._inside = "text_config" in self._whole
        if older:
            (self._whole["text_config"] if self._inside else self._whole).pop(
                "rope_parameters", None
            )
            (path / "config.json").write_text(json.dumps(self._whole))
        loaded = load(path, family.auto)
        whole = json.loads(loaded.model.config.to_json_string(use_diff=False))
        self.stated: dict[str, Any] = whole["text_config"] if self._inside else whole
        self._cached = True
        try:
            self._logits = self._answer(loaded.model)
        except Exception:  # a class whose cache is not given by its name
            self._cached = False
            self._logits = self._answer(loaded.model)
        assert self.outcome({}) == "same", path

    def outcome(self, changes: Mapping[str, Any]) -> str:
        """Try a configuration with these keys changed."""
        from huggingface_hub.errors import StrictDataclassFieldValidationError

        whole = copy.deepcopy(self._whole)
        values = whole["text_config"] if self._inside else whole
        values.update(changes)
        for key in [key for key, value in values.items() if value is ABSENT]:
            del values[key]
        (self._path / "config.json").write_text(json.dumps(whole))
        try:
            loaded = load(self._path, self._auto)
            if not loaded.clean:
                return "effect"
            logits = self._answer(loaded.model)
        except StrictDataclassFieldValidationError:
            return "invalid"
        except Exception:  # transformers raises whatever it meets
            return "fails"
        tolerance = max(ROUNDED.get(key, EXACT) for key in changes) if changes else EXACT
        return "same" if np.abs(logits - self._logits).max() <= tolerance else "effect"

    def _answer(self, model: Any) -> Floats:
        """Logits in one pass, and of the last tokens behind a cache."""
        import torch

        tokens = torch.from_numpy(SHORT)[None]
        with torch.no_grad():
            parts = [model(tokens, use_cache=False, return_dict=True).logits]
            out = model(tokens[:, :CACHED], use_cache=True, return_dict=True)
            name = "cache_params" if "cache_params" in out else "past_key_values"
            for i in range(CACHED, len(SHORT)) if self._cached else ():
                held = {name: out[name]}
                out = model(tokens[:, i : i + 1], use_cache=True, return_dict=True, **held)
                parts.append(out.logits)
        result: Floats = torch.cat([part.float() for part in parts], 1)[0].numpy()
        return result if np.isfinite(result).all() else np.full_like(result, np.inf)


def _write(family: Family, path: Path) -> None:
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(5)
    config = CONFIG_MAPPING[family.model_type](**copy.deepcopy(family.settings))
    model = getattr(transformers, family.auto).from_config(config, attn_implementation="eager")
    liven(model.float())
    model.save_pretrained(path)


def other_values(key: str, value: Any) -> list[Any]:
    """Other values of a declared key, by the type of the value that it has."""
    others = list(changed(key, value))
    if isinstance(value, bool):
        pass
    elif isinstance(value, int):
        others += [0, 1, 2, value + 1]
    elif isinstance(value, float):
        others += [0.0, 0.5, 1.0]
    elif isinstance(value, str):
        others += ["other", "float16"]
    elif value is None:
        others += ANY
    elif value == []:
        others += [[0], [1]]
    return _distinct(others, value)


def foreign_values(key: str) -> list[Any]:
    """Values for a key of unknown type."""
    if key in TYPED:
        return list(TYPED[key])
    return _distinct([*MEANT.get(key, ()), *OTHER_TEXTS.get(key, ()), *ANY], ABSENT)


def _distinct(values: Iterable[Any], known: Any) -> list[Any]:
    seen, distinct = [repr(known)], []
    for value in values:
        if repr(value) not in seen:
            seen.append(repr(value))
            distinct.append(value)
    return distinct


def matters(key: str, outcome: str) -> bool:
    """Whether the outcome of a key's trial is an effect."""
    return outcome == "effect" or (outcome == "fails" and key not in EXEMPT)


def effective(base: Base, values: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """Find the keys of which some value has an effect, by groups that are halved.

    values: key → values to try; the n-th values of all keys are tried together.
    """
    left = dict(values)
    for turn in range(max(map(len, left.values()), default=0)):
        changes = {key: tried[turn] for key, tried in left.items() if turn < len(tried)}
        for key in list(_halve(base, changes)):
            yield key
            del left[key]


def _halve(base: Base, changes: dict[str, Any]) -> Iterator[str]:
    if not changes or (outcome := base.outcome(changes)) == "same":
        return
    if len(changes) == 1:
        yield from changes if matters(next(iter(changes)), outcome) else ()
        return
    keys, middle = list(changes), len(changes) // 2
    for part in (keys[:middle], keys[middle:]):
        yield from _halve(base, {key: changes[key] for key in part})
