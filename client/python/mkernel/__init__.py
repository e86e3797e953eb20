"""mkernel: fused multi-GPU operators for NumPy and PyTorch.

    import mkernel
    mkernel.init()                                # torchrun, srun, mpirun
    y = mkernel.ag_gemm(x, w)                     # (all ranks' rows of x) w

On one machine without any daemon:

>>> import numpy, mkernel
>>> def on_every_rank():
...     group = mkernel.init()
...     a = numpy.full((2, 4), group.rank, numpy.float16)
...     return mkernel.gemm_ar(a, numpy.ones((4, 8), numpy.float16))[0, 0]
>>> with mkernel.local_cluster(nodes=2, local=2) as cluster:
...     print([float(sum_) for sum_ in cluster.run(on_every_rank)])
[24.0, 24.0, 24.0, 24.0]

PyTorch's operators, gradients and modules are in `mkernel.torch`, which is imported when it is asked for. `mkernel.attention` and the
layers are there, too.
"""

import importlib
from typing import Any

from ._version import __version__
from .arrays import from_bf16, to_bf16
from .errors import Error, ErrorCode, RankFailed
from .group import Group, LaunchStats, Place, explain, get_group, init, is_initialized, shutdown
from .local import LocalCluster, local_cluster
from .moe import Routed, gemm_combine, gemm_combine_backward, moe_dispatch_gemm, moe_dispatch_gemm_backward
from .operators import (
    ag_gemm,
    ag_gemm_backward,
    all_gather,
    copy_gemm_backward,
    gemm_ar,
    gemm_ar_backward,
    gemm_rs,
    gemm_rs_backward,
    reduce_scatter,
)
from .packed import packed_rows, ring_attention_packed
from .ring import ring_attention, ring_attention_backward, sequence_rows
from .tuning import Tuning

#: What needs PyTorch, which is imported when one of these is asked for.
_OF_TORCH = ("ColumnParallelLinear", "ColwiseParallel", "MoELayer", "RowParallelLinear", "RowwiseParallel", "attention")


def __getattr__(name: str) -> Any:
    if name == "torch":
        return importlib.import_module("mkernel.torch")
    if name in _OF_TORCH:
        return getattr(importlib.import_module("mkernel.torch"), name)
    raise AttributeError(f"module 'mkernel' has no attribute '{name}'")


__all__ = [
    "Error",
    "ErrorCode",
    "Group",
    "LaunchStats",
    "LocalCluster",
    "Place",
    "RankFailed",
    "Routed",
    "Tuning",
    "__version__",
    "ag_gemm",
    "ag_gemm_backward",
    "all_gather",
    "copy_gemm_backward",
    "explain",
    "from_bf16",
    "gemm_ar",
    "gemm_ar_backward",
    "gemm_combine",
    "gemm_combine_backward",
    "gemm_rs",
    "gemm_rs_backward",
    "get_group",
    "init",
    "is_initialized",
    "local_cluster",
    "moe_dispatch_gemm",
    "moe_dispatch_gemm_backward",
    "packed_rows",
    "reduce_scatter",
    "ring_attention",
    "ring_attention_backward",
    "ring_attention_packed",
    "sequence_rows",
    "shutdown",
    "to_bf16",
]
