"""ONNX Runtime's TensorRT provider: it builds an engine at load and stores it in our cache.

One profile covers all passes, because a shape outside the profile would trigger a new build.
TensorRT must not write to the buffer that it reads, so the cache has separate buffers (`apart`).
This has not run on a GPU yet: see docs/engines.md.
"""

from __future__ import annotations

from typing import ClassVar

from pilotfish.engines.backends.backend import Load, refuse_states
from pilotfish.engines.backends.cuda import CudaBackend
from pilotfish.engines.cache import cache_directory
from pilotfish.engines.runtime import CUDA
from pilotfish.engines.tensorrt.gates import BITS, check_form
from pilotfish.engines.tensorrt.profiles import Profiles


class TensorRTProviderBackend(CudaBackend):
    """The backend for graphs in the forms that TensorRT takes."""

    provider: ClassVar[str] = "TensorrtExecutionProvider"
    others: ClassVar[tuple[str, ...]] = (CUDA,)
    apart: ClassVar[bool] = True

    def __init__(self, load: Load) -> None:
        manifest = load.artifact.manifest
        refuse_states(manifest)
        # ONNX Runtime leaves operators that its TensorRT lacks to the CUDA provider.
        check_form(manifest, opset24=True)
        self._profiles = Profiles.for_slots(manifest, load.slots, load.context)
        self.narrow, self.widest = self._profiles.narrow, self._profiles.widest
        super().__init__(load)

    def options(self, load: Load) -> dict[str, str]:
        """Return the provider's options: the profile, and the folder for engines."""
        folder = cache_directory() / "engines" / load.artifact.manifest.digest / "onnxruntime"
        folder.mkdir(parents=True, exist_ok=True)
        minimum, optimum, maximum = (
            ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items())
            for shapes in self._profiles.union()
        )
        precision = load.artifact.manifest.precision
        return {
            "trt_engine_cache_enable": "1",
            "trt_engine_cache_path": str(folder),
            "trt_timing_cache_enable": "1",
            "trt_timing_cache_path": str(folder),
            "trt_fp16_enable": str(int(precision == "fp16")),
            # Before version 11, TensorRT needs this flag for quantised weights.
            "trt_int8_enable": str(int(precision in BITS)),
            "trt_profile_min_shapes": minimum,
            "trt_profile_opt_shapes": optimum,
            "trt_profile_max_shapes": maximum,
        }

    def capacities(self, load: Load) -> list[int]:
        """Return the profile's capacities."""
        return list(self._profiles.capacities)
