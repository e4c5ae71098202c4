"""Open the safetensors files of a folder, or say what the folder has instead.

In: the path of a folder. Out: its files, opened, or an ExportError that says what to do.
"""

from __future__ import annotations

import re
from pathlib import Path

from pilotfish.engines.manifest import GENAI, GENAI_NAME
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.json_object import read_object
from pilotfish.export.sources.safetensors_file import SafetensorsFile

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PART = re.compile(r"-\d+-of-\d+\.safetensors$")
ADAPTER = "adapter_config.json"
MERGE = (
    'python -c "from peft import AutoPeftModelForCausalLM as M; '
    "M.from_pretrained('{0}').merge_and_unload().save_pretrained('MERGED')\""
)
CONVERT = (
    'python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('{0}').save_pretrained('CONVERTED')\""
)
# Patterns of file names → what the folder is, and what to do; {0} is the folder, {1} a file in it.
KINDS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((ADAPTER,), f"it is an adapter, not a model: merge it into its model, as in {MERGE}"),
    ((GENAI_NAME,), f"this is a folder of ONNX Runtime GenAI: choose --dialect {GENAI}"),
    (("params.json", "consolidated*"), "{1} is in the form of the model's authors: give the "
     "repository or the conversion with config.json and model.safetensors"),
    (("*.gguf",), "it has GGUF files: give one of them instead of the folder, such as {1}"),
    (("openvino*.xml",), "it is a model of OpenVINO, from which the original weights cannot be "
     "read: give the original weights"),
    (("*.onnx", "onnx/*.onnx"), "it is a graph of another exporter ({1}), which is not supported: "
     "give the original weights"),
    (("*.bin", "*.pt", "*.pth", "*.ckpt"), "it has only pickled weights, which can run code when "
     f"they are read: convert the weights to safetensors, as in {CONVERT}"),
    (("*.h5", "*.msgpack"), "it has weights of TensorFlow or Flax only ({1}): convert the weights "
     "to safetensors with transformers 4 (from_tf or from_flax of from_pretrained)"),
)  # fmt: skip


def describe_folder(path: Path) -> str | None:
    """Return half a sentence about a folder's form; None if it has no known form."""
    for patterns, sentence in KINDS:
        for file in (each for pattern in patterns for each in sorted(path.glob(pattern))):
            return sentence.format(path, file.name)
    return None


def open_weights(path: Path) -> list[SafetensorsFile]:
    """Open the files that the index names, or the only safetensors file.

    Raises:
        ExportError: if a file is missing or damaged, or there is no such file.
    """
    whole = path / WHOLE
    if (path / ADAPTER).is_file():
        raise ExportError(
            f"{path} contains the adapter {ADAPTER}: merge the adapter into the weights, as in "
            f"{MERGE.format(path)}, or remove it if you do not want it"
        )
    if (path / INDEX).is_file():
        return [SafetensorsFile(file) for file in _indexed(path)]
    paths = sorted(path.glob("*.safetensors"))
    if whole in paths:
        return [SafetensorsFile(whole)]
    if len(paths) > 1 or (paths and PART.search(paths[0].name)):
        raise ExportError(
            f"{path} has several safetensors files, or one of several, but no {INDEX}: the "
            "download is incomplete"
        )
    if not paths or paths[0].name.startswith("consolidated"):
        form = describe_folder(path) or "the folder has no safetensors file"
        raise ExportError(f"{path} has no {WHOLE}: {form}")
    return [SafetensorsFile(paths[0])]


def _indexed(path: Path) -> list[Path]:
    """Return the files that the index names, which must exist."""
    shards = read_object(path / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(v, str) for v in shards.values()):
        raise ExportError(f"{path / INDEX} has no weight_map")
    if (path / WHOLE).is_file() and WHOLE not in shards.values():
        raise ExportError(
            f"{path} has both {WHOLE} and {INDEX}, and other programs differ in which they "
            "read: remove the wrong file"
        )
    files = [path / Path(name).name for name in sorted(set(shards.values()))]
    for file in files:
        if not file.is_file():
            raise ExportError(
                f"{file} cannot be read: {INDEX} names it, but it is missing, so the download is "
                "incomplete"
            )
    return files
