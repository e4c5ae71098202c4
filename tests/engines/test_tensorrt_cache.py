"""Cached engines: their keys, when one is built, and damaged, foreign or half-written ones.

TensorRT and CUDA are doubles here (`tests.support.tensorrt_double`): none of this ran on a GPU.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time

import msgspec
import numpy as np
import pytest

from pilotfish.cli import main
from pilotfish.engines.cache import cache_directory
from pilotfish.engines.cudart import Cuda
from pilotfish.engines.engine_errors import BuildError, ProviderError
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.engines.tensorrt.build import EngineRequest
from pilotfish.engines.tensorrt.cache import EngineCache
from pilotfish.engines.tensorrt.loading import ensure_engine
from tests.support import cudart_double, tensorrt_double
from tests.support.prefill import prefill
from tests.support.runnable import needs
from tests.support.tiny import tiny_artifact


@pytest.fixture
def artifact(tmp_path, monkeypatch):
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    return tiny_artifact(tmp_path / "artifact", dialect="opset17")


def files():
    return sorted(cache_directory().glob("engines/*/*.engine"))


def order(artifact, slots=1, context=None):
    return EngineRequest.for_this_machine(Cuda(), artifact, slots, context)


def test_an_engine_is_built_once_and_then_taken_by_all_that_it_will_do_for(artifact, monkeypatch):
    trt, _ = tensorrt_double.install(monkeypatch)
    Decoder(artifact, slots=3, context=128, provider="tensorrt")
    Decoder(artifact, slots=3, context=128, provider="tensorrt")
    Decoder(artifact, slots=2, context=100, provider="tensorrt")
    assert trt.double.builds == 1
    Decoder(artifact, slots=4, context=128, provider="tensorrt")
    Decoder(artifact, slots=3, context=129, provider="tensorrt")
    assert trt.double.builds == len(files()) == 3


def test_a_decoder_without_a_context_takes_that_of_the_engine(artifact, monkeypatch):
    trt, _ = tensorrt_double.install(monkeypatch)
    ensure_engine(order(artifact, context=96))
    assert Decoder(artifact).context == 96
    ensure_engine(order(artifact, context=160))
    assert Decoder(artifact, provider="tensorrt").context == 160
    assert trt.double.builds == 2


def test_auto_builds_nothing_and_says_how(artifact, monkeypatch, caplog):
    trt, _ = tensorrt_double.install(monkeypatch)
    with caplog.at_level(logging.INFO, logger="pilotfish.engines"):
        assert Decoder(artifact).provider == "cpu"
    assert f"pilotfish export engine {artifact.path}" in caplog.text
    assert trt.double.builds == 0
    ensure_engine(order(artifact))
    assert Decoder(artifact).provider == "tensorrt"


def test_every_ingredient_of_the_key_makes_another_engine(artifact, monkeypatch):
    tensorrt_double.install(monkeypatch)
    key = order(artifact).key
    others = {"slots": 2, "context": 17} | dict.fromkeys(
        ["provider", "tensorrt", "gpu", "artifact", "dialect", "precision", "profiles"], "other"
    )
    others["compute"] = "1.2"
    assert others.keys() == set(key.__struct_fields__)
    cache = EngineCache()
    cache.write(key, b"plan")
    names = {key.name}
    for field, value in others.items():
        other = msgspec.structs.replace(key, **{field: value})
        names.add(other.name)
        assert cache.read(other) is None
    assert len(names) == 1 + len(others)
    assert cache.read(key) == b"plan"


def test_slots_and_context_show_in_the_profiles(artifact, monkeypatch):
    tensorrt_double.install(monkeypatch)
    orders = [order(artifact, slots, context) for slots in (1, 2) for context in (100, 200)]
    assert len({each.key.profiles for each in orders}) == 4


def test_another_version_or_gpu_has_engines_of_its_own(artifact, monkeypatch):
    for version, gpu in [("10.3.0", "Orin"), ("10.16.2", "Orin"), ("10.16.2", "Thor")]:
        with monkeypatch.context() as patch:
            double = cudart_double.Gpu(gpu)
            trt, _ = tensorrt_double.install(patch, version, gpu=double)
            Decoder(artifact, provider="tensorrt")
            assert trt.double.builds == 1
    assert len(files()) == 3


def spoil(path, how):
    data = path.read_bytes()
    plan = data.index(b"\n") + 1
    if how == "truncated":
        path.write_bytes(data[:-100])
    elif how == "one bit":
        path.write_bytes(data[:-50] + bytes([data[-50] ^ 1]) + data[-49:])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "foreign":
        path.write_bytes(data[:plan].replace(b'"Orin"', b'"Thor"') + data[plan:])
    elif how == "not ours":
        path.write_bytes(b"ftrt" + os.urandom(4096))


@pytest.mark.parametrize("how", ["truncated", "one bit", "empty", "foreign", "not ours"])
def test_a_damaged_or_foreign_file_is_built_again(artifact, monkeypatch, how):
    trt, _ = tensorrt_double.install(monkeypatch)
    built, new = ensure_engine(order(artifact))
    assert new
    assert not ensure_engine(order(artifact))[1]
    spoil(built.path, how)
    assert Decoder(artifact).provider == "cpu"  # auto does not build
    assert ensure_engine(order(artifact))[1]
    assert trt.double.builds == 2
    assert Decoder(artifact).provider == "tensorrt"


def test_a_plan_that_tensorrt_refuses_is_built_again(artifact, monkeypatch, caplog):
    """A null deserialisation: the file is what we wrote, but the driver or library moved on."""
    trt, _ = tensorrt_double.install(monkeypatch)
    EngineCache().write(order(artifact).key, b"a plan of yesterday")
    decoder = Decoder(artifact, provider="tensorrt")
    assert "refuses" in caplog.text
    assert trt.double.builds == 1
    assert np.isfinite(decoder.forward([Pass(0, np.arange(5))])[0].logits).all()


def test_what_cannot_be_read_back_is_an_error_not_a_loop(artifact, monkeypatch):
    trt, _ = tensorrt_double.install(monkeypatch, refuse_plans=True)
    with pytest.raises(BuildError, match=r"cannot load it again: the plan is not valid$"):
        ensure_engine(order(artifact))
    assert trt.double.builds == 1


def test_a_failed_build_leaves_nothing(artifact, monkeypatch):
    tensorrt_double.install(monkeypatch, fail_build=True)
    with pytest.raises(BuildError, match="built no engine"):
        ensure_engine(order(artifact))
    assert files() == []


def test_two_at_once_build_once(artifact, monkeypatch):
    trt, _ = tensorrt_double.install(monkeypatch, on_build=lambda: time.sleep(0.3))
    wanted = order(artifact)
    outcomes = []
    threads = [
        threading.Thread(target=lambda: outcomes.append(ensure_engine(wanted)[1])) for _ in "12"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [False, True]
    assert trt.double.builds == 1


def test_ctrl_c_ends_a_build(artifact, monkeypatch):
    begun, let_go, built = threading.Event(), threading.Event(), []

    def on_build():
        begun.set()
        let_go.wait(60)
        built.append(True)

    tensorrt_double.install(monkeypatch, "8.6.1", on_build=on_build)

    def interrupt():
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        ensure_engine(order(artifact))
    assert built == []  # it was not waited for
    assert files() == []
    let_go.set()


KILLED = """
import os, sys, time
from pathlib import Path
from pilotfish.engines.cache import replace_file
def hang(descriptor):
    print("writing", flush=True)
    time.sleep(60)
