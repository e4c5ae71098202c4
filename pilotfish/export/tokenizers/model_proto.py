"""SentencePiece's file format, a protocol buffer, with the fields that are used here.

Numbers and defaults are those of sentencepiece_model.proto (github.com/google/sentencepiece); other
fields are skipped.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

UNIGRAM, BPE = 1, 2  # TrainerSpec.model_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # SentencePiece.type

_PACKAGE = "pilotfish.sentencepiece"
_Field = descriptor_pb2.FieldDescriptorProto
# message → field → number, type, and default or message name; "*" marks a repeated field.
_SCHEMA: dict[str, dict[str, tuple[int, int, str]]] = {
    "SentencePiece": {
        "piece": (1, _Field.TYPE_STRING, ""),
        "score": (2, _Field.TYPE_FLOAT, "0"),
        "type": (3, _Field.TYPE_INT32, str(NORMAL)),
    },
    "TrainerSpec": {
        "model_type": (3, _Field.TYPE_INT32, str(UNIGRAM)),
        "treat_whitespace_as_suffix": (24, _Field.TYPE_BOOL, "false"),
        "byte_fallback": (35, _Field.TYPE_BOOL, "false"),
        "bos_id": (41, _Field.TYPE_INT32, "1"),
        "bos_piece": (46, _Field.TYPE_STRING, "<s>"),
    },
    "NormalizerSpec": {
        "precompiled_charsmap": (2, _Field.TYPE_BYTES, ""),
        "add_dummy_prefix": (3, _Field.TYPE_BOOL, "true"),
        "remove_extra_whitespaces": (4, _Field.TYPE_BOOL, "true"),
        "escape_whitespaces": (5, _Field.TYPE_BOOL, "true"),
    },
    "ModelProto": {
        "pieces": (1, _Field.TYPE_MESSAGE, "SentencePiece*"),
        "trainer_spec": (2, _Field.TYPE_MESSAGE, "TrainerSpec"),
        "normalizer_spec": (3, _Field.TYPE_MESSAGE, "NormalizerSpec"),
        "denormalizer_spec": (5, _Field.TYPE_MESSAGE, "NormalizerSpec"),
    },
}


def parse_model(data: bytes) -> Any:
    """Parse a `ModelProto`; raise `ValueError` if the bytes are not a `ModelProto`."""
    try:
        model = _model_class().FromString(data)
        if all(piece.piece for piece in model.pieces) and model.pieces:
            return model
    except (DecodeError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None
    raise ValueError("it has no tokens, or an empty token")


@cache
def _model_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="model.proto", package=_PACKAGE, syntax="proto2")
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for field, (number, kind, default) in fields.items():
            many = default.endswith("*")
            label = _Field.LABEL_REPEATED if many else _Field.LABEL_OPTIONAL
            added = message.field.add(name=field, number=number, type=kind, label=label)
            if kind == _Field.TYPE_MESSAGE:
                added.type_name = f".{_PACKAGE}.{default.rstrip('*')}"
            else:
                added.default_value = default
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    descriptor = pool.FindMessageTypeByName(f"{_PACKAGE}.ModelProto")
    return message_factory.GetMessageClass(descriptor)
