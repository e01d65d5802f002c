"""Free TCP ports of this machine."""

import socket


def free_ports(count: int) -> list[int]:
    """Ports that nobody held a moment ago, all different."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
