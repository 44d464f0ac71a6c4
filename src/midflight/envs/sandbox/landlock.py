"""Landlock: a process gives up all files except those below named directories. For machines without namespaces."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

from midflight.envs.sandbox import linux

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _RULE_PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_FILE_RIGHTS_BY_VERSION = (13, 14, 15, 15, 16)  # number of rights on files that each version knows
_NETWORK_VERSION, _NETWORK_RIGHTS = 4, 0b11  # bind and connect by TCP
_SCOPE_VERSION, _SCOPES = 6, 0b11  # abstract sockets and signals stay inside


def version() -> int:
    """Version of Landlock in this kernel; 0 without Landlock."""
    if not linux.IS_LINUX or linux.ARCHITECTURE is None:
        return 0
    try:
        return linux.syscall("landlock_create_ruleset", _CREATE_RULESET, ctypes.c_void_p(None), 0, _VERSION_FLAG)
    except OSError:
        return 0


def restrict(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Keep this process to these directories and files, for good. Needs `no_new_privs`. Raises: OSError."""
    known = version()
    rights = (1 << _FILE_RIGHTS_BY_VERSION[min(known, len(_FILE_RIGHTS_BY_VERSION)) - 1]) - 1
    network = _NETWORK_RIGHTS if known >= _NETWORK_VERSION else 0
    scopes = _SCOPES if known >= _SCOPE_VERSION else 0
    attributes = struct.pack("QQQ", rights, network, scopes)
    size = 8 if known < _NETWORK_VERSION else 16 if known < _SCOPE_VERSION else 24
    ruleset = linux.syscall("landlock_create_ruleset", _CREATE_RULESET, ctypes.c_char_p(attributes), size, 0)
    try:
        for path in readable:
            _allow(ruleset, path, _READ_FILE | (_READ_DIR | _EXECUTE if os.path.isdir(path) else 0))
        for path in writable:
            _allow(ruleset, path, rights & ~_EXECUTE if os.path.isdir(path) else _READ_FILE | _WRITE_FILE)
        linux.syscall("landlock_restrict_self", _RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, descriptor)
        linux.syscall("landlock_add_rule", _ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.c_char_p(rule), 0)
    finally:
        os.close(descriptor)
