"""Huge pages of memory for a model's weights on the CPU.

A pass reads each weight once. In ordinary pages of 4 KiB the processor has to find thousands of
page addresses per pass, and its prefetching ends at each page; in huge pages (2 MiB on most
machines) a pass takes 10 to 15 % less time (docs/engines.md). The runtime's allocator takes
ordinary pages, so the kernel is asked to move the memory after the weights are loaded. No content
changes, and no memory is added, since only ranges without a gap are moved.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger("pilotfish.engines")

SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
MAPS = Path("/proc/self/maps")
# Advice of Linux's madvise(2). The first moves a range at once (Linux 6.1 on); with the second, the
# kernel does so in the background, within minutes.
COLLAPSE, HUGE_PAGE = 25, 14
HEAP = "[heap]"


def use_huge_pages() -> int:
    """Move this process's private memory into huge pages, where whole huge pages are resident.

    Return the number of bytes that are in huge pages then, or will be soon; 0 if the system has no
    huge pages, or if its administrator turned them off.
    """
    size = huge_page_size()
    if not size:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    advice, moved = COLLAPSE, 0
    for start in _resident_pages(libc, size):
        failed = _advise(libc, start, size, advice)
        if failed == errno.EINVAL and advice == COLLAPSE:  # an older kernel
            advice = HUGE_PAGE
            failed = _advise(libc, start, size, advice)
        if failed == errno.ENOMEM:  # no huge page is free
            break
        moved += 0 if failed else size
    log.debug("%d MiB of memory in huge pages", moved >> 20)
    return moved


def huge_page_size() -> int:
    """Return the size (bytes) of a huge page; 0 if there are none, or if they are turned off."""
    try:
        allowed = "[never]" not in (SETTINGS / "enabled").read_text()
        return int((SETTINGS / "hpage_pmd_size").read_text()) if allowed else 0
    except (OSError, ValueError):
        return 0


def _advise(libc: ctypes.CDLL, start: int, size: int, advice: int) -> int:
    """Call madvise(2); return 0 or the error's number."""
    failed = libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)
    return ctypes.get_errno() if failed else 0


def _resident_pages(libc: ctypes.CDLL, size: int) -> Iterator[int]:
    """Yield the addresses of the huge pages whose ordinary pages are all resident."""
    for start, end in _private_ranges():
        first, last = -(-start // size) * size, end // size * size
        if first >= last:
            continue
        states = ctypes.create_string_buffer((last - first) // mmap.PAGESIZE)
        if libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(last - first), states):
            continue  # another thread has returned this memory meanwhile
        resident, count = states.raw, size // mmap.PAGESIZE  # a byte for each page: 1 or 0
        for index in range(0, len(resident), count):
            if resident.count(1, index, index + count) == count:
                yield first + index * mmap.PAGESIZE


def _private_ranges() -> list[tuple[int, int]]:
    """Return the ranges of addresses (start, end) of private, writable memory without a file."""
    ranges = []
    for line in MAPS.read_text().splitlines():
        addresses, permissions, _, _, _, *name = line.split(maxsplit=5)
        if permissions == "rw-p" and name in ([], [HEAP]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            ranges.append((start, end))
    return ranges
