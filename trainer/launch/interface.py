"""Find the network interface that has an address."""

import ipaddress
import socket
import struct
import sys
from pathlib import Path

_SIOCGIFADDR = 0x8915  # Linux: read the IPv4 address of an interface


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has `address`, or None if it is not found."""
    if sys.platform != "linux":
        return None
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.is_loopback:
        return "lo"
    # Linux lists IPv6 addresses in a file, and it returns the first IPv4 address by an ioctl.
    if ip.version == 6:
        rows = [
            row.split()
            for row in Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines()
        ]
        return next((row[5] for row in rows if int(row[0], 16) == int(ip)), None)
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # the interface has no IPv4 address
            if answer[20:24] == ip.packed:
                return name
    return None
