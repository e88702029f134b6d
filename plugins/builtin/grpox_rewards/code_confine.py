"""Confines a process that runs code under test: no other processes, no network, few files, limited memory.

Each part is a feature of the kernel and needs no privilege. A kernel or container may deny a part; `confine`
returns which. A flaw of the kernel defeats all of them.
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

LIBC = ctypes.CDLL(None, use_errno=True)

FILE_BYTES = 16 << 20
OPEN_FILES = 64
READABLE = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/dev/urandom")
"""Paths that code may read besides Python's own library."""

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Architecture of a system call in the kernel's numbering (linux/audit.h)."""

NEWEST = 462
"""Newest system call that the lists cover, of Linux 6.10; calls of later kernels are refused."""

NUMBERS = {
    "x86_64": """
        # other processes, and threads
        clone 56 fork 57 vfork 58 execve 59 execveat 322 clone3 435
        kill 62 tkill 200 tgkill 234 rt_sigqueueinfo 129 rt_tgsigqueueinfo 297
        pidfd_send_signal 424 pidfd_open 434 pidfd_getfd 438 ptrace 101
        process_vm_readv 310 process_vm_writev 311 process_madvise 440 process_mrelease 448 prlimit64 302
        setpriority 141 ioprio_set 251 migrate_pages 256 move_pages 279 kcmp 312
        sched_setparam 142 sched_setscheduler 144 sched_setaffinity 203 sched_setattr 314
        # the judge's session and group, and the signal that comes when the judge dies
        setsid 112 setpgid 109 prctl 157
        # the network; io_uring opens sockets without the call
        socket 41 connect 42 bind 49 listen 50 accept 43 accept4 288 io_uring_setup 425
        # memory of the host's, and memory that no limit counts
        shmget 29 shmat 30 shmctl 31 semget 64 semop 65 semctl 66 semtimedop 220
        msgget 68 msgsnd 69 msgrcv 70 msgctl 71 mq_open 240 mq_unlink 241
        memfd_create 319 memfd_secret 447
        # what Landlock does not cover, truncate before Linux 6.2
        chmod 90 fchmod 91 fchmodat 268 fchmodat2 452 truncate 76
        chown 92 fchown 93 lchown 94 fchownat 260
        utime 132 utimes 235 futimesat 261 utimensat 280
        setxattr 188 lsetxattr 189 fsetxattr 190 removexattr 197 lremovexattr 198 fremovexattr 199
        inotify_init 253 inotify_init1 294 fanotify_init 300
        # parts of the kernel that no solution needs
        unshare 272 setns 308 mount 165 umount2 166 open_tree 428 move_mount 429 fsopen 430 fspick 433
        mount_setattr 442 bpf 321 perf_event_open 298 userfaultfd 323 add_key 248 request_key 249 keyctl 250
        syslog 103 personality 135 modify_ldt 154 quotactl 179
    """,
    "aarch64": """
        clone 220 execve 221 execveat 281 clone3 435
        kill 129 tkill 130 tgkill 131 rt_sigqueueinfo 138 rt_tgsigqueueinfo 240
        pidfd_send_signal 424 pidfd_open 434 pidfd_getfd 438 ptrace 117
        process_vm_readv 270 process_vm_writev 271 process_madvise 440 process_mrelease 448 prlimit64 261
        setpriority 140 ioprio_set 30 migrate_pages 238 move_pages 239 kcmp 272
        sched_setparam 118 sched_setscheduler 119 sched_setaffinity 122 sched_setattr 274
        setsid 157 setpgid 154 prctl 167
        socket 198 connect 203 bind 200 listen 201 accept 202 accept4 242 io_uring_setup 425
        shmget 194 shmat 196 shmctl 195 semget 190 semop 193 semctl 191 semtimedop 192
        msgget 186 msgsnd 189 msgrcv 188 msgctl 187 mq_open 180 mq_unlink 181
        memfd_create 279 memfd_secret 447
        fchmod 52 fchmodat 53 fchmodat2 452 truncate 45 fchownat 54 fchown 55 utimensat 88
        setxattr 5 lsetxattr 6 fsetxattr 7 removexattr 14 lremovexattr 15 fremovexattr 16
        inotify_init1 26 fanotify_init 262
        unshare 97 setns 268 mount 40 umount2 39 open_tree 428 move_mount 429 fsopen 430 fspick 433
        mount_setattr 442 bpf 280 perf_event_open 241 userfaultfd 282 add_key 217 request_key 218 keyctl 219
        syslog 116 personality 92 quotactl 60
    """,
}

