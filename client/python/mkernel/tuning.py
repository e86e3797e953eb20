"""What a group may choose of its operators, in place of what the library would."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Optional

from . import _c


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Choices for every operator of a group; 0 leaves one to the library. All ranks give the same.

    `tile_m`, `tile_n` and `chunk_bytes` cut the work. The `_sms` are SMs on a GPU and threads on CPUs, by role. The rates stand for those of the
    machine file. `batch_invariant`: a row's bits do not depend on how many rows there are, for every operator, on GPUs and on CPUs.
    For attention that is so with equal length of the sequence and equal tiles. `count_nonfinite` fills in `LaunchStats.nonfinite_partials`, on CPUs.

    Operators are planned by `machine_file`, which ``mkbench calibrate`` writes, and `tuned_file`, which ``mkbench tune`` does; without them by what
    MKERNEL_MACHINE and MKERNEL_TUNED name, else by what is shipped. `exchange` is GEMM+AllReduce's over three nodes or more: 0 leaves it to the
    planner, 1 is one-shot, 2 two-shot. `partition` 1 lets the threads or SMs of a rank change between products and what they share or sum
    within the node, between tasks or between launches (adaptive); 0 keeps them in their roles. `transport` is Ring Attention's and MoE
    Dispatch's on GPUs, within a node: 0 leaves it to the planner, 1 is copy engines, 2 SMs.
    """

    tile_m: int = 0
    tile_n: int = 0
    chunk_bytes: int = 0
    compute_sms: int = 0
    reduce_sms: int = 0
    send_sms: int = 0
    receive_sms: int = 0
    share_sms: int = 0
    pull_sms: int = 0
    count_nonfinite: bool = False
    batch_invariant: bool = False
    flops_per_s: float = 0.0
    local_bytes_per_s: float = 0.0
    network_bytes_per_s: float = 0.0
    command_ns: float = 0.0
    step_ns: float = 0.0
    machine_file: Optional[str] = None
    tuned_file: Optional[str] = None
    exchange: int = 0
    partition: int = 0
    transport: int = 0

    def as_c(self, executor: int, wait_timeout_ms: int) -> Any:
        """The library's struct."""
        fields = {name: os.fsencode(value) if isinstance(value, str) else value for name, value in dataclasses.asdict(self).items()}
        return _c.Tuning(executor=executor, wait_timeout_ms=wait_timeout_ms, **fields)
