"""Processes that end with the one that started them, however that ends: also by SIGKILL, which no handler sees.

    python -I -S _with_parent.py PARENT COMMAND...     becomes COMMAND; the kernel kills it when process PARENT ends

The kernel watches the thread that started the process: it must live as long as the process should.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Has the kernel kill this process when `parent`, which started it, ends; at once if it has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def command(*words: str) -> list[str]:
    """The command that runs `words` in a process that ends with this one."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *words]


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"{sys.argv[2]}: {error.strerror}")
