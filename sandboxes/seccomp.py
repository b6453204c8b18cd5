"""The kernel's filter of system calls in a box: refuses what only a way out of it would use. Starts nothing itself.

It is assembled by hand, for the two machines whose numbers stand here: 8 bytes an instruction, no library. It goes on
top of the namespaces: a kernel is attacked through its rarely used calls, and most of these need no privilege.
"""

import contextlib
import errno
import functools
import os
import platform
import struct
from collections.abc import Iterator

_DENIED = {  # number on x86_64, number on aarch64, None where there is none
    # other processes' memory and descriptors
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    # file systems and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    # parts of the kernel with a history, or that get round this filter
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "lookup_dcookie": (212, 18),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    # the machine itself
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
}
_CLONE, _CLONE3 = (56, 220), (435, 435)
_SOCKETS = {"socket": (41, 198), "socketpair": (53, 199)}
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column above, and the kernel's name of the architecture (linux/audit.h)."""

NEW_NAMESPACES = 0x7E020000
"""The CLONE_NEW* flags of `clone` (linux/sched.h)."""
FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK. Others are unused inside, and AF_VSOCK would reach a virtual machine's host:
network namespaces do not hold it."""
X32 = 0x40000000

# linux/filter.h and linux/seccomp.h; a jump's two numbers say how many instructions it skips if true, and if not.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCH_AT, _ARGUMENT_AT = 0, 4, 16


@functools.cache
def filter_program(machine: str = platform.machine()) -> bytes:
    """The filter for `machine` as `bwrap --seccomp` reads it; empty where its numbers are not known here.

    Calls of another architecture end the process. Those of the x32 ABI and of the table fail with EPERM, and so does
    `clone` with a new namespace. `clone3`, whose flags no filter can read, fails with ENOSYS: C libraries then take
    `clone`. Sockets are of `FAMILIES` only (EAFNOSUPPORT).
    """
    if machine not in _MACHINES:
        return b""
    column, arch = _MACHINES[machine]
    refused = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    code = [(_LOAD, 0, 0, _ARCH_AT), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER_AT)]
    if machine == "x86_64":
        code += [(_AT_LEAST, 0, 1, X32), refused]
    code += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    code += [(_EQUAL, 0, 4, _CLONE[column]), (_LOAD, 0, 0, _ARGUMENT_AT), (_ANY_BIT, 0, 1, NEW_NAMESPACES), refused]
    code += [(_RETURN, 0, 0, _ALLOW)]
    for numbers in _SOCKETS.values():
        code += [(_EQUAL, 0, len(FAMILIES) + 3, numbers[column]), (_LOAD, 0, 0, _ARGUMENT_AT)]
        code += [(_EQUAL, len(FAMILIES) - at, 0, family) for at, family in enumerate(FAMILIES)]
        code += [(_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    for name in _DENIED:
        number = _DENIED[name][column]
        if number is not None:
            code += [(_EQUAL, 0, 1, number), refused]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


@contextlib.contextmanager
def filter_fds() -> Iterator[tuple[int, ...]]:
    """A descriptor that this machine's filter can be read from, once; none where there is no filter."""
    if not filter_program():
        yield ()
        return
    source, sink = os.pipe()
    try:
        try:
            os.write(sink, filter_program())  # a kilobyte: less than any pipe holds
        finally:
            os.close(sink)
        yield (source,)
    finally:
        os.close(source)
