"""Tokens that chat templates of a Hugging Face directory can write by name, such as bos_token.

In: tokenizer_config.json, special_tokens_map.json, and config.json for the tokenizer's class. Out:
name → token, like the `special_tokens_map` that transformers passes to templates. A name that is
null in the file has no token; a name that is absent has the class's default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# keys of further tokens; the first key that is not empty is used
EXTRA = ("extra_special_tokens", "additional_special_tokens")
_TYPE = "AddedToken"
_FILE = Path(__file__).with_name("classes.json")
_GENERAL = ""  # transformers' general class, which overrides tokenizer_config.json


class _Data(msgspec.Struct, frozen=True):
    """The facts of transformers in classes.json, which the reference tests check.

    Attributes:
        tokens: tokenizer class that has default tokens → these tokens by name.
        model_types: tokenizer class → the model types of config.json, also of multimodal models.
        misnamed: model types for which transformers ignores the class in tokenizer_config.json,
            which is often a wrong one.
    """

    tokens: dict[str, dict[str, str]]
    model_types: dict[str, list[str]]
    misnamed: frozenset[str]


_DATA = msgspec.json.decode(_FILE.read_bytes(), type=_Data)
CLASSES, MISNAMED = _DATA.tokens, _DATA.misnamed
CLASS_OF_MODEL_TYPE = {kind: name for name, kinds in _DATA.model_types.items() for kind in kinds}


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
