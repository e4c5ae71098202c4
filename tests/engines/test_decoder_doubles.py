"""The decoder's own tests through the code for GPUs: over doubles, for no GPU was at hand."""

import gc
import os
import signal
import weakref
from pathlib import Path

import numpy as np
import pytest

from pilotfish.engines.backends import Load
from pilotfish.engines.engine_errors import ProviderError
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.engines.tensorrt.profiles import Profile, Profiles
from tests.engines.engine_tests import *  # noqa: F403  # collects these tests for the fixture `decoder` below
from tests.engines.test_decoder import (  # noqa: F401  # collected with this fixture, too
    SLOTS,
    empty,
    same,
    test_senseless_passes_are_refused,
)
from tests.support.opening import DOUBLES, opening
from tests.support.prefill import prefill
from tests.support.runnable import needs
from tests.support.thinned import thinned
from tests.support.tiny import tiny_artifact

QUICK = {"tensorrt-8.6-opset17", "tensorrt-10.16-opset24", "tensorrt-ep-opset17", "cuda-opset24"}


@pytest.fixture(scope="module", params=thinned(DOUBLES, QUICK))
def opened(request, tmp_path_factory):
    with opening(request.param, tmp_path_factory.mktemp("double"), slots=SLOTS) as decoder:
        yield decoder


@pytest.fixture
def decoder(opened):
    empty(opened)
    return opened


@pytest.mark.parametrize("name", ["tensorrt-10.16-opset24", "tensorrt-ep-opset17", "cuda-opset24"])
def test_a_fork_destroys_nothing_of_the_gpu(tmp_path, name):
    with opening(name, tmp_path, slots=1) as decoder:
        decoder.forward([Pass(0, np.arange(3))])
        backend, binding = decoder._backend, decoder._bindings[0, 1]
        direct = name.startswith("tensorrt-1")
        users = [weakref.ref(x) for x in ((backend,) if direct else (backend._session, binding))]
        del backend, binding
        library, freed = decoder._backend._cuda._library, []
        for function in ("cudaFree", "cudaFreeHost", "cudaStreamDestroy"):
            original = getattr(library, function)
            setattr(library, function, lambda x, f=original: freed.append(x) or f(x))
        child = os.fork()
        if not child:
            signal.alarm(20)
            code = 1
            try:
                del decoder
                gc.collect()
                code = 2 * bool(freed) + 4 * any(user() is None for user in users)
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        del decoder
        gc.collect()
        assert all(user() is None for user in users)
        assert freed


@pytest.mark.parametrize("name", ["tensorrt-10.3-opset17", "tensorrt-ep-opset17", "cuda-opset17"])
def test_a_longer_text_grows_the_cache_and_keeps_what_it_holds(tmp_path, name):
    text = np.random.default_rng(1).integers(0, 100, 600)
    with opening(name, tmp_path, slots=2, context=640) as decoder:
        exact = Decoder(decoder.artifact, slots=2, provider="cpu")
        capacities = set()
        for start in range(0, 600, 100):
            got, wanted = (
                prefill(each, 1, text[start : start + 100], rows=2).logits
                for each in (decoder, exact)
            )
            same(got, wanted)
            capacities.add(decoder._cache.capacity)
        assert len(capacities) == 3


def test_a_tree_that_is_too_wide_is_cut_wherever_it_began(tmp_path):
    parents = np.arange(170) // 2 - 1
    nodes = np.random.default_rng(2).integers(0, 100, 170)
    with opening("tensorrt-10.3-opset17", tmp_path, slots=2) as decoder:
        exact = Decoder(decoder.artifact, slots=2, provider="cpu")
        for each in (decoder, exact):
            prefill(each, 1, nodes[:7], rows=0)
            each.forward([Pass(1, nodes[:10], 0, parents[:10])])
        got, wanted = (
            each.forward([Pass(1, nodes[10:], 150, parents)])[0].logits for each in (decoder, exact)
        )
        same(got, wanted)
        for each in (decoder, exact):
            each.keep_path(1, [1, 5, 12, 27, 57, 117])
        follow = Pass(1, np.array([3, 4]))
        same(decoder.forward([follow])[0].logits, exact.forward([follow])[0].logits)


@pytest.mark.parametrize(
    ("name", "dialect"), [("cuda-opset17", "opset24"), ("tensorrt-ep-opset17", "opset17")]
)
def test_contrib_is_refused_before_a_gpu_is_touched(tmp_path, name, dialect):
    """ONNX Runtime computes its attention on the CPU, beside keys and values on the GPU."""
    with opening(name, tmp_path, slots=1) as decoder:
        contrib = tiny_artifact(tmp_path / "contrib", dialect="contrib")
        provider = decoder.provider
        with pytest.raises(ProviderError, match=f"contrib.*--dialect {dialect}"):
            Decoder(contrib, provider=provider)


@pytest.mark.parametrize("precision", ["int8", "int4", "stored"])
def test_onnxruntimes_tensorrt_takes_quantised_weights_in_nvidias_form_alone(tmp_path, precision):
    needs("tensorrt")
    with opening("tensorrt-ep-opset17", tmp_path, slots=1) as decoder:
        assert decoder._backend.options(Load(decoder.artifact, 1, 64))["trt_int8_enable"] == "0"
        wanted, provider = f"--dialect tensorrt --precision {precision}$", decoder.provider
        for dialect in ("opset24", "contrib"):
            refused = tiny_artifact(tmp_path / dialect, dialect=dialect, precision=precision)
            with pytest.raises(ProviderError, match=wanted):
                Decoder(refused, provider=provider)
        taken = tiny_artifact(tmp_path / "taken", dialect="tensorrt", precision=precision)
        opened = Decoder(taken, context=64, provider=provider)
        assert opened._backend.options(Load(taken, 1, 64))["trt_int8_enable"] == "1"
        got, want = (
            prefill(each, 0, np.arange(20), rows=4).logits
            for each in (opened, Decoder(taken, context=64, provider="cpu"))
        )
        np.testing.assert_allclose(got, want, atol=1e-4)


def test_onnxruntimes_tensorrt_is_told_a_profile_for_every_input(tmp_path):
    """Shapes outside it would have it build its engine again."""
    with opening("tensorrt-ep-opset17", tmp_path, slots=3) as decoder:
        backend = decoder._backend
        load = Load(decoder.artifact, 3, decoder.context)
        options = backend.options(load)
        inputs = {item.name for item in backend._session.get_inputs()}
        profiles = Profiles.for_slots(decoder.artifact.manifest, 3, decoder.context)
        shapes = {}
        for kind in ("min", "opt", "max"):
            listed = options[f"trt_profile_{kind}_shapes"].split(",")
            pairs = [entry.split(":") for entry in listed]
            shapes[kind] = {name: tuple(map(int, size.split("x"))) for name, size in pairs}
        assert shapes["min"].keys() == shapes["opt"].keys() == shapes["max"].keys() == inputs
        whole = Profile("all", shapes["min"], shapes["opt"], shapes["max"])
        for profile in profiles.all:
            assert whole.holds(profile.minimum)
            assert whole.holds(profile.maximum)
        assert (tmp_path / "cache") in Path(options["trt_engine_cache_path"]).parents
