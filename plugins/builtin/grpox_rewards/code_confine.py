"""Takes from a process what code under test does not need: other processes, the network, files, memory.

Each part is the kernel's own and needs no privilege, and each may be missing where a kernel or container denies
it: `confine` tells which. A flaw of the kernel undoes all of it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import struct
import sys
import sysconfig
from collections.abc import Iterable

from grpox_rewards.code_syscalls import AUDIT_ARCH, CLONE, NEWEST, checked, denied

LIBC = ctypes.CDLL(None, use_errno=True)

FILE_BYTES = 16 << 20
OPEN_FILES = 64


def fork_apart() -> int:
    """Fork, as `os.fork` does, into a user, process, network and IPC namespace, where the kernel gives them.

    The child is the first process of its namespace: whatever it starts ends with it, and it has no number for
    any process outside. After `unshare`, which does the same to the next child, a test could start no thread.
    """
    namespaces = 0x10000000 | 0x20000000 | 0x40000000 | 0x08000000
    clone = CLONE.get(os.uname().machine)
    if clone is None or sys.maxsize < 2**32:
        return os.fork()
    call = ctypes.PyDLL(None).syscall  # which keeps the interpreter's lock, as a fork must
    ctypes.pythonapi.PyOS_BeforeFork()
    child: int = call(clone, ctypes.c_long(namespaces | signal.SIGCHLD), 0, 0, 0, 0)
    if child == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return os.fork() if child < 0 else child


def confine(folder: str, seconds: int, memory: int) -> tuple[str, ...]:
    """Confine this process, for good.

    Args:
        folder: where it may write.
        seconds: of CPU time.
        memory: bytes of address space.

    Returns:
        what could not be taken away: of ``network`` (with processes and signals) and ``files``.
    """
    _limit(seconds, memory)
    LIBC.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, which Landlock and seccomp ask for
    lacking = () if _confine_files(folder) else ("files",)
    _drop_capabilities()
    die_with_parent()  # after what would undo it, and before that is refused
    return lacking if _deny_calls() else (*lacking, "network")


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends (PR_SET_PDEATHSIG)."""
    LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)


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
    # Beside what seccomp refuses: devices' own calls, TCP, and unix sockets and signals to outside.
    rights |= 1 << 15 if version >= 5 else 0
    ports, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    attributes = ctypes.create_string_buffer(struct.pack("=QQQ", rights, ports, scopes), 24)
    ruleset = LIBC.syscall(444, attributes, ctypes.c_size_t(24), 0)
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
    """Refuse the calls of `denied`, and in part those of `checked`, by seccomp; whether the kernel can."""
    machine = os.uname().machine
    if machine not in AUDIT_ARCH or sys.maxsize < 2**32:
        return False
    program = b"".join(_filter(machine))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))

    made = Program(len(program) // 8, program)
    return bool(LIBC.prctl(22, 2, ctypes.byref(made), 0, 0) == 0)


def _filter(machine: str) -> Iterable[bytes]:
    """Yield the filter's instructions in BPF: each a code, two jumps and a constant."""
    load, mask, equal, at_least, give = 0x20, 0x54, 0x15, 0x35, 0x06
    kill, allow = struct.pack("=HBBI", give, 0, 0, 0x80000000), struct.pack("=HBBI", give, 0, 0, 0x7FFF0000)
    refuse = struct.pack("=HBBI", give, 0, 0, 0x00050000 | errno.EPERM)
    unknown = struct.pack("=HBBI", give, 0, 0, 0x00050000 | errno.ENOSYS)
    yield struct.pack("=HBBI", load, 0, 0, 4)  # the architecture
    yield struct.pack("=HBBI", equal, 1, 0, AUDIT_ARCH[machine])
    yield kill
    yield struct.pack("=HBBI", load, 0, 0, 0)  # the call's number
    yield struct.pack("=HBBI", at_least, 0, 1, NEWEST + 1)  # x32, too: the same calls under other numbers
    yield unknown
    for number in denied(machine):
        yield struct.pack("=HBBI", equal, 0, 1, number)
        yield refuse
    for number, arguments in checked(machine).items():
        block = []
        for place, values, bits in arguments:
            block.append(struct.pack("=HBBI", load, 0, 0, 16 + 8 * place))
            block.append(struct.pack("=HBBI", mask, 0, 0, bits))
            for left, value in zip(range(len(values), 0, -1), values, strict=True):
                block.append(struct.pack("=HBBI", equal, left, 0, value))  # over the others, and the refusal
            block.append(refuse)
        yield struct.pack("=HBBI", equal, 0, len(block) + 1, number)
        yield from block
        yield allow
    yield allow
