"""Generated code that attacks the machine it runs on. Each attack fails with an exception, or runs into a limit."""

from __future__ import annotations

from pathlib import Path

SECRET = "a secret of the grading process"


def attacks(directory: Path, port: int, victim: int) -> dict[str, str]:
    """Return the code of each attack.

    `directory` is a directory outside the sandbox, `port` a port of this machine that accepts connections, and `victim`
    the id of a process of the same user.
    """
    return {
        "fork bomb": "import os\nwhile True:\n    os.fork()",
        "fork bomb that ignores errors": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "threads without end": (
            "import threading, time\nthreading.stack_size(32768)\n"
            "while True:\n    threading.Thread(target=time.sleep, args=(1000,)).start()"
        ),
        "allocation of 10 GiB": "data = bytearray(10 << 30)\nfor i in range(0, len(data), 4096): data[i] = 1",
        "memory through files": (
            "files = [open(f'{i}', 'wb') for i in range(50)]\n"
            "for i in range(1000): files[i % 50].write(bytes(1 << 24))\nassert len(files) < 50"
        ),
        "endless loop": "while True: pass",
        "output without end": "while True: print('x' * 1_000_000)",
        "writing outside": f"open({str(directory / 'written')!r}, 'w').write('x')",
        "writing through ctypes": (
            "import ctypes\nlibc = ctypes.CDLL(None)\n"
            f"assert libc.open({str(directory / 'written')!r}.encode(), 0o101, 0o600) >= 0"
        ),
        "changing modes of files": f"import os\nos.chmod({str(directory)!r}, 0)",
        "reading files": f"assert {SECRET!r} in open({str(directory / 'secret')!r}).read()",
        "reading the environment of another process": f"open('/proc/{victim}/environ', 'rb').read()",
        "secrets in its own environment": f"import os\nassert {SECRET!r} in os.environ.values()",
        "opening sockets": f"import socket\nsocket.create_connection(('127.0.0.1', {port}))",
        "opening sockets through ctypes": (
            "import ctypes\nlibc = ctypes.CDLL(None)\nassert libc.socket(2, 1, 0) >= 0 or libc.socket(1, 1, 0) >= 0"
        ),
        "killing its parent": "import os\nos.kill(os.getppid(), 9)",
        "killing all processes": "import os\nos.kill(-1, 9)",
        "killing the grading process": f"import os\nos.kill({victim}, 9)",
        "limits for the grading process": (f"import resource\nresource.prlimit({victim}, resource.RLIMIT_CPU, (1, 1))"),
        "running programs": "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'true'], check=True)",
        "new namespaces": "import ctypes\nlibc = ctypes.CDLL(None)\nassert libc.unshare(0x10000000) == 0",
        "ending without tests": "import os\nos._exit(0)",
        "a crash of the interpreter": "import ctypes\nctypes.string_at(0)",
        "an attack on the results": "import os\nos.write(3, b'1' * 64)\nos._exit(0)",
    }
