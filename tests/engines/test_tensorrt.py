"""What the decoder's own tests do not show of TensorRT: shapes, memory, precision, faults, names.

TensorRT and CUDA are doubles here (`tests.support.tensorrt_double`): none of this ran on a GPU.
"""

import ctypes
import gc
import importlib
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pilotfish import Device
from pilotfish.engines.cudart import Copy3D, Cuda
from pilotfish.engines.engine_errors import CudaError, ProviderError
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.engines.tensorrt.fixing import fix_size
from pilotfish.engines.tensorrt.profiles import Profiles, input_shapes
from tests.support import cudart_double, tensorrt_double
from tests.support.examples import examples
from tests.support.prefill import prefill
from tests.support.runnable import needs
from tests.support.tiny import tiny_artifact

NAMES = json.loads((Path(__file__).parent / "tensorrt_names.json").read_text())
DIALECTS = {"opset17": "10.3.0", "opset24": "10.16.2"}
TOKENS = np.random.default_rng(0).integers(0, 100, 150)


@pytest.fixture(params=DIALECTS)
def opened(request, tmp_path, monkeypatch):
    """An artifact of each dialect, a TensorRT for it, and its GPU."""
    needs(request.param)
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    _, gpu = tensorrt_double.install(monkeypatch, DIALECTS[request.param])
    return tiny_artifact(tmp_path / "artifact", dialect=request.param), gpu


@st.composite
def forwards(draw, slots):
    """Rounds of passes: any slots, any sizes, chains and trees, and how much is kept after them."""
    rounds = []
    for _ in range(draw(st.integers(1, 4))):
        passes = {}
        for slot in draw(st.sets(st.integers(0, slots - 1), min_size=1)):
            size = draw(st.integers(1, 40) | st.sampled_from([1, 4, 16, 17, 128, 129]))
            wanted = draw(st.integers(0, size))
            passes[slot] = (size, wanted, draw(st.booleans()), draw(st.booleans()))
        rounds.append(passes)
    return rounds


@given(data=st.data(), slots=st.sampled_from([1, 3, 12]), context=st.sampled_from([40, 130, 256]))
@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_pass_is_outside_the_profiles(opened, data, slots, context):
    """The double refuses such a shape, as TensorRT does; answers have the rows asked for."""
    artifact, _ = opened
    decoder = Decoder(artifact, slots=slots, context=context, provider="tensorrt")
    for passes in data.draw(forwards(slots)):
        items = []
        for slot, (size, wanted, tree, _) in passes.items():
            size = min(size, context - decoder.length(slot))
            if size:
                parents = np.arange(size) // 2 - 1 if tree else None
                items.append(Pass(slot, TOKENS[:1].repeat(size), min(wanted, size), parents))
        for item, out in zip(items, decoder.forward(items) if items else (), strict=True):
            assert len(out.logits) == item.row_count
            assert np.isfinite(out.logits).all()
        for slot, (_, _, _, forget) in passes.items():
            if forget:
                decoder.rollback(slot, 0)


@given(
    slots=st.integers(1, 300), context=st.integers(2, 40_000), fixed=st.booleans(), data=st.data()
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_profiles_hold_every_shape_that_a_decoder_may_ask_for(
    manifest, slots, context, fixed, data
):
    profiles = Profiles.for_slots(manifest, slots, context, fixed=fixed)
    capacity = data.draw(st.sampled_from(profiles.capacities))
    batch = data.draw(st.integers(1, slots))
    size = data.draw(st.integers(1, profiles.narrow))
    total = data.draw(st.integers(size, batch * size))
    rows = data.draw(st.integers(1, total))
    assert profiles.decode.holds(input_shapes(manifest, batch, size, total, rows, capacity))
    wide = data.draw(st.integers(1, profiles.widest))
    rows = data.draw(st.integers(1, wide))
    assert profiles.prefill.holds(input_shapes(manifest, 1, wide, wide, rows, capacity))
    longest = context + (profiles.narrow if slots > 1 else 0)
    assert profiles.capacities[-1] >= longest
    assert list(profiles.capacities) == sorted(set(profiles.capacities))
    assert all(each % 64 == 0 for each in profiles.capacities)
    assert len(profiles.capacities) == 1 or not fixed
    for profile in profiles.all:
        assert profile.holds(profile.minimum)
        assert profile.holds(profile.optimum)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return tiny_artifact(tmp_path_factory.mktemp("m") / "a").manifest


def test_keys_and_values_stay_on_the_device(opened):
    artifact, gpu = opened
    decoder = Decoder(artifact, context=256, provider="tensorrt")
    prefill(decoder, 0, TOKENS[:100], rows=0)
    gpu.uploaded = gpu.downloaded = 0
    decoder.forward([Pass(0, TOKENS[:4], parents=np.array([-1, 0, 0, 1]))])
    decoder.keep_path(0, [0, 2])
    gpu.finish()
    hidden = artifact.manifest.dimensions.hidden
    assert gpu.downloaded == 4 * 4 * (artifact.manifest.padded_vocab_size + hidden)
    mask = 4 * 4 * decoder._cache.capacity
    assert gpu.uploaded < 8192 + mask < 4 * 100 * hidden  # ids, indices and the mask


def test_memory_goes_with_the_decoder(opened):
    artifact, gpu = opened
    decoder = Decoder(artifact, slots=2, provider="tensorrt")
    decoder.forward([Pass(0, TOKENS[:20]), Pass(1, TOKENS[:3])])
    assert gpu.allocations
    gc.disable()  # nothing that waits for a collection
    try:
        del decoder
        assert not gpu.allocations
    finally:
        gc.enable()
    gc.collect()
    assert not gpu.pinned


def test_half_precision_is_within_a_hundredth(tmp_path, opened):
    """The bound that is to hold on a GPU; the double only shows that the types are right."""
    dialect = opened[0].manifest.dialect
    half = tiny_artifact(tmp_path / "half", dialect=dialect, precision="fp16")
    got = prefill(Decoder(half, provider="tensorrt"), 0, TOKENS, rows=8).logits
    wanted = prefill(Decoder(half, provider="cpu"), 0, TOKENS, rows=8).logits
    assert np.linalg.norm(got - wanted) <= 1e-2 * np.linalg.norm(wanted)
    assert np.ptp(wanted) > 1


@pytest.mark.parametrize("protocol", ["greedy", "tree"])
def test_a_device_over_it_writes_the_same_text(pair, edge, device, tmp_path, monkeypatch, protocol):
    """Drafting window after window, with whatever is rolled back and kept between them."""
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    tensorrt_double.install(monkeypatch)
    options = {"protocol": protocol, "max_tokens": 40}
    if protocol == "tree":
        options |= {"temperature": 1.0, "seed": 5}
    with Device(pair.draft, edge.endpoint, threads=1, provider="tensorrt") as other:
        info = [each.generate("abc", **options) for each in (device, other)]
    assert info[0].text == info[1].text
    accepted = [sum(each.accepted for each in generation.rounds) for generation in info]
    assert accepted[0] == accepted[1] > 0


def test_half_precision_on_8_6_needs_the_flag_and_gets_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    half = tiny_artifact(tmp_path / "half", dialect="opset17", precision="fp16")
    tensorrt_double.install(monkeypatch, "8.6.1")
    assert Decoder(half, provider="tensorrt").provider == "tensorrt"


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        ("cudaMemcpy3DAsync", "loses keys and values"),  # cells are not fetched
        ("cudaMemcpyAsync", "contain NaN"),  # answers do not come back
    ],
)
def test_a_gpu_that_does_not_do_what_it_says_is_found_out(
    tmp_path, monkeypatch, caplog, function, complaint
):
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    artifact = tiny_artifact(tmp_path / "a", dialect="opset17")
    _, gpu = tensorrt_double.install(monkeypatch, "10.3.0")
    Decoder(artifact, provider="tensorrt")

    def lie(*arguments):
        return 0

    setattr(gpu.functions, function, lie)
    with pytest.raises(ProviderError, match=complaint):
        Decoder(artifact, provider="tensorrt")
    with caplog.at_level("INFO", logger="pilotfish.engines"):
        assert Decoder(artifact).provider == "cpu"
    assert "fell back: tensorrt: the provider ran the model, but" in caplog.messages[-1]


