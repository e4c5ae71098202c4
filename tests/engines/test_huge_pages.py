"""The memory of weights in huge pages: what is moved keeps its content, and gaps stay gaps."""

import mmap
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pilotfish.engines import huge_pages, runtime
from pilotfish.engines.huge_pages import huge_page_size, use_huge_pages

SIZE = huge_page_size()
PAGES = 8  # huge pages per mapping


def mapping(filled):
    """Return new private memory (u8), of which the first `filled` huge pages are in use."""
    area = mmap.mmap(-1, PAGES * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(area, np.uint8)
    count = int(filled * SIZE)
    array[:count] = np.random.default_rng(0).integers(0, 256, count, np.uint8)
    area.madvise(mmap.MADV_HUGEPAGE)
    return array


def sizes(address):
    """Return the bytes of the mapping at this address: resident, and in huge pages."""
    text = Path("/proc/self/smaps").read_text()
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        start, end = (int(place, 16) for place in part.split(maxsplit=1)[0].split("-"))
        if start <= address < end:
            fields = dict(re.findall(r"^(Rss|AnonHugePages): +(\d+) kB", part, re.MULTILINE))
            return int(fields["Rss"]) << 10, int(fields["AnonHugePages"]) << 10
    raise AssertionError("no such mapping")


@pytest.fixture
def huge():
    """Skip unless this kernel moves memory at once, and has huge pages left."""
    if not SIZE or SIZE > 1 << 24:
        pytest.skip("this system has no huge pages, or very large ones")
    array = mapping(PAGES)
    libc = huge_pages.ctypes.CDLL(None, use_errno=True)
    start = -(-array.ctypes.data // SIZE) * SIZE
    if huge_pages._advise(libc, start, SIZE, huge_pages.COLLAPSE):
        pytest.skip("this kernel does not move memory on request")


def test_memory_in_use_is_moved_and_keeps_its_content(huge):
    array = mapping(PAGES)
    wanted = array.copy()
    moved = use_huge_pages()
    assert sizes(array.ctypes.data)[1] >= (PAGES - 1) * SIZE  # its ends may not be aligned
    assert moved >= (PAGES - 1) * SIZE
    np.testing.assert_array_equal(array, wanted)
    assert use_huge_pages() >= (PAGES - 1) * SIZE  # again: nothing to do


def test_memory_that_is_not_in_use_stays_so(huge):
    array = mapping(2.5)
    before, _ = sizes(array.ctypes.data)
    use_huge_pages()
    after, in_huge_pages = sizes(array.ctypes.data)
    assert after == before
    assert in_huge_pages <= 2 * SIZE


def test_who_turned_huge_pages_off_gets_none(tmp_path, monkeypatch):
    (tmp_path / "hpage_pmd_size").write_text("2097152\n")
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    monkeypatch.setattr(huge_pages, "SETTINGS", tmp_path)
    assert (huge_page_size(), use_huge_pages()) == (0, 0)
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert huge_page_size() == 2 << 20
    monkeypatch.setattr(huge_pages, "SETTINGS", tmp_path / "missing")
    assert (huge_page_size(), use_huge_pages()) == (0, 0)


@pytest.mark.parametrize("width", [4096, 64])
def test_large_sessions_are_moved_and_small_ones_are_not(huge, tmp_path, monkeypatch, width):
    """A product with a weight of 64 MiB, or of 16 KiB."""
    weight = np.random.default_rng(1).standard_normal((width, width), np.float32)
    node = helper.make_node("Gemm", ["x", "w"], ["y"])
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["T", width]) for n in "xy")
    graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(weight, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "model.onnx")
    del model, graph
    moved = []
    monkeypatch.setattr(runtime, "use_huge_pages", lambda: moved.append(use_huge_pages()))
    session = runtime.open_session(tmp_path / "model.onnx", 1, runtime.CPU)
    assert [bool(size >= 32 << 20) for size in moved] == [True] * (width == 4096)
    vector = np.eye(1, width, dtype=np.float32)
    np.testing.assert_allclose(session.run(None, {"x": vector})[0], weight[:1], rtol=1e-6)
