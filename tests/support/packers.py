"""Write matrices as quantisers do: GPTQ, AWQ, compressed-tensors, fp8.

Written from their formats' descriptions, bit by bit, not from the readers. Each packer takes codes
and zero points u8, scales f16 [groups, N], and returns the tensors of a module by their names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.support.small_checkpoints import tokenizer_json

Tensors = Mapping[str, NDArray[Any]]


class Rounded(NamedTuple):
    """A rounded matrix: w[n, k] = (codes[n, k] − zeros[n, g]) · scales[n, g], g = groups[k]."""

    codes: NDArray[np.int64]
    zeros: NDArray[np.int64]
    scales: NDArray[np.float16]
    groups: NDArray[np.int64]

    def floats(self) -> NDArray[np.float32]:
        steps = (self.codes - self.zeros[:, self.groups]).astype(np.float32)
        result: NDArray[np.float32] = steps * self.scales.astype(np.float32)[:, self.groups]
        return result


def random_matrix(
    random: np.random.Generator,
    rows: int,
    width: int,
    *,
    bits: int,
    group: int,
    symmetric: bool,
    shuffled: bool = False,
) -> Rounded:
    count = width // group
    zeros = np.full((rows, count), 2 ** (bits - 1))
    if not symmetric:
        zeros = random.integers(1, 2**bits, (rows, count))
    groups = np.arange(width) // group
    return Rounded(
        random.integers(0, 2**bits, (rows, width)),
        zeros,
        (random.uniform(0.2, 1.0, (rows, count)) / 2**bits / width**0.5).astype(np.float16),
        random.permutation(groups) if shuffled else groups,
    )


def _words(fields: NDArray[np.int64], bits: int) -> NDArray[np.int32]:
    """Put neighbours of the first axis into one word each, the first into its lowest bits."""
    each = 32 // bits
    words = np.zeros((len(fields) // each, *fields.shape[1:]), np.int64)
    for place in range(each):
        words |= fields[place::each] << (bits * place)
    return words.astype(np.uint32).view(np.int32)


def gptq(matrix: Rounded, bits: int, *, one_less: bool) -> Tensors:
    stored = (matrix.zeros - one_less) % 2**bits
    return {
        "qweight": _words(matrix.codes.T, bits),
        "qzeros": np.ascontiguousarray(_words(stored, bits).T),
        "scales": np.ascontiguousarray(matrix.scales.T),
        "g_idx": matrix.groups.astype(np.int32),
    }


def awq(matrix: Rounded) -> Tensors:
    def words(columns: NDArray[np.int64]) -> NDArray[np.int32]:  # [n, N] → [n, N / 8]
        values = np.zeros((len(columns), columns.shape[1] // 8), np.int64)
        for word in range(values.shape[1]):
            for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                values[:, word] |= columns[:, 8 * word + column] << (4 * place)
        return values.astype(np.uint32).view(np.int32)

    return {
        "qweight": words(matrix.codes.T),
        "qzeros": words(matrix.zeros.T),
        "scales": np.ascontiguousarray(matrix.scales.T),
    }


def compressed(matrix: Rounded, bits: int, *, symmetric: bool) -> Tensors:
    results: dict[str, NDArray[Any]] = {
        "weight_packed": np.ascontiguousarray(_words(matrix.codes.T, bits).T),
        "weight_scale": matrix.scales,
        "weight_shape": np.array(matrix.codes.shape, np.int64),
    }
    if (matrix.groups != np.sort(matrix.groups)).any():
        results["weight_g_idx"] = matrix.groups.astype(np.int32)
    if not symmetric:
        results["weight_zero_point"] = _words(matrix.zeros, bits)
    return results


def float8(weight: NDArray[np.float32], block: int | None) -> tuple[Tensors, NDArray[np.float32]]:
    """Round to e4m3 with a scale for each row, or each block × block; also returns the floats."""
    high, wide = (1, weight.shape[1]) if block is None else (block, block)
    counts = [-(-size // by) for size, by in zip(weight.shape, (high, wide), strict=True)]
    scales, codes = np.empty(counts, np.float32), np.empty(weight.shape, ml_dtypes.float8_e4m3fn)
    for i, j in np.ndindex(*counts):
        part = np.s_[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
        scales[i, j] = np.abs(weight[part]).max() / 448
        codes[part] = (weight[part] / scales[i, j]).astype(ml_dtypes.float8_e4m3fn)
    spread = scales.repeat(high, 0).repeat(wide, 1)[: weight.shape[0], : weight.shape[1]]
    name = "weight_scale" if block is None else "weight_scale_inv"
    return {"weight": codes, name: scales}, codes.astype(np.float32) * spread


def write_packed(
    path: Path, config: Mapping[str, Any], settings: Mapping[str, Any], tensors: Tensors
) -> Path:
    """Write a Hugging Face directory with these tensors; settings: its quantization_config."""
    path.mkdir(parents=True, exist_ok=True)
    fields = {**config, "quantization_config": settings}
    (path / "config.json").write_text(json.dumps(fields))
    (path / "tokenizer.json").write_text(tokenizer_json(), "utf-8")
    save_file({name: np.ascontiguousarray(each) for name, each in tensors.items()},
              path / "model.safetensors")  # fmt: skip
    return path
