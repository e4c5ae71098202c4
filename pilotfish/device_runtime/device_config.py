"""The settings of a device and of its HTTP service.

Each setting is declared once; its flag, TOML key, help and reload follow from the declaration
(`base.settings`).
"""

from pathlib import Path
from typing import Annotated

from msgspec import field

from pilotfish.base.settings import setting
from pilotfish.device_runtime.link.retry import OnLinkLoss
from pilotfish.device_runtime.plan import Options
from pilotfish.engines.engine_settings import EngineSettings


class DeviceConfig(EngineSettings, frozen=True, kw_only=True):
    """The drafter, the edge, and what to do when the link breaks; see `Device`."""

    draft: Annotated[
        Path,
        setting(
            "drafter's artifact; or text: no model, but continuations of the same words in this "
            "conversation or an earlier one",
            metavar="DIR|text",
        ),
    ]
    draft_text: Annotated[
        bool, setting("let an artifact also draft by repetitions of the text")
    ] = False
    texts: Annotated[
        Path | None,
        setting(
            "folder that keeps earlier conversations for drafting by text, readable by you alone; "
            "off: use none (default: in memory, until the device stops)",
            metavar="DIR|off",
        ),
    ] = None
    share_texts: Annotated[
        bool,
        setting(
            "let lossless protocols draft from all clients' texts and reuse their prompts: clients "
            "can guess the texts of others by trying"
        ),
    ] = False
    edge: Annotated[
        str | None,
        setting("tcp://HOST:PORT; protocol local needs none", metavar="ADDRESS", live=True),
    ] = None
    keys: Annotated[
        Path | None,
        setting(
            "the folder with device.key and edge.pub; needed beyond loopback",
            form="keys",
            metavar="DIR",
            live=True,
        ),
    ] = None
    on_link_loss: Annotated[
        OnLinkLoss,
        setting(
            "when the edge is lost: wait for it, continue with the drafter alone (local) until it "
            "is back, or end the answer (fail)"
        ),
    ] = "wait"
    patience_s: Annotated[float, setting("wait: seconds to wait for a lost edge", gt=0)] = 120.0


class ServiceConfig(DeviceConfig, frozen=True, kw_only=True):
    """The settings of `device serve`. options: default options of the requests.

    api_keys: see `service.access.ApiKeys`. tls_cert, tls_key: see `service.tls.tls_context`.
    """

    listen: Annotated[str, setting("port 0 takes a free one", metavar="HOST:PORT")] = (
        "127.0.0.1:8080"
    )
    api_keys: Annotated[
        Path | None,
        setting(
            "the clients' keys; needed beyond loopback (default: $CREDENTIALS_DIRECTORY/api-keys)",
            metavar="FILE",
            live=True,
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        setting("serve https with this certificate (PEM)", metavar="FILE", live=True),
    ] = None
    tls_key: Annotated[
        Path | None, setting("the certificate's key, not encrypted", metavar="FILE", live=True)
    ] = None
    lanes: Annotated[int, setting("answers generated at once", ge=1, le=64)] = 2
    queue: Annotated[int, setting("answers that may wait for a lane", ge=0, le=10_000)] = 16
    context: (
        Annotated[int, setting("tokens of a conversation (default: the model's)", ge=2)] | None
    ) = None
    model: Annotated[str, setting("the model's name for clients", metavar="NAME", live=True)] = (
        "pilotfish"
    )
    drain_s: Annotated[
        float,
        setting("seconds for running answers to end after SIGTERM", gt=0, live=True),
    ] = 20.0
    options: Annotated[Options, setting("", live=True)] = field(default_factory=Options)
