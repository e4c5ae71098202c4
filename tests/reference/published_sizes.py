"""Shrink the sizes of a published config.json; its keys, their spelling and all flags stay.

Sizes are layers, widths, heads, experts, vocabularies, windows and contexts, also where they are
lists. What depends on them follows: as many kinds of layers as in the original, sections of rotary
embeddings, ids of special tokens. A size that the file leaves to a large default is added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.support.small_checkpoints import TOKENS, VOCAB

Values = dict[str, Any]
HIDDEN, INNER, NARROW, WIDTH, WIDE = 64, 96, 32, 16, 32
CONTEXT, WINDOW, ORIGINAL = 512, 16, 64
MOST_LAYERS = 16
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
HEADS = ("num_attention_heads", "n_head")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
# Lists of a text model that say what each layer is.
KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers", "is_moe_layers")
INDICES = ("attn_layer_indices", "full_attn_idxs", "mlp_only_layers", "moe_layers")
PARTIAL = ("partial_rotary_factor", "rotary_pct", "rotary_percent", "rope_pct")
CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
SPACE_HEADS = ("mamba_n_heads", "mamba_num_heads")

# Keys → what a size becomes; 0, null and 1 remain.
PLAIN: dict[str, int] = {
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "block_ff_dim", "ffn_hidden_size",
                     "intermediate_size_mlp", "dense_intermediate_size",
                     "shared_intermediate_size"), INNER),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size",
                     "expert_intermediate_size", "moe_shared_expert_intermediate_size",
                     "hidden_size_per_layer_input", "laurel_rank", "global_head_dim"), NARROW),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
                     "num_moe_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk", "n_group",
                     "mamba_n_groups", "n_groups", "n_shared_experts",
                     "num_shared_experts"), 2),
    **dict.fromkeys(("topk_group", "first_k_dense_replace", "num_dense_layers",
                     "moe_layer_start_index"), 1),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_chunk_size",
                     "chunk_size", "mamba_head_dim", "linear_key_head_dim",
                     "linear_value_head_dim"), 16),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "sliding_window_size"), WINDOW),
    "time_step_rank": 4,
    "linear_num_key_heads": 2,
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
}  # fmt: skip
ADDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")  # if absent
SEEN: dict[str, int] = {
    "hidden_size": 32, "embed_dim": 32, "intermediate_size": 32, "depth": 2, "mlp_dim": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_heads": 2, "num_key_value_heads": 2,
    "head_dim": 16, "global_head_dim": 16, "num_position_embeddings": 16,
    "conf_num_hidden_layers": 1, "conf_num_attention_heads": 2, "position_embedding_size": 64,
    "projection_dim": 32, "vocab_size": 64, "input_feat_size": 32, "output_proj_dims": 32,
    "projector_hidden_size": 32, "max_position_embeddings": 64,
}  # fmt: skip
"""Sizes of what sees and hears."""


def shrink(values: Mapping[str, Any], full: Any) -> Values:
    """Return the file with small sizes; `full`: what transformers makes of the file as it is."""
    results = dict(values)
    inner = values.get("text_config")
    text = full.get_text_config() if full is not None else None
    if isinstance(inner, Mapping):
        results["text_config"] = _shrink_text(inner, text, added=True)
        for key in set(results) & {"vocab_size", "hidden_size", *LAYERS, *HEADS, *KV_HEADS}:
            results[key] = results["text_config"].get(key, results[key])
    results = _shrink_text(results, text) if _is_text(values) else _fit_ids(results)
    for part in ("vision_config", "audio_config"):
        if isinstance(values.get(part), Mapping):
            known = getattr(full, part, None)
            results[part] = _shrink_seen(values[part], known, results.get("text_config", results))
    if "mm_tokens_per_image" in results:
        results["mm_tokens_per_image"] = 4
    return results


def _is_text(values: Mapping[str, Any]) -> bool:
    return any(key in values for key in LAYERS) or "text_config" not in values


class _Text:
    """The sizes of a text model, and the small ones for them."""

    def __init__(self, values: Mapping[str, Any], full: Any) -> None:
        self.values, self._full = values, full
        self.layers = self.size(LAYERS, 2)
        self.layers_kept = self._layers_to_show()
        self.hidden, self.heads, self.kv_heads, self.width = self._attention()

    def stated(self, keys: tuple[str, ...]) -> Any:
        """The file's value of the first of these keys that it has."""
        return next((self.values[key] for key in keys if self.values.get(key) is not None), None)

    def size(self, keys: tuple[str, ...], otherwise: Any) -> Any:
        """The same, else the class's value."""
        value = self.stated(keys)
        others = (getattr(self._full, key, None) for key in keys)
        return value if value is not None else next((o for o in others if o is not None), otherwise)

    def _layers_to_show(self) -> int:
        """How many layers show each kind of layer that the original has."""
        lists = [self.values.get(key, getattr(self._full, key, None)) for key in KINDS]
        lists.append(self.values.get("hybrid_override_pattern"))
        lists = [each for each in lists if each is not None and len(each) == self.layers]
        kinds = list(zip(*(map(str, each) for each in lists), strict=True))
        first = max((kinds.index(kind) + 1 for kind in set(kinds)), default=2)
        indices = [self.values[key][0] + 2 for key in INDICES if self.values.get(key)]
        first = max(2, first, *indices, *self._intervals())
        twice = 2 if self.values.get("num_kv_shared_layers") else 1
        return int(min(first * twice, MOST_LAYERS, self.layers))

    def _intervals(self) -> list[int]:
        keys = ("full_attention_interval", "decoder_sparse_step", "moe_layer_freq",
                "first_k_dense_replace", "num_dense_layers")  # fmt: skip
        stated = [self.values.get(key) for key in keys]
        return [each for each in stated if isinstance(each, int) and each > 1][:1] or [2]

    def _attention(self) -> tuple[int, int, int, int]:
        stated = self.stated(HEADS)
        heads, width = self.size(HEADS, 1), self.size(("head_dim",), None)
        kv_heads, hidden = self.size(KV_HEADS, heads), self.size(("hidden_size", "n_embd"), HIDDEN)
        if stated is None:
            few, few_kv = heads, kv_heads
        elif self.stated(KV_HEADS) is None and kv_heads not in (1, heads):
            few, few_kv = 2 * kv_heads, kv_heads
        else:
            few, few_kv = 4, {heads: 4, 1: 1}.get(kv_heads, 2)
        if self.values.get("head_dim") is None and width not in (None, hidden // heads):
            return HIDDEN, few, few_kv, width
        if width in (None, hidden // heads):
            return WIDTH * few if few > 1 else HIDDEN, few, few_kv, WIDTH
        return HIDDEN, few, few_kv, WIDE

    @property
    def pairs(self) -> int:
        """Pairs of a head that are rotated."""
        tables = [self.values, *(v for v in self.values.values() if isinstance(v, Mapping))]
        part = next((t[k] for t in tables for k in PARTIAL if t.get(k) is not None), 1.0)
        return int(self.width * part) // 2

    def context(self, original: int) -> int:
        """The small context for another than the model's."""
        most = self.size(CONTEXTS, CONTEXT)
        return CONTEXT if original >= most else max(ORIGINAL, CONTEXT * original // most)


def _shrink_text(values: Mapping[str, Any], full: Any, *, added: bool = False) -> Values:
    text = _Text(values, full)
    results = {key: _small(key, value, text) for key, value in values.items()}
    for key in ADDED if added else ADDED[:1]:
        if key not in results and (getattr(full, key, None) or 0) > 4 * VOCAB:
            results[key] = text.hidden if key == "hidden_size" else PLAIN.get(key, text.layers_kept)
    if values.get("model_type") == "qwen3_vl_moe_text":  # no square matrices: axes would look alike
        results["moe_intermediate_size"] = INNER
    if added and not any(key in results for key in LAYERS):
        results["num_hidden_layers"] = text.layers_kept
    return _fit_ids(results)


def _small(key: str, value: Any, text: _Text) -> Any:
    """Return the small value of a key of a text model."""
    if isinstance(value, Mapping):
        if key in {"vision_config", "audio_config", "text_config", "quantization_config"}:
            return value
        if key == "per_layer_config":  # layer → its keys
            value = {name: each for name, each in value.items() if int(name) < text.layers_kept}
        return {name: _small(name, each, text) for name, each in value.items()}
    if key in FOLLOW and value is not None and not isinstance(value, bool):
        return FOLLOW[key](value, text)
    if isinstance(value, list) and len(value) == text.layers and text.layers > 1:
        return _small_list(key, value, text)
    size = isinstance(value, int) and not isinstance(value, bool)
    return min(value, PLAIN[key]) if size and key in PLAIN else value


def _small_list(key: str, value: Any, text: _Text) -> Any:
    if key in KINDS:
        return value[: text.layers_kept]
    sampled = [value[i * text.layers // text.layers_kept] for i in range(text.layers_kept)]
    return [min(each, PLAIN[key]) if key in PLAIN else each for each in sampled]


def _sections(value: Any, text: _Text) -> Any:
    """Divide the pairs as the original does; the first section takes what is left over."""
    rest = [max(1, each * text.pairs // sum(value)) for each in value[1:]]
    return [text.pairs - sum(rest), *rest]


def _sampled(value: Any, text: _Text) -> Any:
    if not isinstance(value, list):
        return value
    return [value[i * len(value) // text.pairs] for i in range(text.pairs)]


def _shared(value: int, text: _Text) -> int:
    return min(value, text.layers_kept // 2)


def _embedded(value: int, text: _Text) -> int:
    return text.hidden if value == text.size(("hidden_size",), value) else NARROW


def _of(name: str) -> Callable[[Any, _Text], Any]:
    return lambda value, text: getattr(text, name)


def _space_heads(value: int, text: _Text) -> int:
    return int(text.size(("mamba_expand", "expand"), 2)) * text.hidden // 16


def _own_heads(value: int, text: _Text) -> int:
    space = text.values.get("model_type") == "mamba2"
    return _space_heads(value, text) if space else text.heads


def _own_width(value: int, text: _Text) -> int:
    return 16 if text.values.get("model_type") == "mamba2" else text.width


def _inner(value: Any, text: _Text) -> Any:
    if isinstance(value, list):
        return _small_list("intermediate_size", value, text)
    selective = "time_step_rank" in text.values and text.stated(HEADS) is None
    return 2 * text.hidden if selective else min(value, INNER)


FOLLOW: dict[str, Callable[[Any, _Text], Any]] = {
    **dict.fromkeys(LAYERS, _of("layers_kept")),
    **dict.fromkeys(HEADS, _of("heads")),
    **dict.fromkeys(KV_HEADS, _of("kv_heads")),
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "block_dim", "conv_dim", "conv_dim_out"),
        _of("hidden"),
    ),
    **dict.fromkeys(SPACE_HEADS, _space_heads),
    **dict.fromkeys(CONTEXTS, lambda value, text: CONTEXT),
    **dict.fromkeys(INDICES, lambda value, text: [i for i in value if i < text.layers_kept]),
    **dict.fromkeys(("short_factor", "long_factor"), _sampled),
    **dict.fromkeys(("d_inner", "mamba_d_ssm"), lambda value, text: 2 * text.hidden),
    "num_heads": _own_heads,
    "head_dim": _own_width,
    "attention_head_dim": _of("width"),
    "kv_channels": _of("width"),
    "intermediate_size": _inner,
    "word_embed_proj_dim": _embedded,
    "original_max_position_embeddings": lambda value, text: text.context(value),
    "hybrid_override_pattern": lambda value, text: value[: text.layers_kept],
    "mrope_section": _sections,
    "rotary_dim": lambda value, text: value * text.width // text.size(("head_dim",), value),
    "num_kv_shared_layers": _shared,
    "num_global_key_value_heads": lambda value, text: min(value, 2),
    "max_window_layers": lambda value, text: min(value, text.layers_kept),
    "moe_layer_end_index": lambda value, text: text.layers_kept - 1,
    "mamba_d_head": lambda value, text: value if isinstance(value, str) else 16,
    "linear_num_value_heads": lambda value, text: 2 if value == text.values.get(
        "linear_num_key_heads") else 4,
}  # fmt: skip


def _fit_ids(values: Values) -> Values:
    """Give special tokens ids that exist, and those of images ids that no text has."""
    results = dict(values)
    spare = len(TOKENS)
    for key, value in values.items():
        seen = any(word in key for word in ("image", "video", "vision", "audio"))
        if not key.endswith(("token_id", "token_index")) or isinstance(value, bool):
            continue
        if isinstance(value, list):
            results[key] = [each if each < spare else spare - 1 for each in value]
        elif isinstance(value, int) and (seen or value >= spare):
            results[key] = spare - 1 if "eos" in key else spare + len(key) % (VOCAB - spare)
    return results


def _shrink_seen(values: Mapping[str, Any], known: Any, text: Mapping[str, Any]) -> Values:
    """Shrink what sees or hears; its large defaults are stated, too."""
    full = known.to_dict() if known is not None else {}
    results = {k: SEEN[k] for k in SEEN if isinstance(full.get(k), int) and full[k] > SEEN[k]}
    results = dict(values) | results
    for key, size in SEEN.items():
        if isinstance(values.get(key), int):
            results[key] = min(values[key], size)
    listed = ("deepstack_visual_indexes", "fullatt_block_indexes")
    results |= {key: [0] for key in listed if key in results or key in full}
    if "out_hidden_size" in results or "out_hidden_size" in full:
        results["out_hidden_size"] = text["hidden_size"]
    elif "embed_dim" in results:  # Qwen2-VL
        results["hidden_size"] = text["hidden_size"]
    for key, size in (("patch_size", 7), ("image_size", 28)):
        stated = values.get(key, full.get(key))
        if "model_patch_size" in full | dict(values):  # follows from the patches'
            continue
        if isinstance(stated, list):
            results[key] = [min(each, size) for each in stated]
        elif isinstance(stated, int):
            results[key] = min(stated, size)
    return results
