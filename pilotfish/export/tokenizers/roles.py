"""Tokens that chat templates of a Hugging Face directory can write by name, such as bos_token.

In: tokenizer_config.json, special_tokens_map.json, and config.json for the tokenizer's class. Out:
name → token, like the `special_tokens_map` that transformers passes to templates. A name that is
null in the file has no token; a name that is absent has the class's default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# keys of further tokens; the first key that is not empty is used
EXTRA = ("extra_special_tokens", "additional_special_tokens")
_TYPE = "AddedToken"
_BEGIN_END = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
_GEMMA = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "mask_token": "<mask>"}
_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_QWEN = dict.fromkeys(("eos_token", "pad_token", "unk_token"), "<|endoftext|>")

# transformers' tokenizer classes that have default tokens, with these tokens by name.
CLASSES: dict[str, dict[str, str]] = {
    "CohereTokenizer": {
        "bos_token": "<BOS_TOKEN>",
        "eos_token": "<|END_OF_TURN_TOKEN|>",
        "unk_token": "<UNK>",
        "sep_token": "<SEP>",
        "pad_token": "<PAD>",
        "cls_token": "<CLS>",
        "mask_token": "<MASK_TOKEN>",
    },
    "CodeGenTokenizer": {**_BEGIN_END, "unk_token": "<|endoftext|>"},
    "CodeLlamaTokenizer": {
        **_LLAMA,
        "prefix_token": "▁<PRE>",
        "middle_token": "▁<MID>",
        "suffix_token": "▁<SUF>",
        "eot_token": "▁<EOT>",
        "fill_token": "<FILL_ME>",
    },
    "GPT2Tokenizer": {**_BEGIN_END, "unk_token": "<|endoftext|>"},
    "GPTNeoXTokenizer": {
        **_BEGIN_END,
        "unk_token": "<|endoftext|>",
        "pad_token": "<|padding|>",
    },
    "GemmaTokenizer": {**_GEMMA, "unk_token": "<unk>"},
    "LlamaTokenizer": _LLAMA,
    "Qwen2Tokenizer": _QWEN,
    "Qwen3_5Tokenizer": _QWEN,
}
# model_type in config.json, also of multimodal models → tokenizer class. The general class
# overrides tokenizer_config.json.
_GENERAL = ""
CLASS_OF_MODEL_TYPE: dict[str, str] = {
    **dict.fromkeys(("mistral", "ministral", "ministral3", "mistral3", "mixtral"), _GENERAL),
    **dict.fromkeys(("phi3", "stablelm", "olmo2", "olmo3", "ernie4_5", "nemotron"), _GENERAL),
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared", "granitemoehybrid"), _GENERAL),
    **dict.fromkeys(("glm", "glm4", "llava", "llava_next", "smolvlm"), _GENERAL),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), "Qwen3_5Tokenizer"),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), "Qwen3_5Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), "GemmaTokenizer"),
    **dict.fromkeys(("olmo", "olmoe", "gpt_neox"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("gpt2", "opt", "phi", "starcoder2"), "GPT2Tokenizer"),
    **dict.fromkeys(("cohere", "cohere2", "aya_vision"), "CohereTokenizer"),
}
# Model types for which transformers ignores the class in tokenizer_config.json, often a wrong one.
MISNAMED = frozenset({"qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"})


def tokenizer_class(
    settings: Mapping[str, Any], config: Mapping[str, Any], *, byte_level: bool
) -> str:
    """Return the name of transformers' class for a tokenizer; "" for the general one.

    settings: tokenizer_config.json. byte_level: whether the tokenizer.json is a byte-level BPE.
    """
    model_type = config.get("model_type")
    of_model = CLASS_OF_MODEL_TYPE.get(model_type) if isinstance(model_type, str) else None
    if of_model == _GENERAL or (of_model is not None and model_type in MISNAMED):
        return of_model
    stated = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if not isinstance(stated, str):
        return of_model or _GENERAL
    name = stated.removesuffix("Fast")
    return _GENERAL if name == "LlamaTokenizer" and byte_level else name


def named_tokens(
    settings: Mapping[str, Any],
    roles: Mapping[str, Any],
    class_name: str,
    padding: str | None = None,
) -> dict[str, str]:
    """Return the tokens by name.

    Args:
        settings: tokenizer_config.json.
        roles: special_tokens_map.json, which only counts if `settings` is in the older form without
            added_tokens_decoder.
        class_name: the tokenizer's class, from `tokenizer_class`.
        padding: padding token of tokenizer.json; None without one.
    """
    explicit = dict(_explicit(settings))
    if "added_tokens_decoder" not in settings:
        explicit |= dict(_explicit(roles))
    tokens = {**CLASSES.get(class_name, {}), **explicit}
    tokens.setdefault("pad_token", padding)
    return {name: token for name, token in tokens.items() if token is not None}


def _explicit(source: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Yield the names in a file and their tokens; None for a name without a token."""
    extra = next((source[key] for key in EXTRA if source.get(key)), None)
    if isinstance(extra, dict):
        yield from ((name, content(token)) for name, token in extra.items())
    for name, token in source.items():
        if name in ROLES or (name.endswith("_token") and _is_token(token)):
            yield name, content(token)


def _is_token(value: object) -> bool:
    """Whether a value is a token; an object must have the type AddedToken."""
    return isinstance(value, str) or (isinstance(value, dict) and value.get("__type") == _TYPE)


def content(token: object) -> str | None:
    """Return the string of a token, stated plainly or as the `content` of an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
