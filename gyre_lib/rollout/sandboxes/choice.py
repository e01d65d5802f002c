"""The sandbox of a configuration's name."""

from gyre_lib.config.errors import InputError
from gyre_lib.rollout.sandboxes.bubblewrap import Bubblewrap
from gyre_lib.rollout.sandboxes.docker import Docker
from gyre_lib.rollout.sandboxes.kubernetes import Kubernetes
from gyre_lib.rollout.sandboxes.protocol import Sandbox


def sandbox_named(name: str) -> Sandbox:
    """Raises InputError naming `rollout.sandbox`."""
    match name:
        case "bubblewrap":
            return Bubblewrap()
        case "docker":
            return Docker()
        case "kubernetes":
            return Kubernetes()
    raise InputError(f"rollout.sandbox: unknown sandbox {name!r} (bubblewrap, docker, kubernetes)")
