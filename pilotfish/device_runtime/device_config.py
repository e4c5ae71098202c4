"""The settings of a device and of its HTTP service.

Each setting is declared once; its flag, TOML key, help and reload follow from the declaration
(`base.settings`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pilotfish.base.settings import setting
from pilotfish.base.tracing import TracesUrl
from pilotfish.device_runtime.link.retry import OnLinkLoss
from pilotfish.engines.engine_settings import EngineSettings
from pilotfish.wire.request import Request


class DeviceConfig(EngineSettings, frozen=True, kw_only=True):
    """The drafter, the edge, and what to do when the link breaks; see `Device`."""

    draft: Annotated[
        Path,
        setting(
            'the drafter: an artifact\'s folder; or "default", "default-28" (without two layers), '
            "a hub id, a GGUF file or a checkpoint's folder, which is exported into the cache on "
            'first use; or "text": draft without a model, by repeating what followed the same '
            "words before, in this or an earlier conversation",
            metavar="MODEL|text",
        ),
    ]
    draft_text: Annotated[
        bool, setting("let a drafter with a model also draft by repetitions of the text")
    ] = False
    texts: Annotated[
        Path | None,
        setting(
            "folder that keeps earlier conversations for drafting by text, readable by you alone; "
            "off: use no earlier conversations (default: keep them in memory until the device "
            "stops)",
            metavar="DIR|off",
        ),
    ] = None
    share_texts: Annotated[
        bool,
        setting(
            "let lossless protocols draft from all clients' texts and reuse their prompts; "
            "clients can then find out the texts of others by guessing"
        ),
    ] = False
    edge: Annotated[
        str | None,
        setting(
            "the edge's address, tcp://HOST:PORT; protocol local needs no edge",
            metavar="ADDRESS",
            live=True,
        ),
    ] = None
    keys: Annotated[
        Path | None,
        setting(
            "folder with device.key and edge.pub; required unless the edge is on loopback",
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
    patience_s: Annotated[float, setting("with wait: seconds to wait for a lost edge", gt=0)] = (
        120.0
    )
    traces: TracesUrl | None = None


class ServiceConfig(DeviceConfig, frozen=True, kw_only=True):
    """The settings of `device serve`. request: default options of the requests.

    api_keys: see `service.access.ApiKeys`. tls_cert, tls_key: see `service.tls.tls_context`.
    """

    listen: Annotated[
        str, setting("address of the service; port 0: any free port", metavar="HOST:PORT")
    ] = "127.0.0.1:8080"
    api_keys: Annotated[
        Path | None,
        setting(
            "file with the clients' API keys; required unless the service listens on loopback "
            "(default: $CREDENTIALS_DIRECTORY/api-keys)",
            metavar="FILE",
            live=True,
        ),
    ] = None
    allow_origin: Annotated[
        Sequence[str],
        setting(
            "let web pages and apps of this origin (SCHEME://HOST:PORT; *: all) use the service "
            "from a browser; may be repeated",
            repeat=True,
            metavar="ORIGIN",
            live=True,
        ),
    ] = ()
    strict: Annotated[
        bool,
        setting(
            "refuse requests with fields that the service does not know, instead of ignoring them",
            live=True,
        ),
    ] = False
    tls_cert: Annotated[
        Path | None,
        setting("serve HTTPS with the certificate in this file (PEM)", metavar="FILE", live=True),
    ] = None
    tls_key: Annotated[
        Path | None,
        setting("file with the certificate's key, not encrypted", metavar="FILE", live=True),
    ] = None
    lanes: Annotated[int, setting("maximum number of answers generated at once", ge=1, le=64)] = 2
    queue: Annotated[
        int, setting("maximum number of answers that wait for a lane", ge=0, le=10_000)
    ] = 16
    context: (
        Annotated[
            int,
            setting(
                "maximum number of tokens in a conversation (default: the model's maximum)", ge=2
            ),
        ]
        | None
    ) = None
    model: Annotated[
        str, setting("name of the model that clients see", metavar="NAME", live=True)
    ] = "pilotfish"
    drain_s: Annotated[
        float,
        setting("seconds after SIGTERM in which running answers may end", gt=0, live=True),
    ] = 20.0
    request: Annotated[Request, setting("", live=True)] = Request()
