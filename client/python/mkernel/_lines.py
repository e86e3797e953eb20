"""Output of several processes at once, line by line: nobody writes within another's line."""

from __future__ import annotations

import os
import selectors
import threading

#: A line without an end is passed on when it has become so long.
_LINE_BYTES_MAX = 1 << 16


class LineForwarder:
    """Passes on all that comes through its pipes, as whole lines. A line ends with a newline or, as of a progress bar, with a
    carriage return. Its thread ends with `close`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._stop, self._stopped = os.pipe()
        self._selector.register(self._stop, selectors.EVENT_READ)
        self._kept: dict[int, bytes] = {}
        self._thread = threading.Thread(target=self._run, name="mkernel lines", daemon=True)

    def pipe(self, target: int) -> int:
        """A descriptor to write to, the caller's; what comes there goes to the descriptor `target`. Before `start`."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._selector.register(reading, selectors.EVENT_READ, target)
        self._kept[reading] = b""
        return writing

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Passes on what has been written so far, though others may hold the pipes open. Idempotent."""
        if self._stopped < 0:
            return
        os.close(self._stopped)
        self._stopped = -1
        if self._thread.ident is not None:
            self._thread.join()
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()

    def _run(self) -> None:
        stopping = False
        while len(self._kept) > 0:
            ready = self._selector.select(0 if stopping else None)
            if stopping and not ready:
                break
            for key, _ in ready:
                if key.fd == self._stop:
                    stopping = True
                    self._selector.unregister(self._stop)
                    os.close(self._stop)
                elif not self._forward(key.fd, key.data):
                    self._end(key.fd, key.data)
        for reading in list(self._kept):
            self._end(reading, self._selector.get_key(reading).data)

    def _forward(self, reading: int, target: int) -> bool:
        """Of one pipe; whether there may be more."""
        try:
            said = os.read(reading, _LINE_BYTES_MAX)
        except BlockingIOError:
            return True
        text = self._kept[reading] + said
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if len(text) - end >= _LINE_BYTES_MAX:
            end = len(text)
        self._kept[reading] = text[end:]
        return len(said) > 0 and _write(target, text[:end])

    def _end(self, reading: int, target: int) -> None:
        left = self._kept.pop(reading)
        _write(target, left + b"\n" if left else b"")
        self._selector.unregister(reading)
        os.close(reading)


def _write(target: int, text: bytes) -> bool:
    """False: nobody reads that any more, and the processes shall hear so."""
    try:
        while text:
            text = text[os.write(target, text) :]
    except BrokenPipeError:
        return False
    return True