CLONE = {"x86_64": 56, "aarch64": 220}
SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
IOCTL = {"x86_64": 16, "aarch64": 29}
FCNTL = {"x86_64": 72, "aarch64": 25}

WHOLE = 0xFFFFFFFF


def fork_apart() -> int:
    """Fork like `os.fork`, into a new user, process, network and IPC namespace if the kernel permits.

    The child is the first process of its namespace: all processes that it starts end with it, and it has no
    number for a process outside. `unshare` would do the same to the next child, but then a test could not
    start threads.
    """
    namespaces = 0x10000000 | 0x20000000 | 0x40000000 | 0x08000000
    clone = CLONE.get(os.uname().machine)
    if clone is None or sys.maxsize < 2**32:
        return os.fork()
    call = ctypes.PyDLL(None).syscall  # keeps the interpreter's lock, as a fork must
    ctypes.pythonapi.PyOS_BeforeFork()
    child: int = call(clone, ctypes.c_long(namespaces | signal.SIGCHLD), 0, 0, 0, 0)
    if child == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return os.fork() if child < 0 else child


def confine(folder: str, seconds: int, memory: int) -> tuple[str, ...]:
    """Confine this process permanently.

    Args:
        folder: folder in which the process may write.
        seconds: limit of CPU time.
        memory: limit of the address space in bytes.

    Returns:
        Parts that the kernel denied: ``network`` (with processes and signals) and ``files``.
    """
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_AS: memory,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))
    LIBC.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, required by Landlock and seccomp
    lacking = () if _confine_files(folder) else ("files",)
    # Drop root's capabilities and those of the new user namespace, which would allow to inspect other
    # processes.
    LIBC.capset(ctypes.c_char_p(struct.pack("=Ii", 0x20080522, 0)), ctypes.c_char_p(bytes(24)))
    die_with_parent()  # after calls that would undo it, and before it is refused itself
    return lacking if _deny_calls() else (*lacking, "network")


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends (PR_SET_PDEATHSIG)."""
    LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)


def hide() -> None:
    """Hide memory and files of this process from processes of the same user (PR_SET_DUMPABLE)."""
    LIBC.prctl(4, 0, 0, 0, 0)


def limit_memory(memory: int) -> None:
    """Limit the address space to `memory` bytes."""
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def _confine_files(folder: str) -> bool:
    """Allow reading Python's own files, and writing only in `folder`, by Landlock; return False if the kernel
    cannot."""
    version = LIBC.syscall(444, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    reads = 1 << 2 | 1 << 3  # READ_FILE, READ_DIR
    rights = (1 << 13) - 1 | (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)
    # In addition to what seccomp refuses: ioctl of devices, TCP, and unix sockets and signals to outside.
    rights |= 1 << 15 if version >= 5 else 0
    ports, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    attributes = ctypes.create_string_buffer(struct.pack("=QQQ", rights, ports, scopes), 24)
    ruleset = LIBC.syscall(444, attributes, ctypes.c_size_t(24), 0)
    if ruleset < 0:
        return False
    paths = sysconfig.get_paths()
    for path in {paths["stdlib"], paths["platstdlib"], f"{sys.base_prefix}/lib", *READABLE}:
        _allow(ruleset, path, reads)
    _allow(ruleset, "/dev/null", 1 << 1 | 1 << 2)
    _allow(ruleset, folder, rights & ~1)  # all rights except bit 0, execution
    done: bool = LIBC.syscall(446, ruleset, 0) == 0
    os.close(ruleset)
    return done


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not os.path.isdir(path):
        rights &= 1 << 1 | 1 << 2 | 1 << 14  # rights that apply to a file
    rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, opened), 12)
    LIBC.syscall(445, ruleset, 1, rule, 0)
    os.close(opened)


def _deny_calls() -> bool:
    """Refuse the calls of `NUMBERS`, and some arguments of those of `_checked`, by seccomp; return False if the
    kernel cannot."""
    machine = os.uname().machine
    if machine not in AUDIT_ARCH or sys.maxsize < 2**32:
        return False
    program = b"".join(_filter(machine))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))

    compiled = Program(len(program) // 8, program)
    return bool(LIBC.prctl(22, 2, ctypes.byref(compiled), 0, 0) == 0)


def _filter(machine: str) -> Iterable[bytes]:
    """Yield the filter's instructions in BPF: each a code, two jumps and a constant."""
    load, mask, equal, at_least, give = 0x20, 0x54, 0x15, 0x35, 0x06
    kill, allow = struct.pack("=HBBI", give, 0, 0, 0x80000000), struct.pack("=HBBI", give, 0, 0, 0x7FFF0000)
    refuse = struct.pack("=HBBI", give, 0, 0, 0x00050000 | errno.EPERM)
    unknown = struct.pack("=HBBI", give, 0, 0, 0x00050000 | errno.ENOSYS)
    yield struct.pack("=HBBI", load, 0, 0, 4)  # the architecture
    yield struct.pack("=HBBI", equal, 1, 0, AUDIT_ARCH[machine])
    yield kill
    yield struct.pack("=HBBI", load, 0, 0, 0)  # the number of the call
    yield struct.pack("=HBBI", at_least, 0, 1, NEWEST + 1)  # includes x32, the same calls under other numbers
    yield unknown
    lines = (line for line in NUMBERS[machine].splitlines() if "#" not in line)
    for number in sorted(int(word) for line in lines for word in line.split() if word.isdigit()):
        yield struct.pack("=HBBI", equal, 0, 1, number)
        yield refuse
    for number, arguments in _checked(machine).items():
        block = []
        for place, values, bits in arguments:
            block.append(struct.pack("=HBBI", load, 0, 0, 16 + 8 * place))
            block.append(struct.pack("=HBBI", mask, 0, 0, bits))
            for left, value in zip(range(len(values), 0, -1), values, strict=True):
                block.append(struct.pack("=HBBI", equal, left, 0, value))  # over other values and refusal
            block.append(refuse)
        yield struct.pack("=HBBI", equal, 0, len(block) + 1, number)
        yield from block
        yield allow
    yield allow


def _checked(architecture: str) -> dict[int, list[tuple[int, tuple[int, ...], int]]]:
    """Return the partly allowed calls: for each, the arguments, their allowed values and the mask.

    The kernel reads the lower half of an argument, as the filter does.
    """
    return {
        # Only a pair of streams, which asyncio needs: a pair for datagrams can send to other sockets, too.
        SOCKETPAIR[architecture]: [(0, (1,), WHOLE), (1, (1,), 0xF)],  # AF_UNIX, SOCK_STREAM
        # TCGETS, TIOCGWINSZ, FIONBIO, FIONREAD, FIONCLEX, FIOCLEX: none of them writes or sends signals.
        IOCTL[architecture]: [(1, (0x5401, 0x5413, 0x5421, 0x541B, 0x5450, 0x5451), WHOLE)],
        # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, locks, F_DUPFD_CLOEXEC; not F_SETFL with its O_ASYNC, not
        # F_SETOWN.
        FCNTL[architecture]: [(1, (0, 1, 2, 3, 5, 6, 7, 1030), WHOLE)],
    }
