"""The system call filter of the sandbox, as a BPF program in bytes.

It lists refused calls, not allowed ones: Python, libc and numeric libraries use too many calls for an allow list.
Refused calls fail with EPERM, which a program sees as an exception. Numbers are from <asm/unistd_64.h> and
<asm-generic/unistd.h>.
"""

import errno
import struct

# machine -> (AUDIT_ARCH, column of the tables below); both are little-endian
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_X32 = 0x40000000  # x86-64's second numbering, which would bypass a filter on numbers
_CLONE_THREAD = 0x00010000
_SOCK_STREAM = 1
_O_TRUNC_ONLY = (0x203, 0x200)  # truncates a file opened only for reading, which early Landlock does not cover

# fmt: off
_NETWORK = {
    "socket": (41, 198), "connect": (42, 203), "accept": (43, 202), "accept4": (288, 242), "bind": (49, 200),
    "listen": (50, 201),
}
_NEVER = {
    # kernel interfaces and privileges
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "move_mount": (429, 429),
    "open_tree": (428, 428), "open_tree_attr": (467, 467), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97),
    "setns": (308, 268), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "acct": (163, 89), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "syslog": (103, 116), "sethostname": (170, 161),
    "setdomainname": (171, 162), "iopl": (172, -1), "ioperm": (173, -1), "modify_ldt": (154, -1),
    "personality": (135, 92), "vhangup": (153, 58),
    # calls made through a ring are not filtered at all
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "kcmp": (312, 272), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122), "migrate_pages": (256, 238), "move_pages": (279, 239),
    # memory that no limit counts, or that outlives the process
    "shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    # watches of files, which Landlock does not cover
    "inotify_init": (253, -1), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263),
    # arguments behind a pointer cannot be filtered
    "openat2": (437, 437),
}
# Without namespaces the program shares pids and owners with its parent.
_SHARED = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53),
    "fchmodat2": (452, 452), "chown": (92, -1), "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54),
    "utime": (132, -1), "utimes": (235, -1), "utimensat": (280, 88), "futimesat": (261, -1), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466), "truncate": (76, 45),
    "mknod": (133, -1), "mknodat": (259, 33),
}
_FORK = {"fork": (57, -1), "vfork": (58, -1)}
_NO_SUCH_CALL = {"clone3": (435, 435)}  # its flags lie behind a pointer; libc falls back to clone
# call -> numbers, index of the argument, mask, value, whether the value is refused (else: every other value)
_ARGUMENTS = [
    ("prctl", (157, 167), 0, 0xFFFFFFFF, 1, True),  # PR_SET_PDEATHSIG: outliving the parent
    ("prlimit64", (302, 261), 0, 0xFFFFFFFF, 0, False),  # only its own limits
    *(("fcntl", (72, 25), 1, 0xFFFFFFFF, command, True) for command in (8, 10, 15)),  # F_SETOWN, SIG, OWN_EX: signals
    *(("ioctl", (16, 29), 1, 0xFFFFFFFF, request, True) for request in (0x8901, 0x8902)),  # FIOSETOWN, SIOCSPGRP
    ("open", (2, -1), 1, *_O_TRUNC_ONLY, True),
    ("openat", (257, 56), 2, *_O_TRUNC_ONLY, True),
    ("clone", (56, 220), 0, _CLONE_THREAD, _CLONE_THREAD, False),  # only threads
    ("socketpair", (53, 199), 1, 0xF, _SOCK_STREAM, False),  # asyncio's; a datagram pair can address any socket
]
# fmt: on
_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def bpf_filter(machine: str, *, isolated: bool, forks: bool = False) -> bytes:
    """Return the filter for `machine`, an array of `struct sock_filter`.

    `isolated`: namespaces separate the program's processes and files from ours; otherwise signals and changes of a
    file's owner or mode are refused too. `forks`: it may start and kill processes.

    Raises:
        KeyError: no table for this machine.
    """
    architecture, column = MACHINES[machine]
    code = [_op(_LOAD, 4), _op(_EQUAL, architecture, 1, 0), _op(_RETURN, _KILL), _op(_LOAD, 0)]
    if machine == "x86_64":
        code += [_op(_AT_LEAST, _X32, 0, 1), _op(_RETURN, _KILL)]
    shared = {} if isolated else {name: numbers for name, numbers in _SHARED.items() if not (forks and name == "kill")}
    tables = [_NEVER, _NETWORK, {} if forks else _FORK, shared]
    for number in (numbers[column] for table in tables for numbers in table.values() if numbers[column] >= 0):
        code += [_op(_EQUAL, number, 0, 1), _op(_RETURN, _ERRNO | errno.EPERM)]
    for numbers in _NO_SUCH_CALL.values():
        code += [_op(_EQUAL, numbers[column], 0, 1), _op(_RETURN, _ERRNO | errno.ENOSYS)]
    for name, numbers, argument, mask, value, refused in _ARGUMENTS:
        if numbers[column] >= 0 and not (forks and name in ("clone", "prctl")):
            code += [
                _op(_EQUAL, numbers[column], 0, 5),
                _op(_LOAD, 16 + 8 * argument),
                _op(_AND, mask),
                _op(_EQUAL, value, 0, 1) if refused else _op(_EQUAL, value, 1, 0),
                _op(_RETURN, _ERRNO | errno.EPERM),
                _op(_LOAD, 0),
            ]
    return b"".join([*code, _op(_RETURN, _ALLOW)])


def _op(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, k)
