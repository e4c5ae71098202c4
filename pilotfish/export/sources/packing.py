"""Read `quantization_config` in config.json: the quantisation of a checkpoint's matrices.

GPTQ, AWQ, AutoRound and compressed-tensors have blocks of integers, which `--precision stored`
keeps. fp8, also ModelOpt's, is dequantised, because no kernel supports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.fields import format_value

WIDTHS = (4, 8)
# Supported formats of compressed-tensors; unsupported formats have 4-bit floats or are sparse.
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
FLOAT8_BLOCK = 128


@dataclass(frozen=True)
class Packing:
    """The quantisation of a checkpoint's matrices.

    Attributes:
        method: quantisation method, which decides names and layouts of tensors.
        one_less: whether stored zero points are reduced by one (GPTQ's first format).
        float8_block: rows and columns of a block, for fp8 with a scale per block.
    """

    method: Literal["gptq", "awq", "compressed-tensors", "fp8"]
    one_less: bool = False
    float8_block: tuple[int, int] = (FLOAT8_BLOCK, FLOAT8_BLOCK)


def read_packing(stated: Any, where: str, *, gguf: bool = True) -> Packing | None:
    """Read a `quantization_config`; None if nothing is quantised.

    `gguf`: whether the model's GGUF files are supported, so that errors can recommend them.

    Raises:
        ExportError: if the quantisation is not supported.
    """
    if stated is None or stated == {}:
        return None
    if not isinstance(stated, dict):
        raise ExportError(
            f"{where}: quantization_config is {format_value(stated)}, but must be an object"
        )
    method = stated.get("quant_method")
    if method is None and {"group_size", "bits"} <= stated.keys():
        raise ExportError(
            f"{where}: the checkpoint is quantised by MLX, which is not supported: give the "
            f"original weights{', or a GGUF file of the model' if gguf else ''}"
        )
    readers = {
        "gptq": _gptq,
        "awq": _awq,
        "auto-round": _auto_round,
        "compressed-tensors": _compressed,
    }
    if isinstance(method, str) and method in readers:
        return readers[method](stated, where)
    if method in ("fp8", "fbgemm_fp8"):
        return Packing("fp8", float8_block=_float8_block(stated, where))
    algorithm = stated.get("quant_algo")
    if (
        method in (None, "modelopt") and algorithm == "FP8"
    ):  # older files of ModelOpt name no method
        return Packing("fp8")
    if method == "bitnet":
        _refuse_bitnet(stated, where)
    known = ", ".join((*readers, "fp8", "modelopt's FP8"))
    name = format_value(method or "modelopt")
    if algorithm is not None:
        name += f" ({format_value(algorithm, quoted=False)})"
    problem = f"the checkpoint is quantised by {name}"
    if method is None and algorithm is None:
        keys = format_value(", ".join(stated), quoted=False)
        problem = f"quantization_config does not state quant_method (it has {keys})"
    raise ExportError(
        f"{where}: {problem}, but only {known} are supported: give the original weights"
        f"{', or a GGUF file of the model' if gguf else ''}"
    )


def _refuse_bitnet(stated: Mapping[str, Any], where: str) -> NoReturn:
    """Raise an error; transformers rounds a model's weights and activations in each pass."""
    form = "rounded to −1, 0 and 1 in each pass"
    if stated.get("quantization_mode", "offline") != "online":
        form = "packed into 2 bits"
    raise ExportError(
        f"{where}: the weights are {form} (quant_method 'bitnet'), which is not supported: give "
        "rounded, unpacked weights without quantization_config"
    )


def _gptq(stated: Mapping[str, Any], where: str) -> Packing:
    version = stated.get("checkpoint_format") or "gptq"
    _expect(where, "checkpoint_format", version, ("gptq", "gptq_v2"))
    _expect(where, "bits", stated.get("bits"), WIDTHS)
    _expect(where, "pack_dtype", stated.get("pack_dtype", "int32"), ("int32",))
    return Packing("gptq", one_less=version == "gptq")


def _awq(stated: Mapping[str, Any], where: str) -> Packing:
    _expect(where, "version", str(stated.get("version", "gemm")).lower(), ("gemm",))
    bits = stated.get("bits", stated.get("w_bit", 4))
    _expect(where, "bits", bits, (4,))
    return Packing("awq")


def _auto_round(stated: Mapping[str, Any], where: str) -> Packing:
    """Read AutoRound's settings; its matrices are packed as in GPTQ's first format, or as in AWQ.

    The format "auto_round" is refused: files differ in whether their zero points are reduced.
    """
    style = stated.get("packing_format", "auto_round:auto_gptq")
    _expect(where, "packing_format", style, tuple(AUTO_ROUND))
    _expect(where, "data_type", stated.get("data_type", "int"), ("int",))
    _expect(where, "act_bits", stated.get("act_bits") or 16, (16, 32))
    return AUTO_ROUND[style](stated, where)


AUTO_ROUND = {"auto_round:auto_gptq": _gptq, "auto_round:gptq": _gptq,
              "auto_round:auto_awq": _awq, "auto_round:awq": _awq}  # fmt: skip


def _compressed(stated: Mapping[str, Any], where: str) -> Packing:
    _expect(where, "format", stated.get("format"), FORMATS)
    turned = stated.get("transform_config")
    if isinstance(turned, dict) and turned.get("config_groups"):
        raise ExportError(
            f"{where}: transform_config in quantization_config rotates activations at run time, "
            "which is not supported: give the original weights"
        )
    groups = stated.get("config_groups")
    stated_groups = groups.values() if isinstance(groups, dict) else ()
    listed = [group.get("weights") for group in stated_groups if isinstance(group, dict)]
    weights = [each for each in listed if isinstance(each, dict)]
    for each in weights:
        _expect(where, "num_bits", each.get("num_bits", 8), WIDTHS)
    return Packing("compressed-tensors", float8_block=_compressed_block(weights, where))


def _compressed_block(weights: Sequence[Mapping[str, Any]], where: str) -> tuple[int, int]:
    """Read the block size, which must be the same in all groups of matrices."""
    sizes = []
    for group in weights:
        size = group.get("block_structure")
        if size is not None and size not in sizes:
            sizes.append(size)
    if len(sizes) > 1:
        raise ExportError(f"{where}: block_structure differs between groups of matrices: {sizes}")
    return _counts(sizes[0] if sizes else None, "block_structure", where)


def _float8_block(stated: Mapping[str, Any], where: str) -> tuple[int, int]:
    _expect(where, "fmt", stated.get("fmt", "e4m3"), ("e4m3", "float8_e4m3fn"))
    return _counts(stated.get("weight_block_size") or None, "weight_block_size", where)


def _counts(block: Any, key: str, where: str) -> tuple[int, int]:
    """Read the rows and columns of a block; both are FLOAT8_BLOCK if none are stated."""
    if block is None:
        return FLOAT8_BLOCK, FLOAT8_BLOCK
    whole = isinstance(block, list) and len(block) == 2 and all(type(n) is int for n in block)
    if not whole or min(block) < 1:
        raise ExportError(f"{where}: {key} is {format_value(block)}, but must be two counts")
    return block[0], block[1]


def _expect(where: str, key: str, value: Any, accepted: tuple[Any, ...]) -> None:
    if value not in accepted:
        raise ExportError(
            f"{where}: {key} in quantization_config is {format_value(value)}, but only "
            f"{' or '.join(map(str, accepted))} is supported: give the original weights"
        )
