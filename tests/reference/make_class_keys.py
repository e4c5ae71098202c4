"""Write export/architectures/class_keys.json: the keys of transformers' configuration classes.

    python -m tests.reference.make_class_keys [--only TYPE …] [--published FILE …] [--out FILE]

For each model_type of the tables (`export.architectures`), the data holds

- classes: names that `architectures` may have in its files;
- aliases: other name of a key → its name (the class's attribute_map);
- defaults: keys with an effect → the class's default (null also stands for infinite numbers);
- others: keys with an effect that the class does not declare → values without effect;
- without: keys without effect: those that the class declares, and those of published files.

A key is without effect if no other value changes the logits of small models of the class
(`class_trials`), and the class's code does not read it, or reads it only where it cannot matter
(EXEMPT). "all" has what is the same in every class; its "reserved" lists the names of transformers'
own methods and attributes. FILE is a published config.json, or a list of objects with one under
"config" (default: tests/data/published.json). A key of the old data is tried again, so the data
keeps what was published.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.util
import inspect
import json
import logging
import math
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pilotfish.export.architectures import ARCHITECTURES
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.wrapped import TEXT_TYPES, text_config
from tests.reference.class_trials import (
    EXEMPT,
    Base,
    effective,
    foreign_values,
    matters,
    other_values,
    settings_of,
)
from tests.reference.test_flags import MEANT

FILE = Path(__file__).parents[2] / "pilotfish/export/architectures/class_keys.json"
PUBLISHED = Path(__file__).parents[1] / "data" / "published.json"
MOST_BASES = 3
NEUTRAL = (None, False, True, 0, "", [], {})

# Keys that PretrainedConfig had in transformers 4, and that programs write into many files.
FORMER = """
    torch_dtype _name_or_path name_or_path _commit_hash _attn_implementation_autoset
    attn_implementation use_bfloat16 torchscript tf_legacy_loss is_decoder sep_token_id unk_token_id
    bos_token_id eos_token_id pad_token_id decoder_start_token_id tokenizer_class prefix num_labels
    finetuning_task task_specific_params max_length min_length max_new_tokens do_sample
    early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p min_p
    typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    assistant_confidence_threshold assistant_lookbehind num_assistant_tokens
    num_assistant_tokens_schedule target_lookbehind output_attentions output_hidden_states
    return_dict architectures transformers_version dtype id2label label2id problem_type use_cache
    initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop classifier_dropout
    is_llama_config transformers.js_config max_sequence_length unsloth_version unsloth_fixed
    _attn_implementation _flash_attn_2_enabled model_max_length
    cache_implementation pruned_heads tie_encoder_decoder add_cross_attention
    cross_attention_hidden_size chunk_size_feed_forward attention_bias mlp_bias pretraining_tp
    rope_interleaved use_mrope max_window_layers use_sliding_window
""".split()  # noqa: SIM905  # a list would take a line for each name


# Names that transformers' own code reads from every configuration, and that no file has.
INTERNAL = """
    compile_config configuration_files experts_implementation fusion_config generator decoder
    output_loading_info text_config transformers_weights _rope_type_labels kv_sharing_modes
    mtp_layer_types use_return_dict _attn_implementation_internal _experts_implementation_internal
""".split()  # noqa: SIM905  # a list would take a line for each name
# Names that shared code reads from configurations of many classes.
SHARED = """
    attention_chunk_size cache_implementation head_dim is_causal layer_types num_labels
    mlp_layer_types number_of_conv_states original_max_position_embeddings partial_rotary_factor
    quantization_config rope_parameters rope_theta sliding_window vision_feature_select_strategy
    intermediate_size num_key_value_heads max_position_embeddings hidden_size
