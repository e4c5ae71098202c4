"""The stages behind the first one, as one whole: attached together, or not at all.

In:  steps, with the states that stage 1 has made of them.
Out: the last stage's answers, in the order of the steps.

Law: what the stages hold belongs together. When one of them is lost, or has lost the next one, all
are attached anew, as another incarnation, and hold nothing.
"""

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import zmq

from pilotfish.edge_runtime.config import MEBIBYTE
from pilotfish.edge_runtime.targets.listed import Pipeline, lacks_room
from pilotfish.edge_runtime.targets.peer import NodeAddress, Peer
from pilotfish.edge_runtime.targets.target import Opening
from pilotfish.engines.stage import Stage
from pilotfish.wire.messages import Buffer
from pilotfish.wire.nodes import Attach, Item, Ready, Scored, Step


class Stages:
    """The nodes at their places, in their order; there may be none. Nothing here waits.

    stage: the first one, which says of which cut the others have to be, and how large.
    """

    def __init__(
        self, stage: Stage, pipeline: Pipeline, spots: Sequence[NodeAddress], opening: Opening
    ) -> None:
        self._stage = stage
        self._tally = opening.tally
        self._states = pipeline.states
        self._digests = [listed.digest for listed in pipeline.stage]
        limit = opening.config.limits.message_mib * MEBIBYTE
        self._peers: list[Peer] = []
        with ExitStack() as stack:
            stack.callback(self.close)
            for index, spot in enumerate(spots):
                unfit, note = partial(self._unfit, index), partial(self._note, index)
                self._peers.append(Peer(spot, opening.keys, limit, expect=unfit, happened=note))
            stack.pop_all()
        self._poller = zmq.Poller()
        self._peer_of = {source: peer for peer in self._peers for source in peer.sources}
        for source in self._peer_of:
            self._poller.register(source, zmq.POLLIN)
        self._asked: bytes | None = None  # as which all were asked to be attached
        # as which all of them are attached; None if they are not
        self.incarnation: bytes | None = None if spots else b""

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def names(self) -> list[str]:
        """The nodes' names."""
        return [peer.place.name for peer in self._peers]

    @property
    def nodes(self) -> dict[str, bool]:
        """The nodes by name, and whether each is attached. For any thread."""
        return {peer.place.name: peer.incarnation is not None for peer in self._peers}

    @property
    def received_bytes(self) -> dict[str, int]:
        """What each has said so far, by name."""
        return {peer.place.name: peer.received_bytes for peer in self._peers}

    @property
    def sources(self) -> "list[zmq.Socket[bytes] | int]":
        """Their connections."""
        return [source for peer in self._peers for source in peer.sources]

    @property
    def due_s(self) -> float | None:
        """Until one of them is to be asked again."""
        return min((due for peer in self._peers if (due := peer.due_s) is not None), default=None)

    @property
    def trouble(self) -> str:
        """Which are not attached, and why."""
        return ", ".join(filter(None, (peer.trouble for peer in self._peers)))

    def receive(self) -> list[tuple[Scored, list[Buffer]]]:
        """The answers that have come; and see to it that all are attached."""
        answers: list[tuple[Scored, list[Buffer]]] = []
        news = {self._peer_of[source] for source, _ in self._poller.poll(0)}
        for peer in self._peers:
            if peer in news or peer.due_s == 0.0:
                received = peer.receive()
                if peer is self._peers[-1]:
                    answers = received
        if self.incarnation is None:
            answers = []  # to what was sent before all were lost
        self._look_after()
        return answers

    def send(
        self, number: int, items: Sequence[Item], frames: Sequence[Buffer], spent_ns: int
    ) -> None:
        """Hand stage 1's states of a step, and its trees' parents, to the next stage."""
        assert self.incarnation is not None
        step = Step(
            incarnation=self.incarnation, number=number, items=list(items), compute_ns=[spent_ns]
        )
        self._tally.node_bytes_out[self._peers[0].place.name] += self._peers[0].send(step, frames)

    def proved(self) -> None:
        """They gave a good answer."""
        for peer in self._peers:
            peer.proved()

    def lied(self, reason: str) -> None:
        """The last one's answer makes no sense."""
        self._note(-1, "lied")
        self._peers[-1].leave(reason)
        self._look_after()

    def late(self) -> None:
        """The last one owes an answer for too long: whatever went wrong, begin anew with all."""
        self._note(-1, "late")
        self.incarnation = self._asked = None
        self._look_after()

    def close(self) -> None:
        """Close the connections."""
        for peer in self._peers:
            peer.close()

    def _look_after(self) -> None:
        """Attach all together, when all are here."""
        if not self._peers:
            return
        as_which = {peer.incarnation for peer in self._peers}
        if self.incarnation is not None and as_which != {self.incarnation}:
            self.incarnation = self._asked = None
        if any(peer.ready is None for peer in self._peers):
            self._asked = None
        elif self._asked is None:
            self._attach()
        elif as_which == {self._asked}:
            self.incarnation = self._asked

    def _attach(self) -> None:
        """From the last one on, so that each finds the next one attached."""
        end = self._stage.cut.end
        for peer in self._peers:
            assert peer.ready is not None
            if peer.ready.first_layer != end:
                peer.leave(
                    f"its first layer is {peer.ready.first_layer}, but {end} follows on the stage "
                    "before: take the stages that one `pilotfish export split` has made"
                )
                return
            end += peer.ready.layers
        self._asked = secrets.token_bytes(16)
        following = [*(peer.place for peer in self._peers[1:]), None]
        for peer, place in reversed(list(zip(self._peers, following, strict=True))):
            peer.attach(
                Attach(
                    incarnation=self._asked,
                    states=self._states,
                    next="" if place is None else place.address,
                    next_key=b"" if place is None else place.key,
                )
            )

    def _unfit(self, index: int, ready: Ready) -> str:
        """What is wrong with what a node holds, for stage ``index`` + 2."""
        cut, wanted = self._stage.cut, index + 2
        if (ready.stage, ready.stages, ready.whole) != (wanted, cut.count, cut.whole):
            holds = f"stage {ready.stage} of {ready.stages}" if ready.stages else "a whole model"
            return (
                f"it holds {holds} ({ready.model}, {ready.whole or ready.digest}), not stage "
                f"{wanted} of {cut.count} of {cut.whole}: start it with that, or put the list in "
                "order"
            )
        if self._digests[index] and ready.digest != self._digests[index]:
            return f"it holds a stage with digest {ready.digest}, not {self._digests[index]}"
        return lacks_room(ready, self._stage.slots, self._stage.context)

    def _note(self, index: int, what: str) -> None:
        self._tally.nodes[self._peers[index].place.name, what] += 1
