"""Use Ray: join or start a cluster, place actors on it, and restart them.

Only this module uses Ray, and Ray is imported only if a cluster is configured. A private cluster
ends with the thread that started it, and serves only this process: it listens on loopback and
demands a random token. Most settings are environment variables that Ray reads at import
(measurements with Ray 2.60: docs/scale.md).
"""

import logging
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from pilotfish.base.cpus import usable_cpus
from pilotfish.base.errors import ConfigError, TargetLostError
from pilotfish.base.extras import install_command
from pilotfish.edge_runtime.node.actor import NodeActor
from pilotfish.edge_runtime.targets.target import TargetOptions
from pilotfish.engines.artifact import Artifact

_STORE_BYTES = 80 * 2**20  # smallest object store of a private cluster (bytes), near Ray's minimum
_ROWS = 2 * 16  # rows of logits per session in the object store; more rows go to disk
_STORE_SHARE = 4  # divisor: the object store uses at most 1/4 of the machine's memory
_PROBE_S = 3.0  # time limit (s) of the connection test; Ray waits minutes for a missing cluster

_ENVIRONMENT = {
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",  # the daemon handles SIGTERM
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # the calls' futures report errors
    # with these two settings, Ray notices a lost actor after 0.2 s instead of 1.5 s
    "RAY_timeout_ms_task_wait_for_death_info": "100",
    "RAY_core_worker_internal_heartbeat_ms": "100",
}
_PRIVATE_CLUSTER = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # makes a cluster of one node listen on loopback
    "RAY_worker_niceness": "0",
    "RAY_worker_oom_score_adjustment": "0",
    "RAY_kill_worker_timeout_milliseconds": "500",  # time until a frozen worker is killed; was 5 s
}


def start_actors(options: TargetOptions, artifacts: Sequence[Artifact]) -> list[list[Any]]:
    """Start the actors of all replicas; return the handles of each replica's actors.

    A replica has one `NodeActor` for each artifact. The actors run on the configured cluster, or on
    a private cluster. Raises `ConfigError` without Ray, or if the cluster has too little room for
    the actors; `TargetLostError` if there is no cluster at the configured address.
    """
    config, plan = options.config, options.config.cluster
    total = plan.replicas * plan.stages
    threads = config.threads or max(1, usable_cpus() // total)
    if plan.address:
        _join(plan.address)
    else:
        rows = _ROWS * config.limits.sessions if plan.stages == 1 else 0
        _start(total * threads, 4 * rows * artifacts[0].manifest.vocab_size)
    import ray

    gpus = int(config.provider != "cpu")
    if config.provider == "auto" and ray.cluster_resources().get("GPU", 0) < total:
        gpus = 0
    _expect_room({"CPU": total * threads, "GPU": total * gpus})
    remote = ray.remote(NodeActor).options(
        num_cpus=threads,
        num_gpus=gpus,
        max_restarts=-1,
        max_task_retries=0,  # report a lost call at once; a retry would run on empty slots
        scheduling_strategy="SPREAD",
    )
    slots = -(-config.limits.sessions // plan.replicas)
    return [
        [
            remote.remote(
                str(artifact.path.resolve()),
                slots=slots,
                context=config.limits.context,
                threads=threads,
                provider=config.provider,
            )
            for artifact in artifacts
        ]
        for _ in range(plan.replicas)
    ]


def restart(actor: Any) -> None:
    """Kill an actor's process, even if it is frozen; Ray starts a new process."""
    import ray

    ray.kill(actor, no_restart=False)


def leave() -> None:
    """Leave the cluster; a private cluster ends, with all its processes."""
    import ray

    ray.shutdown()


def cause_of(error: BaseException) -> Exception | None:
    """Return the error that an actor's method raised; None if Ray lost the call or the actor."""
    from ray.exceptions import RayActorError, RayTaskError

    cause = error.cause if isinstance(error, RayTaskError) else None
    # if an earlier stage's actor was lost, the call of a later stage fails, too; its cause is
    # then the RayActorError
    return None if isinstance(cause, RayActorError) else cause


def is_permanent(error: BaseException) -> bool:
    """Return whether a call's error means that Ray will never restart the actor."""
    from ray.exceptions import ActorDiedError

    return isinstance(error, ActorDiedError)


def _start(cpus: int, store_bytes: int) -> None:
    environment = {**_PRIVATE_CLUSTER, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    store = max(_STORE_BYTES, min(store_bytes, memory // _STORE_SHARE))
    _init(environment, num_cpus=cpus, object_store_memory=store, include_dashboard=False)


def _join(address: str) -> None:
    """Join the cluster at HOST:PORT, or with "auto" the cluster of this machine."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        if "://" in address or not host or not port.isdecimal() or int(port) >= 2**16:
            raise ConfigError(f"--cluster-address must be HOST:PORT or auto, not {address}.")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _PROBE_S).close()
        except (OSError, UnicodeError) as error:  # UnicodeError: the host name is impossible
            raise TargetLostError(f"There is no Ray cluster at {address}: {error}.") from error
    try:
        _init({}, address=address)
    except ConnectionError as error:
        raise TargetLostError(
            f"The Ray cluster at {address} cannot be joined: {error} (Check that it is running. "
            "If it requires a token, set RAY_AUTH_TOKEN, and RAY_AUTH_MODE=token.)"
        ) from error


def _init(environment: Mapping[str, str], address: str = "local", **options: Any) -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.update(environment)  # overrides the user's settings for other clusters
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--cluster ray needs Ray, which is not installed: {install_command('ray')}."
        ) from error
    ray.init(
        address=address,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
        **options,
    )


def _expect_room(wanted: Mapping[str, int]) -> None:
    """Raise `ConfigError` if the whole cluster has too few resources for all actors."""
    import ray

    resources = ray.cluster_resources()
    for name, count in wanted.items():
        if resources.get(name, 0) < count:
            leave()
            raise ConfigError(
                f"The cluster has {resources.get(name, 0):g} {name}s, but these actors need "
                f"{count}: use fewer --replicas, --stages or --threads, or more nodes."
            )