""".split()  # noqa: SIM905  # a list would take a line for each name
# Keys that only a class's configuration, or a number that its model does not use, is computed from.
UNUSED = {
    "mamba2": frozenset({"time_step_rank"}),
    "nemotron_h": frozenset({"num_hidden_layers", "expand", "time_step_limit"}),
}
# Keys whose effect trials cannot show: the files of small models have an embedding and a head, and
# the context is that of the artifact.
ALWAYS = frozenset({"tie_word_embeddings", "max_position_embeddings"})


def read_names(*modules: Any) -> set[str]:
    """Names that code may read from a configuration: attributes of it, and texts that are names.

    A configuration is `…config`; in the modules of configuration classes also `self`.
    """
    names: set[str] = set()
    for module in modules:
        configures = ".configuration_" in module.__name__
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Attribute):
                holder = getattr(node.value, "id", getattr(node.value, "attr", ""))
                if holder.endswith("config") or (configures and holder == "self"):
                    names.add(node.attr)
            names |= set(_texts(node, every=configures))
    return names


def _texts(node: ast.AST, *, every: bool) -> Iterator[str]:
    """Texts that are names: every one, or those that a call is given."""
    texts = [node] if every else node.args if isinstance(node, ast.Call) else []
    for text in texts:
        if isinstance(text, ast.Constant) and str(text.value).isidentifier():
            yield str(text.value)


def modules_of(config_class: Any) -> list[Any]:
    """The modules with the code of a class: its configuration and its model."""
    from transformers import AutoModelForCausalLM

    configuration = inspect.getmodule(config_class)
    assert configuration is not None
    name = configuration.__name__.replace(".configuration_", ".modeling_")
    if importlib.util.find_spec(name) is None:  # it takes another class's model
        name = AutoModelForCausalLM._model_mapping[config_class].__module__
    return [configuration, importlib.import_module(name)]


def declared(config_class: Any) -> dict[str, Any]:
    """Keys that a configuration class declares → their defaults."""
    keys = {}
    for field in dataclasses.fields(config_class):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        keys[field.name] = None if default is dataclasses.MISSING else _plain(default)
    return keys


def _plain(value: Any) -> Any:
    """As JSON has it; null for infinite numbers."""
    if isinstance(value, tuple | list):
        items = [_plain(each) for each in value]
        return None if None in items else items
    return None if isinstance(value, float) and not math.isfinite(value) else value


def aliases_of(config_class: Any, keys: Iterable[str]) -> dict[str, str]:
    """Other names of keys → the names that the class declares."""
    named = set(keys)
    pairs = config_class.attribute_map.items()
    turned = {(b, a) if a in named and b not in named else (a, b) for a, b in pairs}
    return {alias: key for alias, key in turned if key in named and alias not in named}


def classes_of(model_type: str) -> list[str]:
    """Names of transformers' classes of language models for a type."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    module = modules_of(CONFIG_MAPPING[model_type])[1]
    models = {
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, transformers.PreTrainedModel)
    }
    return sorted(name for name in models if name.endswith(("LM", "LMHeadModel", "Generation")))


def wrapper_classes() -> list[str]:
    """Names of transformers' classes of models that contain a text model."""
    from transformers.models.auto import modeling_auto

    tables = [table for name, table in vars(modeling_auto).items() if name.endswith("_NAMES")]
    stated = [table[kind] for table in tables for kind in TEXT_TYPES if kind in table]
    names = {name for each in stated for name in ([each] if isinstance(each, str) else each)}
    return sorted(name for name in names if name.endswith(("LM", "Generation")))


