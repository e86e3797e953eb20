"""mkernel for PyTorch: operators with gradients, modules, styles for parallelize_module, async tensor parallelism.

The operators are `torch.ops.mkernel.ag_gemm`, `gemm_rs`, `gemm_ar`, `moe_dispatch_gemm`, `gemm_combine` and `ring_attention` on CPU and CUDA tensors
of f16 and bf16. They are functional, run on the current stream, and know fake tensors, so `torch.compile(fullgraph=True)` takes them.
"""

from typing import Any

import torch as _torch

if not hasattr(_torch.library, "custom_op"):
    raise ImportError(f"mkernel.torch needs PyTorch 2.4 or later, and this is {_torch.__version__}; NumPy arrays need none")

from .attention import attention, sequence_shard
from .layers import ColumnParallelLinear, RowParallelLinear
from .moe import Routed, gemm_combine, moe_dispatch_gemm
from .moe_layer import MoELayer
from .operators import ag_gemm, all_gather, copy_gemm, gemm_ar, gemm_rs, reduce_scatter
from .packed import attention_varlen
from .sequence_parallel import finish_gradients, mark_sequence_parallel
from .shards import clip_grad_norm_, use_dtensors
from .symm_mem import fused_all_gather_matmul, fused_matmul_reduce_scatter, use_for_async_tp


def __getattr__(name: str) -> Any:
    # Styles need torch.distributed, which not every build of PyTorch has.
    if name in ("ColwiseParallel", "RowwiseParallel"):
        from . import parallel

        return getattr(parallel, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ColumnParallelLinear",
    "ColwiseParallel",
    "MoELayer",
    "Routed",
    "RowParallelLinear",
    "RowwiseParallel",
    "ag_gemm",
    "all_gather",
    "attention",
    "attention_varlen",
    "clip_grad_norm_",
    "copy_gemm",
    "finish_gradients",
    "fused_all_gather_matmul",
    "fused_matmul_reduce_scatter",
    "gemm_ar",
    "gemm_combine",
    "gemm_rs",
    "mark_sequence_parallel",
    "moe_dispatch_gemm",
    "reduce_scatter",
    "sequence_shard",
    "use_dtensors",
    "use_for_async_tp",
]
