"""The operators that a group keeps, by name, shape and device: those longest unused go first, and those of captured CUDA graphs stay."""

from __future__ import annotations

import collections
import ctypes
import sys
from typing import TYPE_CHECKING, Optional

from . import _c
from ._progress import Progress
from .errors import Error, ErrorCode

if TYPE_CHECKING:
    from .group import Group

#: Operators that a group keeps, besides those of captured graphs.
OPERATORS_MAX = 128


class Operator:
    """One operator of the library; `room` is the most rows, tokens or positions of a launch."""

    def __init__(self, group: Group, name: str, shape: dict[str, int], room: int, executor: int) -> None:
        struct, room_field = _c.SHAPES[name]
        tuning = group.tuning.as_c(executor, group.wait_timeout_ms)
        fields = {room_field: room, **shape}
        if "rows_per_token" in fields:
            fields["rows_max"] = room * fields.pop("rows_per_token")
        filled = struct(tuning=ctypes.pointer(tuning), **fields)
        self.room = room
        self.launched = False
        #: A CUDA graph may launch it again at any time.
        self.captured = False
        self.workspace_bytes = ctypes.c_uint64()
        self.handle: Optional[ctypes.c_void_p] = ctypes.c_void_p()
        arguments = (group.handle, name.encode(), ctypes.byref(filled))
        _c.call("mk_op_workspace_bytes", *arguments, ctypes.byref(self.workspace_bytes), rank=group.rank)
        _c.call("mk_op_create", *arguments, ctypes.byref(self.handle), rank=group.rank)

    def destroy(self) -> None:
        handle, self.handle = self.handle, None
        if handle:
            _c.library().mk_op_destroy(handle)


class Kept(collections.OrderedDict[tuple, Operator]):
    """Operators by (name, shape, device), the one longest unused first. All ranks make the same calls, so all keep and drop alike."""

    def __init__(self) -> None:
        super().__init__()
        #: Captured operators whose place one with more room has taken, and their keys.
        self.outgrown: list[tuple[tuple, Operator]] = []

    def all(self) -> list[tuple[tuple, Operator]]:
        """All that live, and their keys."""
        return [*self.outgrown, *self.items()]

    def operator(self, group: Group, name: str, shape: dict[str, int], room: int, device: int) -> Operator:
        """The operator of that name, shape and device, with that much room or more, for the launch that follows."""
        key = (name, tuple(shape.items()), device)
        if _c.SHAPES[name][1] == "m_max":
            room = max(room, group.rows_max)
        operator = self.get(key)
        if operator is not None and operator.room < room:
            del self[key]
            if operator.captured:
                self.outgrown.append((key, operator))
            else:
                operator.destroy()
            operator = None
        if operator is None:
            while sum(not one.captured for one in self.values()) >= OPERATORS_MAX:
                self._drop_longest_unused()
            with Progress(f"{name} of {group!r} takes its memory", group.rank):
                operator = self[key] = self._created(group, name, shape, room, device)
        operator.captured = operator.captured or under_capture(device)
        self.move_to_end(key)
        return operator

    def _created(self, group: Group, name: str, shape: dict[str, int], room: int, device: int) -> Operator:
        """A new operator. Where there is no room for it, those longest unused go: all ranks hear of that, and do alike."""
        while True:
            try:
                return Operator(group, name, shape, room, _c.CPU if device < 0 else _c.CUDA)
            except Error as error:
                if error.code != ErrorCode.LIMIT_EXCEEDED:
                    raise
                if not self._drop_longest_unused():
                    if not (captured := len(self.all())):
                        raise
                    raise Error(
                        error.code,
                        f"{error.sentence}. CUDA graphs have captured {captured} operators of group '{group.name}', which keep their memory: "
                        "capture fewer, or shut the group down together with its graphs",
                        error.rank,
                    ) from None
                group.barrier()  # what an operator had is free again when all ranks have destroyed it

    def _drop_longest_unused(self) -> bool:
        """Destroys one operator; False where graphs have captured all."""
        key = next((key for key, operator in self.items() if not operator.captured), None)
        if key is None:
            return False
        self.pop(key).destroy()
        return True

    def destroy(self) -> None:
        """Destroys all, the newest first."""
        while self:
            self.popitem()[1].destroy()
        while self.outgrown:
            self.outgrown.pop()[1].destroy()


def under_capture(device: int) -> bool:
    """Whether a CUDA graph captures what the current stream is given. Tensors on GPUs are PyTorch's, and so is the stream."""
    torch = sys.modules.get("torch")
    return device >= 0 and torch is not None and torch.cuda.is_current_stream_capturing()
