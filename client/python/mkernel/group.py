"""Groups: the ranks that compute together, each attached to its node's daemon.

`init` attaches this process and registers the group under a name; operators find it by that name.
A group keeps the operators it has made (kept.py).
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import os
import sys
import threading
from typing import Any, Callable, Optional, Sequence, Union

from . import _c
from ._progress import Progress
from .errors import Error, ErrorCode, invalid
from .kept import Kept, Operator
from .tuning import Tuning

#: Of all ranks' parts of one `Group.exchange`, and of one part: a little less than the library's limits.
_EXCHANGE_BYTES = 4000 * 1024
_BLOB_BYTES = 60 * 1024
_MODES = {"auto": _c.AUTO, "fused": _c.FUSED, "unfused": _c.UNFUSED}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a rank is in its job. Ranks are node-major: rank = node_rank * local_size + local_rank."""

    rank: int
    world: int
    node_rank: int
    nodes: int
    local_rank: int
    local_size: int

    @classmethod
    def of_rank(cls, rank: int, nodes: int, local_size: int) -> Place:
        """The place of a rank on `nodes` nodes of `local_size` ranks each."""
        return cls(rank, nodes * local_size, rank // local_size, nodes, rank % local_size, local_size)


@dataclasses.dataclass(frozen=True)
class LaunchStats:
    """What one launch did on this rank; times in nanoseconds. `fused` is how it ran."""

    epoch: int
    fused: bool
    total_ns: int
    compute_ns: int
    compute_wait_ns: int
    network_bytes: int
    network_commands: int
    nonfinite_partials: int = 0
    #: An adaptive partition: threads (SMs) that were to communicate at the begin and in the end, and how often that changed. `partition_turns`: how
    #: often a thread went over to the other kind of task.
    partition_first: int = 0
    partition_last: int = 0
    partition_moves: int = 0
    partition_turns: int = 0


class Group:
    """The ranks of one job, as this rank sees them. Made by `init`; usable until `shutdown`.

    `mode` is how launches run: "auto", "fused" or "unfused". It may be set between launches, on all ranks alike. So may `tag`, a number that traces
    name launches by.
    """

    def __init__(
        self,
        name: str,
        handle: ctypes.c_void_p,
        wait_timeout: float,
        process_group: Any = None,
        tuning: Tuning = Tuning(),
        rows_max: int = 0,
    ) -> None:
        self.name = name
        self.mode = "auto"
        self.tag = 0
        self.tuning = tuning
        self.rows_max = rows_max
        self.process_group = process_group
        #: The ranks of the launch that form the group, in its order; None where `init` was given a place, whose numbers may be others.
        self.ranks: Optional[tuple[int, ...]] = None
        self.wait_timeout_ms = _milliseconds(wait_timeout)
        self._handle: Optional[ctypes.c_void_p] = handle
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._operators = Kept()
        self.last_launch: Optional[LaunchStats] = None
        place = _c.Place()
        _c.call("mk_session_place", handle, ctypes.byref(place))
        self.place = Place(place.rank, place.world, place.node_rank, place.nodes, place.local_rank, place.local_size)
        self.fabric = _c.library().mk_session_fabric(handle).decode()

    def __repr__(self) -> str:
        state = "" if self._handle else ", closed"
        return f"<mkernel.Group {self.name!r}: rank {self.rank} of {self.world}, {self.place.nodes} nodes, {self.fabric}{state}>"

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world(self) -> int:
        return self.place.world

    @property
    def handle(self) -> ctypes.c_void_p:
        """The C session."""
        if self._process != os.getpid():
            raise Error(
                ErrorCode.UNSUPPORTED,
                f"group '{self.name}' belongs to process {self._process}, and this is its child of fork(): call "
                "mkernel.init() here, with another job name",
                self.rank,
            )
        if self._handle is None:
            raise Error(ErrorCode.UNAVAILABLE, f"group '{self.name}' is closed: call mkernel.init() again", self.rank)
        return self._handle

    def rows(self, m: int) -> tuple[int, int]:
        """(first, count): the rows of m that this rank has in a matrix dealt out by rows."""
        return _c.rows_of_rank(m, self.world, self.rank)

    def check(self) -> None:
        """Raises why the group, or a launch on a GPU that has ended, failed. Does not wait."""
        _c.call("mk_session_status", self.handle, rank=self.rank)
        with self._lock:
            for _, operator in self._operators.all():
                _c.call("mk_op_status", operator.handle, rank=self.rank)

    def barrier(self, timeout: float = 60.0) -> None:
        """Returns when every rank of the group has called it."""
        _c.call("mk_session_barrier", self.handle, _milliseconds(timeout), rank=self.rank)

    def exchange(self, tag: str, blob: bytes, timeout: float = 60.0) -> list[bytes]:
        """An all-gather of small blobs, by rank; `tag` is the same on all ranks. At most 64 KiB a blob."""
        blobs = ctypes.c_void_p()
        _c.call(
            "mk_session_exchange", self.handle, tag.encode(), blob, len(blob), _milliseconds(timeout), ctypes.byref(blobs), rank=self.rank
        )
        try:
            gathered = []
            for rank in range(self.world):
                size = ctypes.c_uint64()
                data = _c.library().mk_blobs_at(blobs, rank, ctypes.byref(size))
                gathered.append(ctypes.string_at(data, size.value) if data else b"")
            return gathered
        finally:
            _c.library().mk_blobs_free(blobs)

    def sum_f32(self, values: Any, timeout: float = 60.0) -> Any:
        """The sum over the ranks, in rank order, of a small float32 NumPy array: biases, norms, losses.

        Every rank gets the same bits. The bytes go through the daemons' control plane in messages of
        60 KiB, so this is for kilobytes; large tensors are the operators' business.
        """
        import numpy

        values = numpy.asarray(values, dtype=numpy.float32)
        flat = values.ravel()
        total = numpy.zeros(flat.size, dtype=numpy.float32)
        with self._lock:
            step = (min(_BLOB_BYTES, _EXCHANGE_BYTES // self.world) - 8) // 4
            for first in range(0, flat.size, step):
                piece = slice(first, min(flat.size, first + step))
                for blob in self.exchange("mkernel.sum", flat[piece].tobytes(), timeout):
                    total[piece] += numpy.frombuffer(blob, dtype=numpy.float32)
        return total.reshape(values.shape)

    def launch(
        self,
        name: str,
        shape: dict[str, int],
        room: int,
        arguments: Any,
        *,
        device: int = -1,
        stream: int = 0,
        after: Optional[Callable[[Any], None]] = None,
    ) -> None:
        """Launches an operator. `shape` is its C struct without room; `arguments` is its C struct.

        `device` -1: on CPUs, and waits; else on that GPU's stream. `after` may then ask the operator about the launch.
        """
        if self.mode not in _MODES:
            raise invalid(f"the mode of group '{self.name}' is {self.mode!r}: there are {', '.join(_MODES)}", self.rank)
        mode, arguments.tag = _MODES[self.mode], self.tag
        with self._lock:
            operator = self._operators.operator(self, name, shape, room, device)
            stats = _c.LaunchStats()
            if operator.launched:
                self._call_launch(operator, arguments, device, stream, mode, stats)
            else:
                with Progress(f"{name} of {self!r} runs for the first time", self.rank):
                    self._call_launch(operator, arguments, device, stream, mode, stats)
                operator.launched = True
            if device >= 0:
                if after is not None:
                    after(operator.handle)
                return
            self.last_launch = LaunchStats(
                stats.epoch,
                stats.mode == _c.FUSED,
                stats.total_ns,
                stats.compute_ns,
                stats.compute_wait_ns,
                stats.network_bytes,
                stats.network_commands,
                stats.nonfinite_partials,
                stats.partition_first,
                stats.partition_last,
                stats.partition_moves,
                stats.partition_turns,
            )
            if after is not None:
                after(operator.handle)

    def _call_launch(self, operator: Operator, arguments: Any, device: int, stream: int, mode: int, stats: _c.LaunchStats) -> None:
        if device >= 0:
            _c.call("mk_op_launch_on", operator.handle, stream, ctypes.byref(arguments), mode, rank=self.rank)
        else:
            _c.call("mk_op_launch", operator.handle, ctypes.byref(arguments), mode, ctypes.byref(stats), rank=self.rank)

    def explain(self) -> str:
        """A description of the group and of what it keeps, to print."""
        place = self.place
        lines = [
            f"{self!r}",
            f"  library {_c.version()}, node {place.node_rank} of {place.nodes}, local rank {place.local_rank} of {place.local_size}",
        ]
        for (name, shape, device), operator in self._operators.all():
            where = "CPU" if device < 0 else f"GPU {device}"
            if operator.captured:
                where += ", kept for a captured graph"
            words = ", ".join(f"{field} {_said(field, value)}" for field, value in shape)
            room = _c.SHAPES[name][1]
            lines.append(f"  {name}: {room} {operator.room}, {words}, {where}, workspace {operator.workspace_bytes.value / 2**20:.1f} MiB")
        if self.last_launch is not None:
            last = self.last_launch
            lines.append(
                f"  last launch: {'fused' if last.fused else 'unfused'}, {last.total_ns / 1e6:.2f} ms, "
                f"{last.network_bytes} bytes to other nodes"
            )
        return "\n".join(lines)

    def close(self) -> None:
        """Frees the operators and leaves the job; also after a failure. Idempotent."""
        with self._lock:
            handle, self._handle = self._handle, None
            if handle is None:
                return
            self._operators.destroy()
            # A failed session answers that it failed; it is freed all the same.
            _c.library().mk_session_detach(handle)


_groups: dict[str, Group] = {}
_registry_lock = threading.Lock()
DEFAULT = "default"

GroupLike = Union[None, str, Group]


def init(
    group: Any = None,
    *,
    name: str = DEFAULT,
    job: Optional[str] = None,
    place: Optional[Place] = None,
    socket: Optional[str] = None,
    secret: Optional[bytes] = None,
    timeout: float = 60.0,
    wait_timeout: float = 30.0,
    tuning: Tuning = Tuning(),
    rows_max: int = 0,
) -> Group:
    """Attaches this process to its node's daemon, and returns when all ranks of the group have.

    The launcher's environment says where this rank is in the whole launch: torchrun, Slurm, Open MPI and
    others, or MKERNEL_*. A `place` says it instead, together with `job`.

    Without `group` all ranks of the launch form the group. Else it is a ProcessGroup or a one-dimensional
    DeviceMesh of torch.distributed, or a list of ranks in rising order. So one process may be in groups for
    tensor, context and expert parallelism side by side, each under its own `name`.

    `timeout` is for the whole group to come up, in seconds; `wait_timeout` is for each wait inside a
    launch. A daemon or a rank that is missing is an `Error` that names it. `tuning` is for all operators of the group.

    `rows_max`: products and collectives take the memory for so many rows of all ranks when they are first called. Without it they take it for
    the rows of that call, and are made anew, on all ranks, when a call has more.
    """
    if rows_max < 0:
        raise invalid(f"init with rows_max={rows_max}: it counts rows")
    with _registry_lock:
        if name in _groups:
            raise Error(
                ErrorCode.ALREADY_EXISTS, f"group '{name}' exists already: {_groups[name]!r}; call mkernel.shutdown() first, or give a name"
            )
    rank = place.rank if place else _rank_of_launcher()
    if place is not None and not job:
        raise invalid("init with a place needs the name of the job: job='...', the same on all ranks", rank)
    options = _c.AttachOptions(timeout_ms=_milliseconds(timeout))
    options.socket = socket.encode() if socket else None
    options.job = job.encode() if job else None
    if secret:
        options.job_secret, options.job_secret_bytes = ctypes.cast(ctypes.c_char_p(secret), ctypes.c_void_p), len(secret)
    for field in dataclasses.fields(place) if place else ():
        setattr(options, field.name, getattr(place, field.name))
    handle = ctypes.c_void_p()
    process_group, ranks = (None, None) if group is None else _ranks_of(group)
    with Progress(f"group '{name}' waits for its ranks and the links between their nodes", rank):
        if ranks is not None:
            listed = (ctypes.c_uint32 * len(ranks))(*ranks)
            tag = None if name == DEFAULT else name.encode()
            _c.call("mk_session_attach_group", ctypes.byref(options), place is None, listed, len(ranks), tag, ctypes.byref(handle), rank=rank)
        elif place is None:
            _c.call("mk_session_attach_from_environment", ctypes.byref(options), ctypes.byref(handle), rank=rank)
        else:
            _c.call("mk_session_attach", ctypes.byref(options), ctypes.byref(handle), rank=rank)
    made = Group(name, handle, wait_timeout, process_group, tuning, rows_max)
    if place is None:
        made.ranks = tuple(range(made.world) if ranks is None else ranks)
    with _registry_lock:
        _groups[name] = made
    return made


#: Where launchers say a process's rank; client/src/launcher_environment.cc has the whole story.
_RANK_VARIABLES = ("MKERNEL_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PALS_RANKID", "FLUX_TASK_RANK", "SLURM_PROCID")


def _rank_of_launcher() -> Optional[int]:
    """The rank that an error of `init` names, before the library knows it; None where nobody says it."""
    return next((int(said) for said in map(os.environ.get, _RANK_VARIABLES) if said and said.isdigit()), None)


def _ranks_of(group: Any) -> tuple[Any, list[int]]:
    """(torch.distributed's ProcessGroup or None, the ranks of the launch) of what `init` was given."""
    if isinstance(group, Sequence) and all(isinstance(rank, int) for rank in group):
        return None, list(group)
    if "torch" in sys.modules:
        from .torch.process_groups import ranks_of

        return ranks_of(group)
    raise invalid(f"init takes a ProcessGroup, a DeviceMesh of one dimension, or a list of ranks, not a {type(group).__name__}")


def get_group(group: GroupLike = None) -> Group:
    """The group of that name; without one, the default, or the only one that there is."""
    if isinstance(group, Group):
        return group
    # Without the lock: torch.compile reads this function, guards what it finds, and knows no locks.
    if group:
        if group in _groups:
            return _groups[group]
        for made in list(_groups.values()):  # by the name that torch.distributed gave its ProcessGroup
            if getattr(made.process_group, "group_name", None) == group:
                return made
    elif DEFAULT in _groups:
        return _groups[DEFAULT]
    elif len(only := list(_groups.values())) == 1:
        return only[0]
    known = ", ".join(sorted(_groups)) or "none"
    remedy = "name one of these by group=, or call mkernel.init()" if _groups else "call mkernel.init() first"
    raise invalid(f"no group '{group or DEFAULT}' (there are: {known}): {remedy}")


def groups() -> list[Group]:
    """The groups that there are."""
    with _registry_lock:
        return list(_groups.values())


def is_initialized(name: str = DEFAULT) -> bool:
    """Whether `init` has made a group of that name."""
    return name in _groups


def shutdown(group: GroupLike = None) -> None:
    """Leaves the job of that group, or of all groups, and frees what they keep; `init` may follow."""
    with _registry_lock:
        chosen = list(_groups.values()) if group is None else []
    if group is not None:
        chosen = [get_group(group)]
    for made in chosen:
        made.close()
        with _registry_lock:
            if _groups.get(made.name) is made:
                del _groups[made.name]


def explain(group: GroupLike = None) -> str:
    """What a group is, which operators it keeps, and what its last launch did."""
    return get_group(group).explain()


def _said(field: str, value: int) -> Any:
    """A shape's number, in words where it stands for one."""
    words = {
        "dtype": {_c.BF16: "bf16", _c.F16: "f16"},
        "b_layout": {_c.KN: "k x n", _c.NK: "n x k"},
        "activation": {1: "relu", 2: "gelu", 3: "silu", 4: "gated silu"},
        "partials": {_c.PARTIALS_F32: "f32"},
    }
    return words.get(field, {}).get(value, value)


def _milliseconds(seconds: float) -> int:
    if not seconds > 0:
        raise invalid(f"a time limit of {seconds} s: it must be more than 0")
    return max(1, min(int(seconds * 1000), 2**32 - 1))


def _forget_in_child() -> None:
    """A child of fork() has no groups: the sessions are its parent's, and go on there."""
    global _registry_lock
    _registry_lock = threading.Lock()
    _groups.clear()


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(shutdown)
