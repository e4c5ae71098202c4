"""Fair shares of the target's time for all owners.

In:  the owners that wait, and the duration of each pass with its tokens by owner.
Out: the order in which the owners are served.

The next pass serves the owner that has used the least time; among owners with equal times, it
serves the owner that was served longest ago. An owner without jobs does not save up time. A pass's
time, with its verification, is charged to its owners in proportion to their tokens.
"""

from collections.abc import Iterable, Sequence

_OWNERS = 1024  # upper limit of owners with recorded times
_EQUAL_SHARE = 0.25  # share of the longest recent pass within which owners' used times are equal
_FADE = 0.99  # factor by which the longest recent pass's duration shrinks at each pass


class FairShares:
    """Record of the target time that each owner has used."""

    def __init__(self) -> None:
        self._served_ns: dict[bytes, int] = {}  # owner → start of its last pass, oldest first
        # owner → used target time. An owner that returns after a pause starts at ``_least_ns``, the
        # least used time of the owners that waited at the last pass.
        self._used_ns: dict[bytes, int] = {}
        self._least_ns = 0
        self._longest_ns = 0.0  # duration of the longest recent pass; decays

    def update_least(self, waiting: Iterable[bytes]) -> None:
        """Update the used time at which other owners start, from the owners that wait now."""
        used_ns = min((self._used_ns.get(owner, 0) for owner in waiting), default=0)
        self._least_ns = max(self._least_ns, used_ns)

    def priority(self, owner: bytes) -> tuple[int, int]:
        """Return an owner's sort key: its used time, and the start of its last pass."""
        used_ns = self._used_ns.get(owner, 0)
        if used_ns <= self._least_ns + _EQUAL_SHARE * self._longest_ns:
            used_ns = 0
        return used_ns, self._served_ns.get(owner, 0)

    def start_pass(self, owners: Iterable[bytes], now_ns: int) -> None:
        """Record the start of a pass that serves these owners."""
        for owner in owners:
            self._served_ns.pop(owner, None)
            self._served_ns[owner] = now_ns
            self._used_ns[owner] = max(self._used_ns.get(owner, 0), self._least_ns)
        while len(self._served_ns) > _OWNERS:
            longest_ago = next(iter(self._served_ns))
            del self._served_ns[longest_ago], self._used_ns[longest_ago]

    def charge(self, sizes: Sequence[tuple[bytes, int]], took_ns: int) -> None:
        """Charge the duration of a pass. sizes: owner and number of tokens of each job."""
        self._longest_ns = max(_FADE * self._longest_ns, took_ns)
        total = sum(size for _, size in sizes)
        for owner, size in sizes:
            if owner in self._used_ns:  # the record may have been dropped for a newer owner
                self._used_ns[owner] += took_ns * size // total