def published_keys(files: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """(model_type, key) of each key at the top of a text model's configuration."""
    for file in files:
        data = json.loads(file.read_text("utf-8"))
        for entry in data if isinstance(data, list) else [data]:
            values = entry.get("config", entry)
            try:
                text = text_config(values, str(file)) or values
            except ExportError:  # not a text model that can be exported
                continue
            yield from ((text.get("model_type", ""), key) for key in text)


def foreign_keys() -> set[str]:
    """Every key that a configuration class of transformers declares, or shared code reads."""
    import transformers.cache_utils
    import transformers.masking_utils
    import transformers.modeling_rope_utils
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    keys = {*FORMER, *MEANT, *(key for each in ARCHITECTURES.values() for key in each.keys)}
    for kind in CONFIG_MAPPING:
        try:
            config_class = CONFIG_MAPPING[kind]
            fields = dataclasses.fields(config_class)
        except Exception:  # needs a library that is not installed
            continue
        keys |= {field.name for field in fields} | set(config_class.attribute_map)
    shared = (transformers.masking_utils, transformers.cache_utils,
              transformers.modeling_rope_utils, transformers.modeling_utils,
              transformers.configuration_utils)  # fmt: skip
    return keys | read_names(*shared)


def reserved_names() -> list[str]:
    """Names of attributes that every configuration has, and that are no keys."""
    from transformers import PretrainedConfig

    attributes = set(dir(PretrainedConfig)) - set(declared(PretrainedConfig)) - set(FORMER)
    return sorted({*INTERNAL, *(name for name in attributes if not name.startswith("__"))})


class ClassTrials:
    """The trials of one class."""

    def __init__(self, model_type: str, folder: Path, known: Iterable[str]) -> None:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        self.model_type, self.config_class = model_type, CONFIG_MAPPING[model_type]
        self.declared = declared(self.config_class)
        self.aliases = aliases_of(self.config_class, self.declared)
        self._known = (set(known) | set(FORMER)) - {"auto_map", "model_type"}
        self._reads = read_names(*modules_of(self.config_class))
        self._bases = [
            Base(family, folder / str(i))
            for i, family in enumerate(settings_of(model_type)[:MOST_BASES])
        ]
        first = settings_of(model_type)[0]
        # Without sections of their own, small heads would not fit Qwen2-VL's.
        if "rope_parameters" in self.declared and "mrope_section" not in str(first.settings):
            self._bases.append(Base(first, folder / "older", older=True))

    def entry(self, foreign: set[str], reserved: set[str]) -> dict[str, Any]:
        """Try all keys; return the class's data."""
        matter = self._declared_with_effect() | (ALWAYS & set(self.declared))
        strange = (foreign | self._reads | self._known | set(dir(self.config_class))) - reserved
        strange = {key for key in strange if not key.startswith("__")} - {"auto_map", "model_type"}
        others = self._foreign_with_effect(sorted(strange - set(self.declared) - set(self.aliases)))
        without = (set(self.declared) | self._known) - matter - set(others) - set(self.aliases)
        without -= reserved
        doubtful = sorted(
            (without & self._reads) - set(EXEMPT) - UNUSED.get(self.model_type, frozenset())
        )
        if doubtful:
            print(f"{self.model_type}: read, but without effect in trials: {' '.join(doubtful)}")
        matter |= set(doubtful) & set(self.declared)
        others |= {key: self._neutral(key) for key in doubtful if key not in self.declared}
        defaults = {key: self.declared[key] for key in matter} | self._rotary_defaults()
        return {
            "classes": classes_of(self.model_type),
            "aliases": dict(sorted(self.aliases.items())),
            "defaults": dict(sorted(defaults.items())),
            "others": {key: others[key] for key in sorted(set(others) - set(defaults))},
            "without": sorted(without - set(defaults) - set(others)),
        }

    def _declared_with_effect(self) -> set[str]:
        """Try each key by itself in the first model, and the rest by groups in the others."""
        first, *rest = self._bases
        values = {
            key: other_values(key, first.stated.get(key, default))
            for key, default in self.declared.items()
        }
        matter = set()
        for key, tried in values.items():
            outcomes = set()
            for value in tried:
                outcomes.add(first.outcome({key: value}))
                if any(matters(key, outcome) for outcome in outcomes):
                    matter.add(key)
                    break
            if "same" not in outcomes:
                matter.add(key)
        for base in rest:
            left = {
                key: other_values(key, base.stated.get(key, self.declared[key]))
                for key in self.declared.keys() - matter
            }
            matter |= set(effective(base, left))
        return matter

    def _foreign_with_effect(self, keys: list[str]) -> dict[str, list[Any]]:
        others: set[str] = set()
        for base in self._bases:
            # Names that code reads come first, so that the halves of the others stay whole.
            for likely in (True, False):
                left = {
                    key: foreign_values(key)
                    for key in keys
                    if key not in others and (key in self._reads or key in SHARED) == likely
                }
                others |= set(effective(base, left))
        return {key: self._neutral(key) for key in others}

    def _neutral(self, key: str) -> list[Any]:
        return [
            value
            for value in NEUTRAL
            if all(base.outcome({key: value}) == "same" for base in self._bases)
        ]

    def _rotary_defaults(self) -> dict[str, Any]:
        """Defaults of rotary keys, which the classes take from files without declaring them."""
        stated = getattr(self.config_class(), "rope_parameters", None) or {}
        other = {"rope_theta": 4e4, "partial_rotary_factor": 0.125}
        return {
            key: stated[key]
            for key, value in other.items()
            if key in stated and self.config_class(**{key: value}).rope_parameters[key] == value
        }


def write(file: Path, version: str, reserved: list[str], classes: Mapping[str, Any]) -> None:
    """Write the data: a line for each part of a class. What all classes list is written once."""
    entries = list(classes.values())
    without = set.intersection(*(set(entry["without"]) for entry in entries))
    others = {
        key: values
        for key, values in entries[0]["others"].items()
        if all(entry["others"].get(key) == values for entry in entries)
    }
    common = {
        "classes": wrapper_classes(),
        "others": others,
        "reserved": reserved,
        "without": sorted(without),
    }
    lines = ["{", f' "transformers": {json.dumps(version)},', f' "all": {_lines(common)},']
    lines.append(' "each": {')
    written = []
    for kind, entry in sorted(classes.items()):
        parts = entry | {
            "others": {key: entry["others"][key] for key in entry["others"] if key not in others},
            "without": sorted(set(entry["without"]) - without),
        }
        written.append(f' "{kind}": {_lines(parts)}')
    file.write_text("\n".join([*lines, ",\n".join(written), " }", "}"]) + "\n")


def _lines(parts: Mapping[str, Any]) -> str:
    return "{\n" + ",\n".join(f'  "{key}": {json.dumps(parts[key])}' for key in parts) + "\n }"


def read(file: Path) -> dict[str, Any]:
    """Read the classes, with what all have in each."""
    data = json.loads(file.read_text()) if file.exists() else {}
    common = data.get("all", {})
    return {
        kind: entry | {
            "others": dict(sorted({**common["others"], **entry["others"]}.items())),
            "without": sorted({*common["without"], *entry["without"]}),
        }
        for kind, entry in data.get("each", {}).items()
    }  # fmt: skip


def main() -> None:
    import torch
    import transformers

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="TYPE", default=[])
    parser.add_argument("--published", nargs="+", metavar="FILE", type=Path, default=[PUBLISHED])
    parser.add_argument("--out", type=Path, default=FILE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    classes = read(options.out)
    known: dict[str, set[str]] = {
        kind: {*entry["without"], *entry["others"]} for kind, entry in classes.items()
    }
    for kind, key in published_keys(options.published):
        known.setdefault(kind, set()).add(key)
    foreign, reserved = foreign_keys(), set(reserved_names())
    for kind in options.only or sorted(ARCHITECTURES):
        begin = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            trials = ClassTrials(kind, Path(folder), known.get(kind, ()))
            classes[kind] = trials.entry(foreign, reserved)
        print(f"{kind}: {time.process_time() - begin:.0f} s", flush=True)
        write(options.out, transformers.__version__, sorted(reserved), classes)


if __name__ == "__main__":
    main()