os.fsync = hang
replace_file(Path(sys.argv[1]), b"new" * 100_000)
"""


def test_a_kill_in_the_middle_of_writing_leaves_the_old_one(artifact, monkeypatch):
    tensorrt_double.install(monkeypatch)
    cache, key = EngineCache(), order(artifact).key
    path = cache.write(key, b"old")
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "writing\n"
    child.kill()
    child.wait()
    child.stdout.close()
    assert cache.read(key) == b"old"
    assert len(list(path.parent.iterdir())) == 2  # what the killed one left
    cache.write(key, b"newer")
    assert cache.read(key) == b"newer"
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_measured_kernels_are_kept_for_the_next_build(artifact, monkeypatch):
    trt, _ = tensorrt_double.install(monkeypatch)
    for slots in (1, 2, 3):
        ensure_engine(order(artifact, slots))
    assert trt.double.seen_timing == [b"", b"+", b"++"]
    EngineCache().timing(order(artifact).key).write_bytes(b"garbage")
    ensure_engine(order(artifact, 4))
    assert trt.double.seen_timing[-1] == b""


@pytest.mark.parametrize("version", ["8.6.1", "10.3.0"])
def test_progress_is_told_where_there_is_any(artifact, monkeypatch, version):
    tensorrt_double.install(monkeypatch, version)
    received = []
    ensure_engine(order(artifact), lambda *progress: received.append(progress))
    if version == "8.6.1":
        assert received == [("building the engine", 0, None)]
    else:
        assert received == [("Building", done, 3) for done in (1, 2, 3, 3)]


@pytest.mark.parametrize(
    ("version", "dialect", "advice"),
    [
        ("10.16.2", "contrib", "contrib.*--dialect opset17 --precision fp32"),
        ("10.14.1", "opset24", "10.14.1 does not support the dialect opset24.*--dialect opset17"),
        ("8.6.1", "opset24", "opset24"),
    ],
)
def test_a_dialect_that_this_tensorrt_cannot_read(tmp_path, monkeypatch, version, dialect, advice):
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    artifact = tiny_artifact(tmp_path / "a", dialect=dialect)
    tensorrt_double.install(monkeypatch, version)
    with pytest.raises(BuildError, match=advice):
        ensure_engine(order(artifact))
    with pytest.raises(ProviderError, match=r"tensorrt: .*opset17"):
        Decoder(artifact, provider="tensorrt")


@pytest.mark.parametrize("precision", ["int8", "int4", "stored"])
def test_quantised_weights_need_the_dialect_tensorrt(tmp_path, monkeypatch, precision):
    needs("tensorrt")
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    tensorrt_double.install(monkeypatch, "10.16.2")
    refused = tiny_artifact(tmp_path / "a", dialect="opset24", precision=precision)
    with pytest.raises(BuildError, match=f"--dialect tensorrt --precision {precision}$"):
        ensure_engine(order(refused))
    other = tiny_artifact(tmp_path / "c", dialect="contrib", precision=precision)
    with pytest.raises(BuildError, match=f"fp16, or --dialect tensorrt --precision {precision}$"):
        ensure_engine(order(other))
    artifact = tiny_artifact(tmp_path / "b", dialect="tensorrt", precision=precision)
    logits = [
        prefill(Decoder(artifact, context=64, provider=provider), 0, np.arange(20), rows=4).logits
        for provider in ("tensorrt", "cpu")
    ]
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)


def test_a_graph_that_the_parser_cannot_read(artifact, monkeypatch):
    tensorrt_double.install(monkeypatch)
    artifact.graph_path.write_bytes(b"\xff\xff no graph")
    with pytest.raises(BuildError, match=r"cannot read .*model\.onnx"):
        ensure_engine(order(artifact))


def test_the_command_builds_once_for_each_artifact(tmp_path, artifact, monkeypatch, capsys):
    needs("opset24")
    trt, _ = tensorrt_double.install(monkeypatch)
    other = tiny_artifact(tmp_path / "other", dialect="opset24", precision="fp16")
    command = ["export", "engine", str(artifact.path), str(other.path), "--context", "128"]
    assert main([*command, "--json", "-"]) == 0
    decoded = msgspec.json.decode(capsys.readouterr().out)
    assert [entry["built"] for entry in decoded] == [True, True]
    assert [entry["precision"] for entry in decoded] == ["fp32", "fp16"]
    assert (
        decoded[0] | {"tensorrt": "10.16", "gpu": "Orin", "compute": "8.7", "slots": 1}
        == decoded[0]
    )
    assert main(command) == 0
    assert capsys.readouterr().out.split() == [entry["engine"] for entry in decoded]
    assert trt.double.builds == 2
    for folder in (artifact, other):
        assert Decoder(folder).provider == "tensorrt"


def test_the_command_builds_what_a_device_service_will_want(tmp_path, artifact, monkeypatch):
    trt, _ = tensorrt_double.install(monkeypatch)
    config = tmp_path / "device.toml"
    config.write_text(f'draft = "{artifact.path}"\nedge = "tcp://127.0.0.1:7077"\nlanes = 3\n')
    assert main(["export", "engine", "--config", str(config)]) == 0
    assert Decoder(artifact, slots=3).provider == "tensorrt"
    assert trt.double.builds == 1
    config.write_text("lanes = 3")
    assert main(["export", "engine", "--config", str(config)]) == 78
    with pytest.raises(SystemExit, match="2"):
        main(["export", "engine"])


def test_the_command_says_what_is_missing(tmp_path, artifact, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    command = ["export", "engine", str(artifact.path)]
    assert main(command) == 69
    assert "apt install python3-libnvinfer" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        tensorrt_double.install(patch, gpu=cudart_double.Gpu(devices=0))
        assert main(command) == 69
        assert "no CUDA-capable device" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        tensorrt_double.install(patch)
        contrib = tiny_artifact(tmp_path / "contrib", dialect="contrib")
        assert main(["export", "engine", str(contrib.path)]) == 65
        assert capsys.readouterr().err.count("\n") == 1
    assert main(["export", "engine", str(tmp_path)]) == 66
