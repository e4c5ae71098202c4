"""The edge of a watch: it may be away, refuse, restart, or serve another model.

In: an address and the target of the watch. Out: a device whose link answered a moment ago and whose
edge serves that target; otherwise a typed error that says why not.
"""

from collections.abc import Callable

from pilotfish.base.errors import EdgeUnreachableError, PairMismatchError, PilotfishError
from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.link.retry import AWAY, CancelToken
from pilotfish.device_runtime.record import Round
from pilotfish.drafting.text_drafter import TEXT
from pilotfish.lab.field.run_facts import Model
from pilotfish.lab.field.watch.watch_settings import WatchSettings

# Errors that tell that the edge cannot be used now. All other errors concern one answer.
UNUSABLE: tuple[type[PilotfishError], ...] = (*AWAY, EdgeUnreachableError)


class WatchedEdge:
    """Opens a device for the edge, and again after the edge has served another model.

    target: the target of earlier rounds; None: that of the first edge that answers. on_round,
    on_fetch: see `Device`.
    """

    def __init__(
        self,
        settings: WatchSettings,
        target: Model | None,
        *,
        on_round: Callable[[Round], None],
        on_fetch: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.target = target
        self.software = ""
        self._settings = settings
        self._on_round = on_round
        self._on_fetch = on_fetch
        self._device: Device | None = None
        self._cancel_token = CancelToken()

    def reach(self) -> Device:
        """Return a device whose edge has just answered a ping, and serves the target.

        The device is a new one after the edge has served another model.
        """
        device = self._device
        if device is None:
            device = self._device = self._open()
        try:
            device.probe()
            self.expect_target()
        except PairMismatchError:
            self.close()  # a new device takes the vocabulary that the edge has then
            raise
        return device

    def expect_target(self) -> None:
        """Raise `PairMismatchError` if the edge serves another model than the watch began with."""
        welcome = None if self._device is None else self._device.welcome
        if welcome is None:
            raise PairMismatchError(f"The edge at {self._settings.edge} serves another model now.")
        served = Model(welcome.model, digest=welcome.digest or None)
        if self.target is None:
            self.target, self.software = served, welcome.software
        elif served != self.target:
            raise PairMismatchError(
                f"The edge at {self._settings.edge} serves another model: {_named(served)}, not "
                f"{_named(self.target)}. Serve the first one again, or begin another watch with "
                "another --out."
            )

    @property
    def is_up(self) -> bool:
        """Whether there is a connection to the edge, as far as the device knows."""
        return self._device is not None and self._device.link_up

    @property
    def silent_s(self) -> float | None:
        """Seconds since the edge's last message came; None without a device."""
        if self._device is None:
            return None
        return self._device.measure(lambda link: link.silent_s)

    def interrupt(self) -> None:
        """End all waits for the edge, now and later, with `InterruptedGenerationError`.

        For any thread, at any time: also while a device opens, and between two calls.
        """
        self._cancel_token.end()

    def check(self) -> None:
        """Raise `InterruptedGenerationError` after `interrupt`."""
        self._cancel_token.check()

    def close(self) -> None:
        """Close the device."""
        device, self._device = self._device, None
        if device is not None:
            device.close()

    def _open(self) -> Device:
        settings = self._settings
        return Device(
            settings.draft,
            settings.edge,
            settings.keys,
            provider=settings.provider,
            threads=settings.threads,
            on_round=self._on_round,
            on_fetch=self._on_fetch,
            texts="off" if str(settings.draft) == TEXT else None,
            cancel_token=self._cancel_token,
        )


def _named(model: Model) -> str:
    return f"{model.name} ({model.digest})" if model.digest else model.name
