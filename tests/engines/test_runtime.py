"""Which runtime and provider an engine gets, what is said about it, and that it stops spinning."""

import gc
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest

from pilotfish.engines.backends import AUTO, PROVIDERS
from pilotfish.engines.backends.cpu import CpuBackend
from pilotfish.engines.engine_errors import ProviderError
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.engines.runtime import CUDA, WHEELS, _load_cuda, open_session, runtime_version
from tests.support.runnable import hide_gpus
from tests.support.tiny import tiny_artifact

ROOT = Path(__file__).parents[2]


def installed_beside(folder, wheel):
    """Make `wheel` look installed in `folder`, as pip would."""
    info = folder / f"{wheel.replace('-', '_')}-1.31.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {wheel}\nVersion: 1.31.0\n")


def test_the_choice_and_the_reason_are_logged(tmp_path, caplog, monkeypatch):
    hide_gpus(monkeypatch)
    artifact = tiny_artifact(tmp_path / "a")
    with caplog.at_level(logging.INFO, logger="pilotfish.engines"):
        assert Decoder(artifact).provider == "cpu"
    chosen = caplog.messages[-1]
    assert "cpu" in chosen
    assert "cuda" in chosen  # what it fell back from, and why
    assert "built without" in chosen


def test_providers_are_tried_from_the_best_to_the_last(tmp_path, caplog, monkeypatch):
    """On a machine without a GPU; each says in one line why not, and what to do."""
    hide_gpus(monkeypatch)
    artifact = tiny_artifact(tmp_path / "a")
    with caplog.at_level(logging.INFO, logger="pilotfish.engines"):
        Decoder(artifact)
    tried = [message.split()[1].rstrip(":") for message in caplog.messages]
    assert tried == list(AUTO)
    assert "pilotfish export engine" in caplog.messages[0]
    assert all("\n" not in message for message in caplog.messages)
    for name in PROVIDERS:
        if name != "cpu":
            with pytest.raises(ProviderError, match=f"{name}: "):
                Decoder(artifact, provider=name)


def test_a_backend_that_does_not_compute_is_passed_over(tmp_path, monkeypatch, caplog):
    """What a provider says of itself does not count: only a run does."""
    monkeypatch.setitem(PROVIDERS, "cuda", f"{__name__}:Silent")
    with caplog.at_level(logging.INFO, logger="pilotfish.engines"):
        assert Decoder(tiny_artifact(tmp_path / "a")).provider == "cpu"
    assert "cuda: the provider ran the model, but the logits contain NaN" in caplog.messages[-1]


class Silent(CpuBackend):
    """Takes a pass and answers nothing."""

    def bind(self, first, count):
        binding = super().bind(first, count)
        binding.run = lambda *answers: None
        return binding


def test_both_wheels_are_refused(tmp_path, monkeypatch):
    runtime_version()
    for wheel in WHEELS:
        installed_beside(tmp_path, wheel)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ProviderError, match="both installed"):
        runtime_version()


def test_no_wheel_is_refused():
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from pilotfish.engines.engine_errors import ProviderError\n"
        "from pilotfish.engines.runtime import runtime_version\n"
        "try:\n    runtime_version()\n"
        "except ProviderError as error:\n    print(error)\n"
    )
    bare = [sys.executable, "-I", "-S", "-c", code]  # without installed packages
    done = subprocess.run(bare, capture_output=True, text=True, check=True)
    assert "pip install" in done.stdout


def test_workers_stop_spinning_soon_after_a_pass(tmp_path):
    """By default they would spin for 40 ms, on cores that another engine may need."""
    wide = {"hidden": 256, "intermediate": 1024, "heads": 4, "head_dim": 64}
    decoder = Decoder(tiny_artifact(tmp_path / "a", **wide), threads=2)
    burnt = []
    for _ in range(5):
        decoder.forward([Pass(slot=0, tokens=np.arange(16))])
        begin = time.process_time()
        time.sleep(0.1)
        burnt.append(time.process_time() - begin)
    assert np.median(burnt) < 0.015


def test_a_fork_may_drop_its_parents_session_and_open_its_own(tmp_path):
    """The session's threads are not in the fork, which must not wait for them."""
    artifact = tiny_artifact(tmp_path / "a")
    decoder = Decoder(artifact, provider="cpu", threads=2)
    wanted = decoder.forward([Pass(0, np.arange(5))])[0].logits.copy()
    child = os.fork()
    if not child:
        signal.alarm(20)
        code = 1
        try:
            del decoder
            gc.collect()
            other = Decoder(artifact, provider="cpu", threads=2)
            assert np.array_equal(other.forward([Pass(0, np.arange(5))])[0].logits, wanted)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_gpus_products_of_float32_are_of_float32(tmp_path, monkeypatch):
    """CUDA's provider would take TF32: logits of one token would change with the pass's width."""
    opened = []
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, "Tensor"])
    monkeypatch.setattr(
        onnxruntime,
        "InferenceSession",
        lambda *_, providers, **__: opened.append(providers) or 1 / 0,
    )
    for provider, others in ((CUDA, ()), ("Tensor", (CUDA,))):
        with pytest.raises(ZeroDivisionError):
            open_session(tmp_path, 1, provider, {"own": "1"}, others)
    assert opened == [
        [(CUDA, {"use_tf32": "0", "own": "1"})],
        [("Tensor", {"own": "1"}), (CUDA, {"use_tf32": "0"})],
    ]


def test_what_cuda_lacks_is_named(tmp_path, monkeypatch, capsys):
    """ONNX Runtime prints it, and silently takes the CPU."""
    _load_cuda.cache_clear()
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA])
    monkeypatch.setattr(
        onnxruntime, "preload_dlls", lambda: print("Failed to load libcublas.so"), raising=False
    )
    session = SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *_, **__: session)
    with pytest.raises(ProviderError, match=r"libcublas\.so"):
        open_session(tmp_path, 1, CUDA)
    assert not capsys.readouterr().out
    _load_cuda.cache_clear()
