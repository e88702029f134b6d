"""Takes from a process what code under test does not need: other processes, the network, files, memory.

Each part is the kernel's own and needs no privilege, and each may be missing where a kernel or container denies
it: `confine` tells which. A flaw of the kernel undoes all of it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys
import sysconfig
from collections.abc import Iterable

from grpox_rewards.code_syscalls import AUDIT_ARCH, denied

LIBC = ctypes.CDLL(None, use_errno=True)

FILE_BYTES = 16 << 20
OPEN_FILES = 64


def confine(folder: str, seconds: int, memory: int) -> tuple[str, ...]:
    """Confine this process, for good.

    Args:
        folder: where it may write.
        seconds: of CPU time.
        memory: bytes of address space.

    Returns:
        what could not be taken away: of ``network`` (with processes and signals) and ``files``.
    """
    namespaces = 0x10000000 | 0x40000000 | 0x08000000  # user, network, IPC
    LIBC.unshare(namespaces)  # beside what follows; where it is denied, that will do
    _limit(seconds, memory)
    LIBC.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, which the next two ask for
    lacking = () if _confine_files(folder) else ("files",)
    _drop_capabilities()
    return lacking if _deny_calls() else (*lacking, "network")


def hide() -> None:
    """Let no process of the same user look into this one, its files and memory (PR_SET_DUMPABLE)."""
    LIBC.prctl(4, 0, 0, 0, 0)


def limit_memory(memory: int) -> None:
    """At most `memory` bytes of address space."""
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def _limit(seconds: int, memory: int) -> None:
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))
    limit_memory(memory)


def _drop_capabilities() -> None:
    """Those of root, and those that the new user namespace gives: else they would look into other processes."""
    header = struct.pack("=Ii", 0x20080522, 0)
    LIBC.capset(ctypes.c_char_p(header), ctypes.c_char_p(bytes(24)))


def _confine_files(folder: str) -> bool:
    """Let it read Python's own files and write in `folder` only, by Landlock; whether the kernel can."""
    version = LIBC.syscall(444, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    reads = 1 << 2 | 1 << 3  # READ_FILE, READ_DIR
    rights = (1 << 13) - 1 | (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)
    attributes = ctypes.create_string_buffer(struct.pack("=Q", rights), 8)
    ruleset = LIBC.syscall(444, attributes, ctypes.c_size_t(8), 0)
    if ruleset < 0:
        return False
    for path in _readable():
        _allow(ruleset, path, reads)
    _allow(ruleset, "/dev/null", 1 << 1 | 1 << 2)
    _allow(ruleset, folder, rights & ~1)  # bit 0: to execute
    done: bool = LIBC.syscall(446, ruleset, 0) == 0
    os.close(ruleset)
    return done


def _readable() -> Iterable[str]:
    paths = sysconfig.get_paths()
    yield from {paths["stdlib"], paths["platstdlib"]}
    yield from (
        "/lib",
        "/lib64",
        "/usr/lib",
        "/usr/lib64",
        "/usr/local/lib",
        "/usr/share/zoneinfo",
        "/dev/urandom",
    )
    yield f"{sys.base_prefix}/lib"


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not os.path.isdir(path):
        rights &= 1 << 1 | 1 << 2 | 1 << 14  # what there is to allow of a file
    rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, opened), 12)
    LIBC.syscall(445, ruleset, 1, rule, 0)
    os.close(opened)


def _deny_calls() -> bool:
    """Refuse the calls of `denied` with EPERM, by seccomp; whether the kernel can."""
    machine = os.uname().machine
    if machine not in AUDIT_ARCH or sys.maxsize < 2**32:
        return False
    program = b"".join(_filter(AUDIT_ARCH[machine], denied(machine), machine == "x86_64"))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))

    made = Program(len(program) // 8, program)
    return bool(LIBC.prctl(22, 2, ctypes.byref(made), 0, 0) == 0)


def _filter(architecture: int, numbers: list[int], has_x32: bool) -> Iterable[bytes]:
    """The filter's instructions in BPF: each a code, two jumps and a constant."""
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    refuse, kill, allow = 0x00050000 | 1, 0x80000000, 0x7FFF0000
    yield struct.pack("=HBBI", load, 0, 0, 4)  # the architecture
    yield struct.pack("=HBBI", equal, 1, 0, architecture)
    yield struct.pack("=HBBI", give, 0, 0, kill)
    yield struct.pack("=HBBI", load, 0, 0, 0)  # the call's number
    if has_x32:  # the same calls under other numbers
        yield struct.pack("=HBBI", at_least, 0, 1, 0x40000000)
        yield struct.pack("=HBBI", give, 0, 0, refuse)
    for number in numbers:
        yield struct.pack("=HBBI", equal, 0, 1, number)
        yield struct.pack("=HBBI", give, 0, 0, refuse)
    yield struct.pack("=HBBI", give, 0, 0, allow)
