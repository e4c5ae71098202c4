"""A clock that a test sets, in place of the module `time`."""


class SetClock:
    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def monotonic(self) -> float:
        return self.now_s
