"""Confinement of jobs: the strongest kind that the kernel permits, found out by trying.

| kind       | files                                | network                | processes                              |
|------------|--------------------------------------|------------------------|----------------------------------------|
| namespaces | a private root directory, read-only  | an empty namespace     | none can be made; others are invisible |
| landlock   | only named directories               | no sockets             | none can be made, none gets a signal   |
| limits     | not protected                        | not protected          | none can be made, unless run by root   |

The first two kinds also filter system calls. Namespaces work for root, and for other users where the kernel lets them
make user namespaces.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from midflight.envs.sandbox import landlock, linux, seccomp

NAMESPACES, LANDLOCK, LIMITS = "namespaces", "landlock", "limits"
MAX_FILE_MB = 64  # largest file and output; with namespaces, also the size of the private directory
_MAX_DESCRIPTORS = 64
_TRIAL_BYTES = 1 << 40
_NOBODY = 65534
_SCRATCH = "/scratch"  # in a private root directory, where /tmp leads to it
_NEW_ROOT = "/proc"  # covered by the new root directory; nothing that jobs may see is below
_MAX_TASKS = 512  # threads; counted by user, so it limits all jobs of one user namespace, or of nobody
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib", "/nix/store")
_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")


@dataclass
class Confinement:
    """The kind of confinement of one worker's jobs, and the means that it takes.

    A worker calls `enter` once; each job calls `begin_job` before any generated code runs.
    """

    kind: str
    with_packages: bool = False  # installed packages can be imported, besides the standard library
    as_root: bool = False  # the worker is root, so no user namespace is needed
    _scratch: str = field(default=_SCRATCH, init=False)

    @classmethod
    def strongest(cls, with_packages: bool, without: Collection[str] = ()) -> Confinement:
        """Return the strongest kind that works here, except kinds in `without`."""
        if seccomp.is_available():
            if NAMESPACES not in without:
                for as_root in (True, False) if os.geteuid() == 0 and "root" not in without else (False,):
                    confinement = cls(NAMESPACES, with_packages, as_root)
                    if _works(confinement):
                        return confinement
            if LANDLOCK not in without and _works(confinement := cls(LANDLOCK, with_packages)):
                return confinement
        return cls(LIMITS, with_packages)

    def protections(self) -> dict[str, str]:
        """The kind, and the protection of each resource in words; "" for a resource that is not protected."""
        no_processes = "none can be made (seccomp)"
        by_kind = {
            NAMESPACES: (
                "private root directory (mount namespace)",
                "no interfaces and no sockets (network namespace, seccomp)",
                f"{no_processes}, others are invisible (PID namespace)",
            ),
            LANDLOCK: (
                f"only Python's libraries and a private directory (Landlock {landlock.version()})",
                "no sockets (seccomp)",
                f"{no_processes}, others get no signals (seccomp)",
            ),
            LIMITS: ("", "", "" if os.geteuid() == 0 else "none can be made (RLIMIT_NPROC)"),
        }
        files, network, processes = by_kind[self.kind]
        memory = "address space of the process (RLIMIT_AS)" if linux.IS_LINUX else ""
        return {
            "kind": self.kind,
            "files": files,
            "network": network,
            "processes": processes,
            "memory": memory,
            "time": "wall time, and CPU time (RLIMIT_CPU)",
        }

    def enter(self) -> None:
        """Move the worker into its namespaces; jobs inherit them. Raises: OSError."""
        if self.kind != NAMESPACES:
            return
        user, group = os.geteuid(), os.getegid()
        flags = linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWPID
        linux.unshare(flags | (0 if self.as_root else linux.CLONE_NEWUSER))
        if not self.as_root:
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"{_NOBODY} {user} 1")
            _write("/proc/self/gid_map", f"{_NOBODY} {group} 1")
        _start_init()

    def change_root(self) -> None:
        """Leave all directories except the libraries of Python, for good. Raises: OSError."""
        if self.kind != NAMESPACES:
            return
        linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
        paths = self._readable()
        linux.mount("tmpfs", _NEW_ROOT, "tmpfs", linux.MS_NOSUID, "size=1m,mode=755")
        for path in paths:
            _show(path, _NEW_ROOT)
        os.mkdir(_NEW_ROOT + _SCRATCH)
        if not os.path.exists(_NEW_ROOT + "/tmp"):
            os.symlink(_SCRATCH, _NEW_ROOT + "/tmp")
        os.chdir(_NEW_ROOT)
        linux.pivot_root_here()
        linux.make_read_only("/", recursive=False)

    def begin_job(self, memory_bytes: int, cpu_s: int) -> None:
        """Confine this process, for good. Raises: OSError."""
        os.setsid()
        if self.kind == NAMESPACES:
            linux.unshare(linux.CLONE_NEWNS)
            flags = linux.MS_NOSUID | linux.MS_NODEV
            linux.mount("tmpfs", _SCRATCH, "tmpfs", flags, f"size={MAX_FILE_MB}m,nr_inodes=4096,mode=777")
        os.chdir(self._scratch)
        os.environ["HOME"] = os.environ["TMPDIR"] = tempfile.tempdir = self._scratch
        max_tasks = {NAMESPACES: _MAX_TASKS, LIMITS: 0}.get(self.kind)
        _limit(memory_bytes, cpu_s, max_tasks)
        if self.as_root:
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        if linux.IS_LINUX:
            linux.drop_capabilities()
            linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        if self.kind == LANDLOCK:
            landlock.restrict(self._readable(), [self._scratch, "/dev/null"])
        if self.kind != LIMITS:
            seccomp.install(os.getpid())

    @contextlib.contextmanager
    def scratch_directory(self) -> Iterator[None]:
        """Make the private directory of one job outside namespaces, where each job mounts its own."""
        if self.kind == NAMESPACES:
            yield
            return
        self._scratch = tempfile.mkdtemp(prefix="midflight-sandbox-")
        try:
            yield
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _readable(self) -> list[str]:
        """Directories and files that jobs can read."""
        paths = [*_LIBRARIES, *_FILES, *_DEVICES]
        paths += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
        paths += [os.path.join(sys.base_prefix, name) for name in ("lib", "lib64")]
        if self.with_packages:
            paths += [sysconfig.get_path(name) for name in ("purelib", "platlib")]
        unique = [path for path in dict.fromkeys(paths) if os.path.exists(path)]
        return [path for path in unique if not any(path.startswith(other + "/") for other in unique)]


def _works(confinement: Confinement) -> bool:
    """Try everything in another process, because a process cannot leave a namespace again."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            confinement.enter()
            confinement.change_root()
            with confinement.scratch_directory():
                job = os.fork()
                if job == 0:
                    _try_job(confinement)
                status = os.waitpid(job, 0)[1]
            os._exit(os.waitstatus_to_exitcode(status))
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _try_job(confinement: Confinement) -> NoReturn:
    with contextlib.suppress(BaseException):
        confinement.begin_job(_TRIAL_BYTES, cpu_s=60)
        os._exit(0)
    os._exit(1)


