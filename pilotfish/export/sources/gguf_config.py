"""Read the metadata of a GGUF file into a `ModelConfig`.

The file's keys are translated to the keys of the class's config.json (`export.sources.gguf_names`,
`Architecture.gguf`), and then read like a config.json. So a class's windows, ropes and scales are
described only once. llama.cpp is the reference for the meaning of keys and for defaults. A file
with an unread key in the architecture's namespace ("llama.…") is refused; the error names the key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from pilotfish.engines.manifest import MOST_LAYERS
from pilotfish.export.architectures import ARCHITECTURES, Architecture, Gguf
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model_config import ModelConfig
from pilotfish.export.sources.fields import Fields, format_value
from pilotfish.export.sources.gguf_file import GgufFile
from pilotfish.export.sources.gguf_kind import find_obstacle, read_architecture
from pilotfish.export.sources.gguf_layers import LAYER_KEYS, head_layers, read_layers
from pilotfish.export.sources.gguf_names import (
    DIVISORS,
    EPSILON,
    INERT,
    KEYS,
    NEEDED,
    NEUTRAL,
    OPTIONAL,
)
from pilotfish.export.sources.gguf_rope import (
    ROPE_KEYS,
    divide_frequencies,
    rope_table,
    rotary_fraction,
)
from pilotfish.export.sources.huggingface_config import Description
from pilotfish.export.sources.layer_pattern import SLIDING
from pilotfish.export.sources.layer_sizes import FULL
from pilotfish.export.sources.weight_check import FileSettings
from pilotfish.export.weights import EMBEDDING, HEAD, LAYER

# Suffixes that file names add to a model's name: "-Q4_K_M", ".f16", "-IQ2_XXS" …
PRECISION_SUFFIX = re.compile(
    r"[-._](?:i?q\d\w*|tq\d\w*|b?f16|f32|fp16|fp32|mxfp4)$", re.IGNORECASE
)


def find_class(file: GgufFile) -> tuple[str, Gguf]:
    """Return the class of a file, and the class's GGUF properties.

    Raises:
        ExportError: if the file is one part of several, or its class is not supported.
    """
    metadata, name = file.metadata, read_architecture(file)
    known = [
        (kind, variant.gguf) for kind, variant in ARCHITECTURES.items() if variant.gguf is not None
    ]
    candidates = [(kind, variant) for kind, variant in known if variant.name == name]
    if not candidates:
        runs = find_obstacle(name, metadata) is None
        raise ExportError(
            f"{file.path}: GGUF's architecture {format_value(name)} cannot be exported as a graph "
            "(`pilotfish export list --supported` lists those that can): give the original weights"
            + (", or use --dialect llamacpp" if runs else "")
        )
    special = [each for each in candidates if metadata.get(f"{name}.{each[1].when}")]
    unconditional = [each for each in candidates if each[1].when is None]
    return (special or unconditional or candidates)[0]


class GgufDescription:
    """The description of a model in its GGUF file, translated to the keys of its class.

    Args:
        file: the opened file.
        model_type: the model's class.
        weights: our names of the file's weights → their shapes.
        ignored: unknown keys to ignore.

    Attributes:
        config: the model's shape.
        settings: the file's names of settings, for errors about weights.

    Raises:
        ExportError: if something is missing, damaged, not supported or unknown; the message names
            the key or tensor.
    """

    def __init__(
        self,
        file: GgufFile,
        model_type: str,
        weights: Mapping[str, tuple[int, ...]],
        ignored: Collection[str] = (),
    ) -> None:
        self._file, self._model_type, self._weights = file, model_type, weights
        self._inner = {LAYER.split(name)[-1] for name in weights}
        self._architecture: Architecture = ARCHITECTURES[model_type]
        assert self._architecture.gguf is not None  # checked by `find_class`
        self._variant = self._architecture.gguf
        prefix = f"{self._variant.name}."
        stated = {
            k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)
        }
        self._fields = Fields(stated, str(file.path), prefix)
        # Llama's keys → values.
        self._values: dict[str, Any] = {}
        self._file_keys = {ours: f"{prefix}{key}" for ours, key in ROPE_KEYS.items()}
        self._file_keys |= {
            ours.replace("rope_scaling", "rope_parameters.full_attention"): key
            for ours, key in self._file_keys.items()
        }
        self._file_keys["model_type"] = "general.architecture"
        for key, names in LAYER_KEYS.items():
            present = (name for name in names if name in stated)
            self._file_keys[key] = f"{prefix}{next(present, names[0])}"

        self.config, self.settings = self._read(ignored)

    def _read(self, ignored: Collection[str]) -> tuple[ModelConfig, FileSettings]:
        """Translate the keys and read the result."""
        fields = self._fields
        self._translate()
        called = self._architecture.key_names
        values = {called.get(key) or key: value for key, value in self._values.items()}
        name = PRECISION_SUFFIX.sub("", self._file.path.stem)
        try:
            described = Description(values | {"model_type": self._model_type}, name, fields.where)
            if described.foreign_keys:
                raise fields.unknown(described.foreign_keys)
        except ExportError as error:
            raise ExportError(self._with_file_keys(str(error))) from None
        neutral = {**NEUTRAL, **self._variant.neutral}
        unknown = fields.unknown_keys(
            {fields.prefix + key for key in INERT - self._variant.neutral.keys()},
            {fields.prefix + key: accepted for key, accepted in neutral.items()},
            ignored,
        )
        if unknown:
            raise fields.unknown(unknown)
        config = divide_frequencies(
            self._drop_absent_biases(described.config),
            self._file,
            only_full=self._architecture.global_heads,
        )
        keys = {field: self._with_file_keys(key) for field, key in described.settings.keys.items()}
        keys["model_type"] = f"general.architecture = {self._variant.name!r}, read as"
        return config, FileSettings(keys, {})

    # --- keys ------------------------------------------------------------------------------------

    def _translate(self) -> None:
        """Set each key of the class to the file's value or llama.cpp's default."""
        fields = self._fields
        if EMBEDDING not in self._weights:
            raise ExportError(
                f"{fields.where} has no token_embd.weight: it seems to contain a vocabulary "
                "without a model"
            )
        layers = head_layers(self._file, self._variant.name).start
        for key in ("block_count", "nextn_predict_layers", "feed_forward_length"):
            fields.mark_read(key)
        fields.count("context_length")
        by_layer = read_layers(fields, self._architecture, layers, self._weights)
        if self._has_key("intermediate_size") and "intermediate_size" not in by_layer:
            fields.count("feed_forward_length")
        heads, hidden = fields.count("attention.head_count"), fields.count("embedding_length")
        width = self._head_width(heads, hidden)
        epsilon = EPSILON[self._architecture.form.norm]
        fields.positive(epsilon)
        defaults: dict[str, Any] = {
            "num_key_value_heads": heads,
            "head_dim": hidden // heads,
            "vocab_size": self._weights[EMBEDDING][0],
            "sliding_window": None,
            "attention_multiplier": width**-0.5,
            "rope_theta": 10000.0,
            "rms_norm_eps": self._architecture.keys["rms_norm_eps"],
            **dict.fromkeys(("embedding_multiplier", "residual_multiplier"), 1.0),
            **dict.fromkeys(("logit_scale", "logits_scaling"), 1.0),
        }
        if not self._architecture.global_heads:
            defaults["moe_intermediate_size"] = fields.values.get("feed_forward_length")
        keys = {**KEYS, **dict.fromkeys(EPSILON.values(), "rms_norm_eps"), **self._variant.keys}
        for key, meaning in keys.items():
            if key in EPSILON.values() and key != epsilon:
                fields.mark_read(key)  # some converters write both epsilons
                continue
            self._put_key(key, meaning, defaults)
        self._values |= by_layer | {"num_hidden_layers": layers}
        self._set_rotation(width)
        self._set_windows()
        self._set_by_tensors()
        if self._variant.derive:
            self._values |= self._variant.derive(self._values)

    def _head_width(self, heads: int, hidden: int) -> int:
        fields = self._fields
        if "attention.key_length" not in fields.values:
            key, heads_key = (
                f"{fields.prefix}embedding_length",
                f"{fields.prefix}attention.head_count",
            )
            if hidden % heads:
                raise fields.error(
                    f"{key} {hidden} is not a multiple of the {heads} heads ({heads_key})"
                )
            self._file_keys["head_dim"] = (
                f"{fields.prefix}attention.key_length = {key} / {heads_key} ="
            )
        width = fields.count("attention.key_length", hidden // heads)
        if fields.count("attention.value_length", width) != width:
            raise fields.error(
                f"{self._full_key('attention.value_length')} differs from "
                f"{self._full_key('attention.key_length')} {width}: values and keys of different "
                "width are not supported"
            )
        return width

    def _put_key(self, key: str, meaning: str, defaults: Mapping[str, Any]) -> None:
        """Set one key; if the class lacks the key, refuse values that differ from the class's."""
        stated = self._fields.values.get(key)
        if key in OPTIONAL and not stated:
            stated = None
        if self._has_key(meaning):
            self._fields.mark_read(key)
            self._file_keys.setdefault(
                self._architecture.key_names.get(meaning, meaning), self._full_key(key)
            )
            has_default = self._architecture.keys[meaning] is not None
            if stated is None and meaning in NEEDED and has_default:
                raise self._fields.error(f"{self._full_key(key)} is missing")
            if stated is not None or meaning in defaults:
                self._values[meaning] = defaults[meaning] if stated is None else stated
        elif meaning in defaults and stated is not None and key not in NEUTRAL:
            self._fields.mark_read(key)
            if not isinstance(stated, int | float) or not math.isclose(
                stated, defaults[meaning], rel_tol=1e-6
            ):
                raise self._fields.error(
                    f"{self._full_key(key)} is {format_value(stated)}, but for this class it "
                    f"must be {defaults[meaning]!r}"
                )

    def _has_key(self, key: str) -> bool:
        """Whether the class has this one of Llama's keys."""
        if key == "sliding_window" and self._architecture.windows == "switched":
            return False  # llama.cpp does not implement Qwen's windows
        return key in self._architecture.keys and self._architecture.key_names.get(key, key) != ""

    def _full_key(self, key: str) -> str:
        return f"{self._fields.prefix}{key}"

    # --- settings that GGUF states differently ----------------------------------------------------

    def _set_rotation(self, width: int) -> None:
        """Set the rotary parameters."""
        fields = self._fields
        part = rotary_fraction(fields, width, partial=self._has_key("partial_rotary_factor"))
        if part is not None:
            self._values["partial_rotary_factor"] = part
        if self._architecture.unrotated == "all":
            return
        theta = self._values["rope_theta"]
        if self._values.get("sliding_window") is None:
            # removed, since it applies only to layers with windows
            self._values.pop("rope_local_base_freq", None)
        local = theta
        if self._architecture.global_heads:
            local = fields.positive("rope.freq_base_swa", 10000.0)
            if DIVISORS not in self._file.tensors:
                raise ExportError(f"{fields.where} has no {DIVISORS}")
        elif not self._has_key("rope_local_base_freq"):
            local = fields.get("rope.freq_base_swa", float, theta) or theta
            if local != theta:
                raise fields.error(
                    f"{self._full_key('rope.freq_base_swa')} is {local}, but all layers of this "
                    f"class have the same θ, {theta}"
                )
        table = rope_table(
            self._file, fields, (self._architecture.rope_default or {}).get("truncate")
        )
        kind, supported = table["rope_type"], self._architecture.rotations
        if supported is not None and kind not in supported:
            raise fields.error(
                f"{self._full_key('rope.scaling.type')}: this class does not support rotary "
                f"scaling {format_value(kind)}"
            )
        if self._has_key("original_max_position_embeddings"):
            original = "original_max_position_embeddings"
            self._values[original] = table.get(original) or fields.count(
                "rope.scaling.original_context_length", self._values["max_position_embeddings"]
            )
        if self._architecture.rope_by_type and not self._has_key("rope_local_base_freq"):
            # Only full layers are scaled.
            plain = {"rope_type": "default", "rope_theta": local}
            self._values["rope_parameters"] = {
                FULL: table | {"rope_theta": theta},
                SLIDING: plain,
            }
        elif self._architecture.rope_default or table["rope_type"] != "default":
            self._values["rope_scaling"] = {**table, "rope_theta": theta}

    def _set_windows(self) -> None:
        """Set the layers with a window: a list, or all layers except every n-th."""
        fields, key = self._fields, "attention.sliding_window_pattern"
        stated = fields.values.get(key)
        if self._values.get("sliding_window") is None or stated is None:
            if self._architecture.windows != "none":
                fields.mark_read(key)  # the key has no effect without a window
            return
        if not self._has_key("layer_types"):
            return
        if isinstance(stated, list):
            fields.mark_read(key)
            self._file_keys["layer_types"] = self._full_key(key)
            self._values["layer_types"] = [SLIDING if each else FULL for each in stated]
        elif isinstance(stated, int):
            every, layers = fields.count(key), min(fields.count("block_count"), MOST_LAYERS)
            kinds = [SLIDING if (i + 1) % every else FULL for i in range(layers)]
            self._values["layer_types"] = kinds

    def _set_by_tensors(self) -> None:
        """Set the keys that the presence of a tensor implies."""
        for key, name in {**self._variant.tensors, "tie_word_embeddings": HEAD}.items():
            self._values[key] = (name in self._inner) != (name == HEAD)
        for key, modules in self._architecture.biases.items():
            if key:
                self._values[key] = any(self._has_bias(module) for module in modules)

    def _has_bias(self, module: str) -> bool:
        return f"{module.replace('*', '0')}.bias" in self._inner

    def _drop_absent_biases(self, config: ModelConfig) -> ModelConfig:
        """Remove optional biases that the file does not have."""
        always = self._architecture.biases.get("", ())
        biases = tuple(
            module for module in config.form.biases if module in always or self._has_bias(module)
        )
        return msgspec.structs.replace(
            config, form=msgspec.structs.replace(config.form, biases=biases)
        )

    def _with_file_keys(self, text: str) -> str:
        """Replace the class's key names by the file's in an error message."""
        where = self._fields.where
        start = where if text.startswith(where) else ""
        known = sorted(map(re.escape, self._file_keys), key=len, reverse=True)
        words = re.compile(rf"(?<![\w.])({'|'.join(known)})(?![\w])")
        return start + words.sub(lambda match: self._file_keys[match[1]], text[len(start) :])
