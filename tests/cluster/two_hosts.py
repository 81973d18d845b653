"""Two hosts on one machine: network namespaces with their own addresses and host names, joined by one cable."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
NAMES = ("hosta", "hostb")


@dataclass(frozen=True)
class Host:
    """One of the two: its namespace, the end of the cable in it, its address and its name."""

    namespace: str
    interface: str
    address: str
    name: str

    def enter(self) -> list[str]:
        """The words that go before a command to run it there, under the host's name."""
        inside = f'hostname {self.name} && exec "$@"'
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "bash", "-c", inside, "-"]

    def start(self, words: list[str], **environ: str) -> subprocess.Popen[str]:
        """Starts `python -m words...` there; output and error come as text."""
        network = {"GLOO_SOCKET_IFNAME": self.interface, "TP_SOCKET_IFNAME": self.interface}
        return subprocess.Popen(
            [*self.enter(), sys.executable, "-m", *words], env=os.environ | network | environ, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def cut(self) -> None:
        """Pulls the cable out."""
        _ip("-n", self.namespace, "link", "set", self.interface, "down")


def why_impossible() -> str:
    """Why namespaces cannot be made here; empty when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "ip (iproute2) or unshare (util-linux) is not installed"
    try:
        with two_hosts() as hosts:
            for host in hosts:
                subprocess.run([*host.enter(), "true"], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces can be made and joined here: {' '.join(error.cmd)}: {error.stderr.strip()}"
    except OSError as error:
        return f"no network namespaces can be made and joined here: {error}"
    return ""


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Makes the hosts and their cable, and removes them at the end."""
    mark = f"mrl{os.getpid()}"
    first, second = (
        Host(f"{mark}{end}", f"{mark}{end}0", address, name)
        for end, address, name in zip("ab", ADDRESSES, NAMES, strict=True)
    )
    made: list[Host] = []
    try:
        for host in (first, second):
            _ip("netns", "add", host.namespace)
            made.append(host)
            hosts = Path("/etc/netns") / host.namespace / "hosts"  # `ip netns exec` lays it over /etc/hosts
            hosts.parent.mkdir(parents=True)
            hosts.write_text(
                "127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for a, n in zip(ADDRESSES, NAMES, strict=True))
            )
        _ip(
            "link", "add", first.interface, "netns", first.namespace,
            "type", "veth", "peer", "name", second.interface, "netns", second.namespace,
        )  # fmt: skip
        for host in (first, second):
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.namespace, "link", "set", host.interface, "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield first, second
    finally:
        for host in made:
            _ip("netns", "del", host.namespace)
            shutil.rmtree(Path("/etc/netns") / host.namespace, ignore_errors=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
