"""A filter of system calls: no processes, no programs, no sockets, no signals or limits for other processes.

A refused call fails in the program that made it, as if the user lacked the permission. Calls that are newer than this
list do not exist for the program. The list refuses; it does not allow, so that any library of Python works.
"""

from __future__ import annotations

import ctypes
import errno
import struct

from midflight.envs.sandbox import linux

# Numbers: x86_64, aarch64; None where the architecture has no such call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # processes and programs
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    # network; a socketpair has no other end outside
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # other processes: memory, signals, priorities
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
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
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # memory that no limit of the process counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    # large, rarely needed parts of the kernel
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # attributes of files, which Landlock does not protect
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}
_CLONE, _CLONE3, _LAST_KNOWN = (56, 220), 435, 462
_KILL, _TGKILL, _PRLIMIT, _FCNTL, _IOCTL, _PRCTL = (62, 129), (234, 131), (302, 261), (72, 25), (16, 29), (157, 167)
_CLONE_THREAD = 0x00010000
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15  # the owner of a file descriptor gets a signal of choice
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902

_ARCHITECTURE_TOKENS = (0xC000003E, 0xC00000B7)
_X32 = 0x40000000  # system calls of the x32 ABI, which have other numbers
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _RETURN = 0x20, 0x06
_IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT = 0x15, 0x35, 0x45


def is_available() -> bool:
    """True if the kernel takes filters and their numbers are known for this architecture."""
    if linux.ARCHITECTURE is None or not linux.IS_LINUX:
        return False
    try:
        linux.prctl(linux.PR_SET_SECCOMP, linux.SECCOMP_MODE_FILTER, ctypes.c_void_p(None))
    except OSError as error:
        return error.errno == errno.EFAULT  # the kernel would have read a filter
    return False


def install(own_pid: int) -> None:
    """Filter the system calls of this process from now on. Needs `no_new_privs`. Raises: OSError."""
    program = _program(own_pid)
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    linux.prctl(linux.PR_SET_SECCOMP, linux.SECCOMP_MODE_FILTER, ctypes.c_char_p(header))


def _program(own_pid: int) -> bytes:
    """Return the filter in the kernel's classic BPF."""
    index = linux.ARCHITECTURE
    assert index is not None
    refuse = _ERRNO | errno.EPERM
    lines = [
        _statement(_LOAD, _ARCHITECTURE),
        *_unless(_IF_EQUAL, _ARCHITECTURE_TOKENS[index], _KILL_PROCESS),
        _statement(_LOAD, _NUMBER),
        *_when(_IF_AT_LEAST, _X32 if index == 0 else _LAST_KNOWN + 1, _ERRNO | errno.ENOSYS),
        *_when(_IF_AT_LEAST, _LAST_KNOWN + 1, _ERRNO | errno.ENOSYS),
        *_when(_IF_EQUAL, _CLONE3, _ERRNO | errno.ENOSYS),  # its flags are in memory; the C library falls back to clone
    ]
    for numbers in _REFUSED.values():
        number = numbers[index]
        if number is not None:
            lines += _when(_IF_EQUAL, number, refuse)
    lines += _on_argument(_CLONE[index], 0, _unless(_IF_ANY_BIT, _CLONE_THREAD, _ERRNO | errno.EAGAIN))
    for call in (_KILL, _TGKILL):
        lines += _on_argument(call[index], 0, _unless(_IF_EQUAL, own_pid, refuse))
    lines += _on_argument(_PRLIMIT[index], 0, _unless(_IF_EQUAL, 0, refuse))
    lines += _on_argument(
        _FCNTL[index],
        1,
        [line for value in (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX) for line in _when(_IF_EQUAL, value, refuse)],
    )
    lines += _on_argument(
        _IOCTL[index], 1, [line for value in (_FIOSETOWN, _SIOCSPGRP) for line in _when(_IF_EQUAL, value, refuse)]
    )
    lines += _on_argument(_PRCTL[index], 0, _when(_IF_EQUAL, linux.PR_SET_PDEATHSIG, refuse))
    return b"".join([*lines, _statement(_RETURN, _ALLOW)])


def _statement(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _when(test: int, value: int, result: int) -> list[bytes]:
    """Return `result` if the loaded number passes the test, else go on."""
    return [_statement(test, value, 0, 1), _statement(_RETURN, result)]


def _unless(test: int, value: int, result: int) -> list[bytes]:
    """Go on if the loaded number passes the test, else return `result`."""
    return [_statement(test, value, 1, 0), _statement(_RETURN, result)]


def _on_argument(number: int, argument: int, tests: list[bytes]) -> list[bytes]:
    """Test the lower half of an argument of one system call, and allow the call unless a test refuses it."""
    body = [_statement(_LOAD, _ARGUMENTS + 8 * argument), *tests, _statement(_RETURN, _ALLOW)]
    return [_statement(_IF_EQUAL, number, 0, len(body)), *body]