def test_cuda_errors_come_with_cudas_words(monkeypatch):
    cudart_double.install(monkeypatch, cudart_double.Gpu(devices=0))
    with pytest.raises(CudaError, match="cudaGetDeviceCount: no CUDA-capable device"):
        Cuda()


def test_without_cuda_one_line_says_so(monkeypatch):
    def absent(name, *arguments):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    with pytest.raises(CudaError, match="libcudart"):
        Cuda()


def test_structures_lie_as_in_cudas_header():
    """driver_types.h on 64-bit systems: offsets as a C compiler gives them."""
    offsets = {name: getattr(Copy3D, name).offset for name, _ in Copy3D._fields_}
    assert offsets == {
        "srcArray": 0,
        "srcPos": 8,
        "srcPtr": 32,
        "dstArray": 64,
        "dstPos": 72,
        "dstPtr": 96,
        "extent": 128,
        "kind": 152,
    }
    assert ctypes.sizeof(Copy3D) == 160


def test_a_size_is_fixed_and_nothing_else_changes(tmp_path):
    needs("opset24")
    artifact = tiny_artifact(tmp_path / "a", dialect="opset24")
    before = onnx.load(artifact.graph_path, load_external_data=False)
    data = fix_size(artifact.graph_path.read_bytes(), "C", 320)
    after = onnx.load_model_from_string(data)
    for value in (*after.graph.input, *after.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            assert dim.dim_param != "C"
    for value in (*before.graph.input, *before.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "C":
                dim.dim_value = 320
    assert before == after
    unchanged = artifact.graph_path.read_bytes()
    assert fix_size(unchanged, "no such size", 1) == unchanged


@pytest.mark.parametrize("rubbish", [b"\x0a\xff", b"\x3a\x05ab", b"\xff" * 20, b"\x0b"])
def test_rubbish_is_refused(rubbish):
    with pytest.raises(ValueError, match="ONNX"):
        fix_size(rubbish, "C", 1)


@pytest.mark.parametrize("version", NAMES)
def test_the_double_has_no_name_that_the_version_lacks(version):
    """And so our code uses none: it ran over each of these doubles."""
    module = tensorrt_double.tensorrt(version, cudart_double.Gpu())
    for owner, published in NAMES[version].items():
        used = {name for name in vars(getattr(module, owner, object)) if not name.startswith("_")}
        assert used - {"Severity"} <= set(published), owner
    assert hasattr(module, "IProgressMonitor") == ("IProgressMonitor" in NAMES[version])


def test_an_installed_tensorrt_has_every_name_that_we_use():
    try:
        trt = importlib.import_module("tensorrt")
    except ImportError:
        pytest.skip("TensorRT is not installed")
    version = ".".join(trt.__version__.split(".")[:3])
    double = tensorrt_double.tensorrt(version, cudart_double.Gpu())
    for owner in NAMES["11.1"]:
        for name in vars(getattr(double, owner, object)):
            assert name.startswith("_") or hasattr(getattr(trt, owner), name), f"{owner}.{name}"
