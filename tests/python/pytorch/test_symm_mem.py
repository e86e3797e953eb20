"""torch.ops.symm_mem's two operators and Inductor's pass that calls them."""
import pytest
import symm_mem_ranks
import torch

import mkernel


@pytest.fixture(scope="module")
def two():
    with mkernel.local_cluster(nodes=2, local=1) as started:
        yield started


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fused_operators_are_ours_and_their_results_lie_as_pytorch_s(cluster, tmp_path, dtype):
    assert cluster.run(symm_mem_ranks.fused_operators_are_ours, str(tmp_path), dtype) == [["ag-gemm", "gemm-rs"]] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_the_operators_do_not_take_is_computed_by_pytorch(cluster, tmp_path, dtype):
    assert cluster.run(symm_mem_ranks.fused_operators_are_ours, str(tmp_path), dtype) == [[]] * 4


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_inductors_pass_for_async_tensor_parallelism_calls_ours(two, tmp_path, dim, dtype):
    for fused, launches in two.run(symm_mem_ranks.async_tp_pass_calls_ours, str(tmp_path), dim, dtype, timeout=600):
        assert fused == [dim, dim]
        assert launches == (["ag-gemm", "gemm-rs"] if dtype == torch.bfloat16 else [])


def test_groups_without_a_process_group_or_without_init_are_told_apart(two, tmp_path):
    for said in two.run(symm_mem_ranks.groups_that_are_not_ours, str(tmp_path)):
        assert "float32" in said and "ProcessGroup" in said
