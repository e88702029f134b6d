"""The system calls that code under test may not make, with their numbers by architecture."""

from __future__ import annotations

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""What the kernel calls the architecture of a system call (linux/audit.h)."""


NUMBERS = {
    "x86_64": """
        # other processes, and threads
        clone 56 fork 57 vfork 58 execve 59 execveat 322 clone3 435
        kill 62 tkill 200 tgkill 234 rt_sigqueueinfo 129 rt_tgsigqueueinfo 297
        pidfd_send_signal 424 pidfd_open 434 pidfd_getfd 438 ptrace 101
        process_vm_readv 310 process_vm_writev 311 process_madvise 440 prlimit64 302
        setpriority 141 ioprio_set 251 migrate_pages 256 move_pages 279
        sched_setparam 142 sched_setscheduler 144 sched_setaffinity 203 sched_setattr 314
        # the network; io_uring opens sockets without the call
        socket 41 connect 42 io_uring_setup 425
        # what Landlock does not cover
        chmod 90 fchmod 91 fchmodat 268 fchmodat2 452
        chown 92 fchown 93 lchown 94 fchownat 260
        utime 132 utimes 235 futimesat 261 utimensat 280
        setxattr 188 lsetxattr 189 fsetxattr 190
        # parts of the kernel that no solution needs
        unshare 272 setns 308 mount 165 umount2 166 bpf 321 perf_event_open 298
        userfaultfd 323 add_key 248 request_key 249 keyctl 250
        shmget 29 semget 64 msgget 68 mq_open 240
    """,
    "aarch64": """
        clone 220 execve 221 execveat 281 clone3 435
        kill 129 tkill 130 tgkill 131 rt_sigqueueinfo 138 rt_tgsigqueueinfo 240
        pidfd_send_signal 424 pidfd_open 434 pidfd_getfd 438 ptrace 117
        process_vm_readv 270 process_vm_writev 271 process_madvise 440 prlimit64 261
        setpriority 140 ioprio_set 30 migrate_pages 238 move_pages 239
        sched_setparam 118 sched_setscheduler 119 sched_setaffinity 122 sched_setattr 274
        socket 198 connect 203 io_uring_setup 425
        fchmod 52 fchmodat 53 fchmodat2 452 fchownat 54 fchown 55 utimensat 88
        setxattr 5 lsetxattr 6 fsetxattr 7
        unshare 97 setns 268 mount 40 umount2 39 bpf 280 perf_event_open 241
        userfaultfd 282 add_key 217 request_key 218 keyctl 219
        shmget 194 semget 190 msgget 186 mq_open 180
    """,
}


def denied(architecture: str) -> list[int]:
    """The numbers of the calls, in order; none for an architecture that is not known here."""
    lines = NUMBERS.get(architecture, "").splitlines()
    words = [word for line in lines if "#" not in line for word in line.split()]
    return sorted(int(word) for word in words if word.isdigit())
