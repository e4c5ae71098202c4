"""The decoder's own tests on a GPU, where there is one and ONNX Runtime is built for it."""

import gc
import os
import signal

import numpy as np
import onnxruntime
import pytest

from pilotfish.engines import runtime
from pilotfish.engines.backends import PROVIDERS
from pilotfish.engines.backends.cuda import CudaBackend
from pilotfish.engines.cudart import Cuda
from pilotfish.engines.engine_errors import CudaError
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.export.split import split_artifact
from tests.engines.engine_tests import *  # noqa: F403  # collects these tests for the fixture `decoder` below
from tests.engines.test_decoder import (  # noqa: F401  # collected with this fixture, too
    SLOTS,
    TOKENS,
    empty,
    same,
    test_senseless_passes_are_refused,
)
from tests.support.prefill import prefill
from tests.support.staged import Staged
from tests.support.tiny import FAMILIES, SHARING, tiny_artifact

if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
    pytest.skip(
        "onnxruntime is built without CUDA: install onnxruntime-gpu in its place",
        allow_module_level=True,
    )
try:
    Cuda()
except CudaError as error:
    pytest.skip(f"no GPU: {error}", allow_module_level=True)


class Apart(CudaBackend):
    """Writes to `present` and takes few tokens at once, as engines of TensorRT do."""

    apart = True
    narrow, widest = 4, 7


@pytest.fixture(scope="module", params=["opset24-cuda", "opset17-cuda", "opset17-apart"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    dialect, _, provider = request.param.partition("-")
    artifact = tiny_artifact(tmp_path_factory.mktemp("gpu") / "a", dialect=dialect)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PROVIDERS, "apart", f"{__name__}:{Apart.__name__}")
        return Decoder(artifact, slots=SLOTS, provider=provider)


@pytest.fixture
def decoder(opened: Decoder) -> Decoder:
    empty(opened)
    return opened


@pytest.mark.parametrize(
    ("family", "precision", "error"),
    [(family, "fp32", 1e-5) for family in FAMILIES | SHARING]
    + [(family, "fp16", 1e-2) for family in FAMILIES]
    # The logits of gemma4-e2b differ by 0.7 % in fp32 and fp16 on the CPU, too.
    + [(family, "fp16", 2e-2) for family in SHARING],
)
@pytest.mark.parametrize("dialect", ["opset24", "opset17"])
def test_logits_are_those_of_the_cpu(tmp_path, family, precision, error, dialect):
    artifact = tiny_artifact(
        tmp_path / "a", architecture=family, precision=precision, dialect=dialect
    )
    got, wanted = (
        Decoder(artifact, provider=provider).forward([Pass(0, TOKENS)])[0]
        for provider in ("cuda", "cpu")
    )
    # In half precision an expert may be chosen by chance, where two are about as good.
    by_chance = precision == "fp16" and "experts" in (FAMILIES | SHARING)[family]
    for item, other in ((got.logits, wanted.logits), (got.hidden, wanted.hidden)):
        errors = np.linalg.norm(item - other, axis=1) / np.linalg.norm(other, axis=1)
        assert (np.median(errors) if by_chance else errors.max()) < error


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("precision", ["int8", "int4", "stored"])
@pytest.mark.parametrize("dialect", ["opset24", "tensorrt"])
def test_quantised_weights_give_the_logits_of_the_cpu(
    tmp_path, monkeypatch, family, precision, dialect
):
    # A GPU does not round activations to 8 bits. The CPU shall not do so here, either.
    monkeypatch.setitem(runtime.SESSION_CONFIG, "session.qdq_matmulnbits_accuracy_level", "1")
    artifact = tiny_artifact(
        tmp_path / "a", architecture=family, precision=precision, dialect=dialect
    )
    got, wanted = (
        Decoder(artifact, provider=provider).forward([Pass(0, TOKENS)])[0].logits
        for provider in ("cuda", "cpu")
    )
    errors = np.linalg.norm(got - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    assert errors.max() < 1e-4


def test_a_longer_text_grows_the_cache_and_keeps_what_it_holds(tmp_path):
    artifact = tiny_artifact(tmp_path / "a", context=1024)
    decoder, exact = (Decoder(artifact, slots=2, provider=provider) for provider in ("cuda", "cpu"))
    text = np.random.default_rng(1).integers(0, 100, 600)
    capacities = set()
    for start in range(0, 600, 100):
        got, wanted = (
            prefill(each, 1, text[start : start + 100], rows=2).logits for each in (decoder, exact)
        )
        same(got, wanted)
        capacities.add(decoder._cache.capacity)
    assert len(capacities) == 3


def test_stages_and_head_say_what_the_whole_model_says(tmp_path):
    whole = tiny_artifact(tmp_path / "whole", layers=3)
    split_artifact(whole.path, tmp_path / "cut", stages=3)
    staged = Staged(tmp_path / "cut", whole, slots=2, provider="cuda")
    exact = Decoder(whole, slots=2, provider="cpu")
    for passes in (
        [Pass(0, TOKENS[:30], 2), Pass(1, TOKENS[:7])],
        [Pass(1, TOKENS[7:12], parents=np.array([-1, -1, 0, 1, 1]))],
    ):
        for got, wanted in zip(staged.forward(passes), exact.forward(passes), strict=True):
            same(got.logits, wanted.logits)


def test_a_fork_may_drop_its_parents_decoder_and_go_on_without_a_gpu(tmp_path):
    artifact = tiny_artifact(tmp_path / "a", dialect="opset24")
    decoder = Decoder(artifact, provider="cuda")
    wanted = decoder.forward([Pass(0, TOKENS)])[0].logits.copy()
    child = os.fork()
    if not child:
        signal.alarm(60)
        code = 1
        try:
            del decoder
            gc.collect()
            other = Decoder(artifact)
            assert other.provider == "cpu"
            same(other.forward([Pass(0, TOKENS)])[0].logits, wanted)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.isfinite(decoder.forward([Pass(0, TOKENS[:4])])[0].logits).all()


def test_a_gpu_says_its_name_and_capability():
    gpu = Cuda().describe()
    assert gpu.name
    major, minor = gpu.compute.split(".")
    assert int(major) >= 5
    assert int(minor) >= 0
