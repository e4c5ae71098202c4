"""The state and the operations that all routes share."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar, cast
from weakref import WeakValueDictionary

from pilotfish.bridge import Prompt, PromptInput
from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.device_config import ServiceConfig
from pilotfish.device_runtime.link.connectivity import Connectivity, LinkStatus
from pilotfish.device_runtime.service.access import Access
from pilotfish.device_runtime.service.field_check import IGNORED_HEADER, IgnoredFields
from pilotfish.device_runtime.service.lanes import Lanes
from pilotfish.device_runtime.service.openai import CompletionRequest
from pilotfish.device_runtime.service.prompts import prompts_for
from pilotfish.device_runtime.service.refusal import Body, RefusalError
from pilotfish.device_runtime.service.responses_store import ResponseStore
from pilotfish.device_runtime.service.service_metrics import ServiceMetrics
from pilotfish.device_runtime.service.status import ServiceStatus, freshest
from pilotfish.engines.inspection import Inspection
from pilotfish.wire.link.state import LinkState
from pilotfish.wire.protocols import LOCAL, PROTOCOL_REGISTRY, STREAM
from pilotfish.wire.request import AUTO, Request

_log = logging.getLogger("pilotfish.service")

_LEAST_BODY_BYTES = 64 * 1024
_MOST_BODY_BYTES = 1 << 26  # limit of a body, for any context length
_BODY_BYTES_PER_TOKEN = 64  # a token has several characters, of up to six bytes each in JSON
_READERS = 2  # threads, each tokenising one prompt at a time
_STARTED_S = 5.0  # time for all readers' threads to start
_NOTED_FIELDS = 1024  # limit of ignored fields, of all clients, whose log lines are remembered
_Result = TypeVar("_Result")
STUCK_S = 180.0  # a lane without a sign of life for this time counts as hanging


class DeviceService:
    """The state that the routes share. Used on the serving loop only."""

    def __init__(
        self,
        config: ServiceConfig,
        lanes: Lanes,
        access: Access,
        metrics: ServiceMetrics,
        status: ServiceStatus,
        inspection: Inspection,
    ) -> None:
        self.config = config
        self.lanes = lanes
        self.access = access
        self.metrics = metrics
        self.status = status
        self.inspection = inspection
        self.responses = ResponseStore()
        self.started_s = int(time.time())
        self._noted: set[tuple[str, str]] = set()  # (client, ignored field) with a line in the log
        # by client: a lock that is held while a task of this client runs in a reader's thread
        self._reading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="reader")
        all_here = threading.Barrier(_READERS)
        for _ in range(_READERS):  # start all threads now: later the system may have none left
            self._readers.submit(all_here.wait, _STARTED_S)

    @property
    def device(self) -> Device:
        """A lane's device: one that has been greeted by the edge, if any, else the first."""
        devices = [lane.device for lane in self.lanes.lanes]
        return next((device for device in devices if device.welcome is not None), devices[0])

    @property
    def link_status(self) -> LinkStatus | None:
        """The state of the link; None without an edge."""
        for lane in self.lanes.lanes:
            _ = lane.device.link_up  # updates the state of a connection that no answer uses
        return self.lanes.lanes[0].device.link_status

    @property
    def link_state(self) -> LinkState | None:
        """The latest value of each reading, over all lanes' connections."""
        return freshest(lane.device.link_state() for lane in self.lanes.lanes)

    @property
    def protocols(self) -> list[Body]:
        """The protocols that a request may name; of an edge that was greeted, those it offers.

        window: whether a window can be set. lossless: whether the text follows the target's law.
        """
        if self.config.edge is None:
            return [{"name": LOCAL, "window": False, "lossless": False}]
        welcome = self.device.welcome
        offered = PROTOCOL_REGISTRY.values()
        described = [
            {"name": each.name, "window": not each.streams, "lossless": each.lossless}
            for each in offered
            if welcome is None or each.name in welcome.protocols
        ]
        return [
            {"name": AUTO, "window": True, "lossless": True},
            *described,
            {"name": STREAM, "window": False, "lossless": True},
            {"name": LOCAL, "window": False, "lossless": False},
        ]

    @property
    def defaults(self) -> Request:
        """The default options of requests."""
        return self.config.request

    @property
    def body_bytes(self) -> int:
        """The limit of a request's body, in bytes."""
        size = _BODY_BYTES_PER_TOKEN * self.context
        return min(max(_LEAST_BODY_BYTES, size), _MOST_BODY_BYTES)

    @property
    def context(self) -> int:
        """The limit of prompt and answer together, in tokens; another edge may allow fewer."""
        return self.device.context

    def stuck(self) -> list[int]:
        """List the lanes that hang."""
        return self.lanes.stuck(STUCK_S)

    def health(self) -> tuple[bool, Body]:
        """Return whether requests can be answered now, and a body with the reason.

        Without the edge, the service answers only under the policy `local`: the drafter then writes
        the answers. The body is public, so it does not contain the edge's address.
        """
        link = self.link_status
        edge_up = link is not None and link.state is Connectivity.CONNECTED
        state = "ok"
        if self.inspection.damage:
            state = "damaged"
        elif self.lanes.draining:
            state = "draining"
        elif self.stuck():
            state = "stuck"
        elif link is not None and not edge_up and self.config.on_link_loss != "local":
            state = link.state.value
        lanes = self.lanes
        return state == "ok", {
            "status": state,
            "edge_up": edge_up,
            "edge": link and {"state": link.state.value, "remedy": link.remedy or None},
            "lanes": {"all": len(lanes.lanes), "busy": lanes.running},
            "waiting": max(0, lanes.waiting),
        }

    async def read(self, client: str, completion: CompletionRequest) -> list[Prompt]:
        """Tokenise the prompts, in the edge's vocabulary if it is known."""
        work = partial(prompts_for, self.device, completion.prompts, chat=completion.chat)
        return await self.run_in_thread(client, work)

    async def run_in_thread(self, client: str, work: Callable[[], _Result]) -> _Result:
        """Run long work, such as tokenising, in a reader's thread.

        Only one task of each client runs at a time, so that clients take turns.
        """
        async with self._reading.setdefault(client, asyncio.Lock()):
            return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    def text_of(self, prompt: PromptInput) -> str:
        """Return a raw prompt's text; token ids are read in the last known edge's vocabulary."""
        if isinstance(prompt, str):
            return prompt
        return self.device.tokenizer.decode(cast("Sequence[int]", prompt), special=True)

    def tokens_in(self, text: str) -> int:
        """Count the tokens of an answer's text."""
        return len(self.device.tokenizer.encode(text))

    def new_ignored(self) -> IgnoredFields:
        """Make the collection of one request's unknown fields."""
        return IgnoredFields(strict=self.config.strict)

    def note_ignored(self, client: str, ignored: IgnoredFields) -> dict[str, str]:
        """Log a request's unknown fields, once for each client; return the answer's headers."""
        for place in ignored.places:
            if (client, place) not in self._noted and len(self._noted) < _NOTED_FIELDS:
                self._noted.add((client, place))
                _log.info("ignored the field %s of requests of %s", place, client)
        return {IGNORED_HEADER: str(ignored)} if ignored.places else {}

    def count_refusal(self, refusal: RefusalError) -> None:
        """Count a refusal."""
        self.metrics.count_refusal(refusal.reason)

    def close(self) -> None:
        """End the readers' threads."""
        self._readers.shutdown(wait=False, cancel_futures=True)
