"""Programs of a Debian for arm64 on this machine's kernel: natively, or by QEMU's user mode.

The kernel hands an arm64 program to QEMU by binfmt_misc. Since Linux 6.7 a user namespace has
registrations of its own, so nothing is registered for the machine. With an older kernel QEMU must
be registered already, as the package qemu-user-static does where systemd runs. What is mounted, and
who runs, in the namespaces goes with their first process, however that ends. The network is this
machine's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.deploy.booted.machine import child
from tests.deploy.booted.rootfs import Impossible

NATIVE = os.uname().machine == "aarch64"
_QEMU = "qemu-aarch64-static"
_REGISTERED = Path("/proc/sys/fs/binfmt_misc/qemu-aarch64")
# Magic and mask: ELF, 64 bits, little-endian, a program or a shared library, for EM_AARCH64.
# F: the kernel opens QEMU now, so that a root needs no copy of it. P: argv[0] is kept.
_RULE = (
    r":qemu-aarch64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
    r":\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
    r":{qemu}:FP"
)
# The first process: it waits until it has users, mounts its own tables, and stays.
_FIRST = """
echo waiting
read -r _
mount -t proc none /proc || exit
if [ -n "$1" ]; then
    mount -t binfmt_misc none /proc/sys/fs/binfmt_misc || exit
    printf %s "$1" > /proc/sys/fs/binfmt_misc/register || exit
fi
echo ready
exec cat
"""
_ALL_USERS = "0 0 4294967295"
# The nearest to an Orin's Cortex-A78AE that QEMU 7.2 knows: it has dot products and fp16, no SVE.
_CPU = {"QEMU_CPU": "cortex-a76"}
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
# ONNX Runtime reads there what the CPU can do, and must not find this machine's: it would crash.
_CORE = """\
processor\t: {core}
BogoMIPS\t: 62.50
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc \
dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd42
CPU revision\t: 1

"""


class Emulation:
    """Namespaces in which arm64's programs run, between `begin` and `end`."""

    def __init__(self) -> None:
        self._first: subprocess.Popen[str] | None = None
        self._leader = 0

    def begin(self) -> None:
        """Make the namespaces; `Impossible` says why they cannot be made here."""
        if os.geteuid() != 0:
            raise Impossible("to give a namespace all users needs root")
        command = ["unshare", "--user", "--mount", "--pid", "--fork", "--kill-child"]
        self._first = first = subprocess.Popen(
            [*command, "sh", "-c", _FIRST, "sh", _rule()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert first.stdin is not None
        assert first.stdout is not None
        reply = first.stdout.readline()
        if reply == "waiting\n":
            for table in ("uid_map", "gid_map"):
                Path(f"/proc/{first.pid}/{table}").write_text(_ALL_USERS)
            print("go", file=first.stdin, flush=True)
            reply = first.stdout.readline()
        if reply != "ready\n":
            raise Impossible(f"no namespaces for programs of arm64: {reply.strip()}")
        self._leader = child(first.pid)

    def end(self) -> None:
        """Kill all that runs there; what is mounted there is gone."""
        if self._first is not None:
            self._first.kill()
            self._first.communicate()
            self._first = None

    def prepare(self, root: Path) -> None:
        """Mount below ``root`` what programs expect of a running system."""
        cores = len(os.sched_getaffinity(0))
        cpus = root / "run/cpuinfo"
        cpus.write_text("".join(_CORE.format(core=core) for core in range(cores)))
        commands = [
            ("mount", "-t", "proc", "none", root / "proc"),
            ("mount", "--rbind", "/sys", root / "sys"),
            ("mount", "-t", "tmpfs", "none", root / "dev/shm"),
        ]
        if not NATIVE:
            commands.append(("mount", "--bind", cpus, root / "proc/cpuinfo"))
        for command in commands:
            words = [*self._inside(), *map(str, command)]
            subprocess.run(words, check=True, capture_output=True, text=True)

    def words(self, root: Path, *command: object) -> list[str]:
        """Return the words by which this machine runs a command in ``root``."""
        variables = _ENVIRONMENT | ({} if NATIVE else _CPU)
        environment = [f"{name}={value}" for name, value in variables.items()]
        inside = [*self._inside(), "env", "-i", *environment]
        return [*inside, "chroot", str(root), *map(str, command)]

    def _inside(self) -> list[str]:
        return ["nsenter", "--target", str(self._leader), "--user", "--mount", "--pid"]


def _rule() -> str:
    """Return what to register in namespaces of one's own; "" if programs of arm64 run already."""
    if NATIVE:
        return ""
    if _REGISTERED.exists():
        lines = _REGISTERED.read_text().splitlines()
        if "enabled" in lines and any(line.startswith("flags:") and "F" in line for line in lines):
            return ""
    qemu = shutil.which(_QEMU)
    if qemu is None:
        raise Impossible(f"{_QEMU} is missing: install the package qemu-user-static")
    return _RULE.format(qemu=qemu)
