"""PyTorch's async tensor parallelism (symm_mem fused operators) on all GPUs of a machine, against torch.matmul and NCCL
in the same run: AllGather+GEMM with N 7168 per rank and K 8192, GEMM+ReduceScatter with N 8192 and K 3584 per rank.
Slowest rank's median of 20 launches in microseconds, and the relative difference of the results; a JSON line per M.

    python3 torch_async_tp.py
"""
import json
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LAUNCHES = 20
WARM_UP = 4


def clock(run, device):
    times = []
    for launch in range(WARM_UP + LAUNCHES):
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor([begin.elapsed_time(end) * 1e3], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if launch >= WARM_UP:
            times.append(slowest.item())
    return sorted(times)[LAUNCHES // 2]


def compare(fused, unfused, device):
    difference = (fused().float() - unfused().float()).norm() / unfused().float().norm()
    return {"fused_us": clock(fused, device), "unfused_us": clock(unfused, device), "difference": difference.item()}


def rank_main(rank, world):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29555", RANK=str(rank), WORLD_SIZE=str(world),
                      NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=device)
    group = dist.group.WORLD.group_name
    from torch.distributed import _symmetric_memory  # noqa: F401  (defines the operators)

    def draw(rows, columns):
        return torch.randn(rows, columns, device=device, dtype=torch.bfloat16)

    for m in (2048, 4096, 8192, 16384, 32768):
        shard, weight = draw(m // world, 8192), draw(7168, 8192).t()
        left, right = draw(m, 3584), draw(8192, 3584).t()
        whole, part = draw(m, 8192), draw(m // world, 8192)

        def gather():
            dist.all_gather_into_tensor(whole, shard)
            return whole @ weight

        def scatter():
            dist.reduce_scatter_tensor(part, left @ right)
            return part

        ops = torch.ops.symm_mem
        row = {"m": m,
               "ag_gemm": compare(lambda: ops.fused_all_gather_matmul(shard, [weight], 0, group)[1][0], gather, device),
               "gemm_rs": compare(lambda: ops.fused_matmul_reduce_scatter(left, right, "sum", 0, group), scatter, device)}
        if rank == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    count = torch.cuda.device_count()
    mp.spawn(rank_main, args=(count,), nprocs=count)
