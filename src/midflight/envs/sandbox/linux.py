"""System calls of Linux that the standard library does not have."""

from __future__ import annotations

import ctypes
import os
import platform
import sys

CLONE_NEWNS, CLONE_NEWIPC = 0x00020000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER = 2
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_CAPABILITY_VERSION_3 = 0x20080522

# Numbers of system calls: x86_64, aarch64. From 424 on, all architectures use the same numbers.
_NUMBERS = {"pivot_root": (155, 41), "mount_setattr": (442, 442)}
_ARCHITECTURES = ("x86_64", "aarch64")

IS_LINUX = sys.platform == "linux"
# Index of the machine's architecture in tables of system calls; None for another architecture.
ARCHITECTURE = _ARCHITECTURES.index(platform.machine()) if platform.machine() in _ARCHITECTURES else None

_libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, name: str) -> int:
    """Return the result of a C function. Raises: OSError if it is negative."""
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def syscall(name: str, number: int, *arguments: object) -> int:
    """Call the kernel; integers are passed as 64 bits. Raises: OSError."""
    converted = [ctypes.c_long(item) if isinstance(item, int) else item for item in arguments]
    return checked(int(_libc.syscall(ctypes.c_long(number), *converted)), name)


def unshare(flags: int) -> None:
    checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def join_namespace(descriptor: int, kind: int) -> None:
    checked(_libc.setns(ctypes.c_int(descriptor), ctypes.c_int(kind)), "setns")


def prctl(option: int, value: int, pointer: object = None) -> None:
    """Call prctl with one number, and a pointer if there is one. Raises: OSError."""
    third = ctypes.c_ulong(0) if pointer is None else pointer
    zero = ctypes.c_ulong(0)
    checked(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), third, zero, zero), "prctl")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    checked(
        _libc.mount(
            source.encode(),
            target.encode(),
            kind.encode() if kind else None,
            ctypes.c_ulong(flags),
            options.encode() if options else None,
        ),
        f"mount {target}",
    )


def unmount(target: str) -> None:
    checked(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def make_read_only(target: str, *, recursive: bool = True) -> None:
    """Mount what is mounted there read-only, without devices and without set-user-ID. Needs Linux 5.12."""
    flags = _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | (_MOUNT_ATTR_NODEV if recursive else 0)
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)
    syscall(
        f"mount_setattr {target}",
        _NUMBERS["mount_setattr"][0],
        _AT_FDCWD,
        ctypes.c_char_p(target.encode()),
        _AT_RECURSIVE if recursive else 0,
        ctypes.byref(attributes),
        ctypes.sizeof(attributes),
    )


def pivot_root_here() -> None:
    """Make the working directory the root directory, and unmount the old one."""
    assert ARCHITECTURE is not None
    syscall("pivot_root", _NUMBERS["pivot_root"][ARCHITECTURE], ctypes.c_char_p(b"."), ctypes.c_char_p(b"."))
    unmount(".")
    os.chdir("/")


def drop_capabilities() -> None:
    """Give up every privilege that is not the user's own, for good together with `no_new_privs`."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    checked(_libc.capset(ctypes.byref(header), ctypes.byref(none)), "capset")
