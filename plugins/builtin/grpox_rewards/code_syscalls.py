"""The system calls that code under test may not make, with their numbers by architecture."""

from __future__ import annotations

from typing import NamedTuple

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""What the kernel calls the architecture of a system call (linux/audit.h)."""


NEWEST = 462
"""The last call that the lists were made with, of Linux 6.10: what later kernels add is refused unseen."""

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


class Argument(NamedTuple):
    """An argument that may have a few values only; the kernel reads its lower half, as the filter does."""

    place: int
    values: tuple[int, ...]
    mask: int = WHOLE
    """The bits that are compared."""


def denied(architecture: str) -> list[int]:
    """Return the numbers of the calls, in order; none for an architecture that is not known here."""
    lines = NUMBERS.get(architecture, "").splitlines()
    words = [word for line in lines if "#" not in line for word in line.split()]
    return sorted(int(word) for word in words if word.isdigit())


def checked(architecture: str) -> dict[int, tuple[Argument, ...]]:
    """Return what is asked of the arguments of calls that are allowed in part."""
    return {
        # A pair of streams, which asyncio needs: a pair for datagrams sends to other sockets, too.
        SOCKETPAIR[architecture]: (Argument(0, (1,)), Argument(1, (1,), 0xF)),  # AF_UNIX, SOCK_STREAM
        # TCGETS, TIOCGWINSZ, FIONBIO, FIONREAD, FIONCLEX, FIOCLEX: nothing that writes or sends signals.
        IOCTL[architecture]: (Argument(1, (0x5401, 0x5413, 0x5421, 0x541B, 0x5450, 0x5451)),),
        # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, locks, F_DUPFD_CLOEXEC: no F_SETFL with its O_ASYNC, no F_SETOWN.
        FCNTL[architecture]: (Argument(1, (0, 1, 2, 3, 5, 6, 7, 1030)),),
    }
