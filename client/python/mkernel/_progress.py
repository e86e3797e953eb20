"""What takes long is said on a terminal: one line that counts the seconds, and stays when it is over."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any, Optional

#: What is over sooner is not worth a line.
DELAY_S = 0.5


class Progress:
    """``with Progress("what is being done", rank):`` writes to standard error if it is a terminal, on rank 0 alone."""

    def __init__(self, what: str, rank: Optional[int]) -> None:
        self._what = what
        self._stream: Any = sys.stderr
        self._on = rank in (None, 0) and self._stream is not None and self._stream.isatty()
        self._over = threading.Event()
        self._thread: Optional[threading.Thread] = None

    def __enter__(self) -> Progress:
        if self._on:
            self._began = time.monotonic()
            self._thread = threading.Thread(target=self._count, name="mkernel progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        if self._thread is None:
            return
        self._over.set()
        self._thread.join()
        if time.monotonic() - self._began >= DELAY_S:
            self._say("" if error is None else ", and failed", "\n")

    def _count(self) -> None:
        pause = DELAY_S
        while not self._over.wait(pause):
            self._say(" ...", "")
            pause = 1.0

    def _say(self, how: str, end: str) -> None:
        try:
            self._stream.write(f"\r\x1b[Kmkernel: {self._what}: {time.monotonic() - self._began:.1f} s{how}{end}")
            self._stream.flush()
        except (OSError, ValueError):  # the terminal is gone: that is no reason to fail
            pass
