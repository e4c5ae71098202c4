"""The key names of config.json, and the rule for keys that were not read.

transformers' class of the model is the reference. A key without effect there may have any value; a
key with an effect must have a value without one. A key that the class does not read is foreign: it
has no effect there either, unless the file is meant for other code and the key is not null.
"""

from __future__ import annotations

from collections.abc import Collection

from pilotfish.export.architectures import Architecture
from pilotfish.export.architectures.known_keys import KnownKeys
from pilotfish.export.sources.fields import Fields, format_value

# Tables whose unread keys transformers ignores.
ROPE_TABLES = ("rope_parameters.", "rope_scaling.")
# Bounds of what is ignored, because the manifest lists it.
MOST_FOREIGN, LONGEST = 64, 100

# Fields of `ModelConfig` → Llama's keys, for errors.
FIELDS = {
    "model_type": "model_type",
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate": "intermediate_size",
    "context": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "tied": "tie_word_embeddings",
    "embedding": "word_embed_proj_dim",
    "activation": "hidden_act",
    "token_inputs.width": "hidden_size_per_layer_input",
    "token_inputs.rows": "vocab_size_per_layer_input",
    "streams.count": "altup_num_inputs",
    "streams.rank": "laurel_rank",
    "experts.count": "num_experts",
    "experts.width": "moe_intermediate_size",
    "experts.shared": "shared_expert_intermediate_size",
    "experts.latent": "moe_latent_size",
}


def find_foreign_keys(
    fields: Fields, architecture: Architecture, ignored: Collection[str]
) -> list[str]:
    """Return the full names of unread keys that the model's class in transformers does not read.

    ignored: full names of keys that the user chose to ignore.

    Raises:
        ExportError: if a key with an effect was not read, or if a key is foreign and the file is
        meant for other code than transformers'.
    """
    known = architecture.known
    fields.mark_read("auto_map")
    neutral = {**{key: [default] for key, default in known.defaults.items()}, **known.others}
    for key, values in architecture.neutral.items():
        neutral[key] = [*neutral.get(key, ()), *values]
    inert = {*known.without, *architecture.unused} - architecture.neutral.keys()
    foreign = fields.unknown_keys(inert, neutral, ignored)
    tables = [f"{key}." for key, value in fields.values.items() if isinstance(value, dict)]
    strict = tuple(table for table in tables if table not in ROPE_TABLES)
    if any(name.startswith(strict) or _is_odd(name) for name in foreign):
        raise fields.unknown(foreign)
    if foreign and (not known.classes or len(foreign) > MOST_FOREIGN):
        raise fields.unknown(foreign)
    stated = dict(fields.unread_keys())
    doubtful = [name for name in foreign if stated[name] is not None]
    if doubtful and (code := _other_code(fields, known)):
        why = f"The file is meant for other code than transformers': {code}. "
        raise fields.unknown(doubtful, why)
    return foreign


def _is_odd(name: str) -> bool:
    return len(name) > LONGEST or not name.isprintable()


def _other_code(fields: Fields, known: KnownKeys) -> str | None:
    """Return the sign that other code than transformers' class is meant; None without one."""
    if fields.values.get("auto_map") is not None:
        return "it has an auto_map"
    for name in fields.items("architectures") or ():
        if name not in known.classes:
            return f"architectures names {format_value(name)}"
    return None
