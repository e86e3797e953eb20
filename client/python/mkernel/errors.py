"""Errors: one exception class with the library's stable code, the rank, and the sentence."""

from __future__ import annotations

import enum
from typing import Any, Optional


class ErrorCode(enum.IntEnum):
    """The numbers of shm/error_code.h; a number is never reused."""

    OK = 0
    INVALID_ARGUMENT = 1
    ABI_MISMATCH = 2
    PROTOCOL = 3
    NOT_FOUND = 4
    ALREADY_EXISTS = 5
    LIMIT_EXCEEDED = 6
    PERMISSION = 7
    UNAVAILABLE = 8
    TIMEOUT = 9
    ABORTED = 10
    BAD_COMMAND = 11
    LINK_DOWN = 12
    DAEMON_LOST = 13
    PEER_LOST = 14
    SHAPE_MISMATCH = 15
    SYSTEM = 16
    UNSUPPORTED = 17
    DRAINING = 18
    INTERNAL = 19

    @property
    def label(self) -> str:
        """The stable name, for example "peer-lost"."""
        return self.name.lower().replace("_", "-")


class Error(RuntimeError):
    """A call of mkernel failed.

    ``code`` says what kind of failure it was, ``sentence`` what failed and what to do, and ``rank``
    which rank says so; None where no rank is known yet.
    """

    def __init__(self, code: int, sentence: str, rank: Optional[int] = None) -> None:
        try:
            self.code: int = ErrorCode(code)
            label = ErrorCode(code).label
        except ValueError:  # a later library
            self.code, label = code, f"code {code}"
        self.sentence = sentence
        self.rank = rank
        where = "" if rank is None else f"rank {rank}: "
        super().__init__(f"{where}{sentence} [{label}]")

    def __reduce__(self) -> tuple:
        return (type(self), (int(self.code), self.sentence, self.rank))


class RankFailed(RuntimeError):
    """A rank of ``LocalCluster.run`` failed.

    ``failures`` has the report of each rank that did, ``answers`` what the other ranks returned.
    """

    def __init__(self, message: str, failures: dict[int, str], answers: Optional[dict[int, Any]] = None) -> None:
        super().__init__(message)
        self.failures = failures
        self.answers = answers or {}

    def __reduce__(self) -> tuple:
        return (type(self), (self.args[0], self.failures, self.answers))


def invalid(sentence: str, rank: Optional[int] = None) -> Error:
    """The error of a wrong argument."""
    return Error(ErrorCode.INVALID_ARGUMENT, sentence, rank)
