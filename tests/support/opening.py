"""Decoders over GPU backends, by doubles of the libraries.

`opening(name, folder)` opens one of them over a tiny artifact. TensorRT and CUDA are the doubles of
`tensorrt_double` and `cudart_double`; ONNX Runtime's providers are our code for GPUs with the
provider's name changed to that of the CPU, over the same double of CUDA. None of it ran on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pilotfish.engines import backends
from pilotfish.engines.backends.cuda import CudaBackend
from pilotfish.engines.backends.tensorrt_ep import TensorRTProviderBackend
from pilotfish.engines.onnx_decoder import Decoder
from tests.support import cudart_double, tensorrt_double
from tests.support.runnable import needs
from tests.support.tiny import tiny_artifact


class CudaOnHost(CudaBackend):
    provider = "CPUExecutionProvider"
    device = "cpu"


class TensorRTProviderOnHost(TensorRTProviderBackend):
    provider = "CPUExecutionProvider"
    others = ()
    device = "cpu"


# Name: provider, dialect, version of the double of TensorRT.
DOUBLES = {
    "tensorrt-8.6-opset17": ("tensorrt", "opset17", "8.6.1"),
    "tensorrt-10.3-opset17": ("tensorrt", "opset17", "10.3.0"),
    "tensorrt-10.16-opset24": ("tensorrt", "opset24", "10.16.2"),
    "tensorrt-11.1-opset17": ("tensorrt", "opset17", "11.1.0"),
    "tensorrt-ep-opset17": ("tensorrt-ep", "opset17", None),
    "cuda-opset17": ("cuda", "opset17", None),
    "cuda-opset24": ("cuda", "opset24", None),
}


@contextmanager
def opening(name: str, folder: Path, *, slots: int, **tiny) -> Iterator[Decoder]:
    """Open a decoder over this double."""
    provider, dialect, version = DOUBLES[name]
    needs(dialect)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PILOTFISH_CACHE", str(folder / "cache"))
        if version:
            tensorrt_double.install(patch, version)
        else:
            cudart_double.install(patch, cudart_double.Gpu())
            for other, kind in (("cuda", CudaOnHost), ("tensorrt-ep", TensorRTProviderOnHost)):
                patch.setitem(backends.PROVIDERS, other, f"{__name__}:{kind.__name__}")
        artifact = tiny_artifact(folder / "artifact", dialect=dialect, **tiny)
        yield Decoder(artifact, slots=slots, provider=provider)