def _start_init() -> None:
    """Start the first process of the new PID namespace. When it ends, with the worker, the kernel kills all others."""
    if os.fork() == 0:
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.closerange(0, 256)
        while True:
            signal.pause()


def _show(path: str, root: str) -> None:
    """Mount a directory or file read-only at the same path below the new root; copy a symbolic link."""
    inside = root + path
    os.makedirs(os.path.dirname(inside), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), inside)
        return
    if os.path.isdir(path):
        os.mkdir(inside)
    else:
        os.close(os.open(inside, os.O_CREAT, 0o644))
    linux.mount(path, inside, None, linux.MS_BIND | linux.MS_REC)
    if path not in _DEVICES:
        linux.make_read_only(inside)


def _limit(memory_bytes: int, cpu_s: int, max_tasks: int | None) -> None:
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: MAX_FILE_MB << 20,
        resource.RLIMIT_NOFILE: _MAX_DESCRIPTORS,
        resource.RLIMIT_CORE: 0,
    }
    if linux.IS_LINUX:
        limits[resource.RLIMIT_AS] = memory_bytes
    if max_tasks is not None:
        limits[resource.RLIMIT_NPROC] = max_tasks
    for name, value in limits.items():
        _, highest = resource.getrlimit(name)
        allowed = value if highest == resource.RLIM_INFINITY else min(value, highest)
        resource.setrlimit(name, (allowed, allowed))


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
