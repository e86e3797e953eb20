"""Compiled graphs and their caches, beside groups of different sizes."""
import compile_ranks
import pytest
import torch

import mkernel
import mkernel.torch


def test_fakes_know_the_shapes_of_any_world_without_a_group():
    found = compile_ranks.shapes_of_fakes()
    for world in (1, 2, 4):
        capacity = 8 * world * 2
        assert found[world] == {
            "ag_gemm": [(8 * world, 24), (8 * world, 16)],
            "ag_gemm, gated": [(8 * world, 12), (0, 16)],
            "gemm_rs": [(8 // world, 24)],
            "gemm_ar": [(8, 24)],
            "copy_gemm": [(8, 24)],
            "all_gather": [(8 * world, 16)],
            "reduce_scatter": [(8 // world, 16)],
            "moe_dispatch_gemm": [(capacity, 24), (capacity,), (capacity, 3), (3,)],
            "ring_attention": [(1, 2, 4, 64), (1, 2, 4)],
            "ring_attention_packed": [(2, 4, 64), (2, 4)],
        }


def test_a_cached_graph_of_another_world_is_not_taken(cluster, tmp_path):
    with mkernel.local_cluster(nodes=2, local=1) as two:
        first = two.run(compile_ranks.compiled_with_a_cache, str(tmp_path), timeout=600)
        again = two.run(compile_ranks.compiled_with_a_cache, str(tmp_path), timeout=600)
    assert first == [(0, 0)] * 2
    assert all(sum(hits) > 0 for hits in again), "the caches are not in use"
    assert cluster.run(compile_ranks.compiled_with_a_cache, str(tmp_path), timeout=600) == [(0, 0)] * 4


def test_a_compiled_step_follows_a_group_that_becomes_smaller(cluster):
    for graphs, said in cluster.run(compile_ranks.compiled_step_follows_its_group, timeout=600):
        assert graphs == 2
        assert len(said) == 5 and all(sentence is not None and "made for 8 ranks" in sentence for sentence in said)


def test_groups_by_any_of_their_names_are_compiled(cluster, tmp_path):
    assert cluster.run(compile_ranks.groups_of_torch_distributed_compile, str(tmp_path), timeout=600) == [True] * 4


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="an older PyTorch")
def test_operators_that_wait_for_the_device_stay_out_of_cuda_graphs():
    operators = [getattr(torch.ops.mkernel, name).default for name in dir(torch.ops.mkernel) if not name.startswith("_") and name != "name"]
    assert len(operators) == 14
    assert {op._schema.name for op in operators if torch.Tag.cudagraph_unsafe in op.tags} == {
        f"mkernel::{name}"
        for name in ("gemm_combine", "gemm_combine_backward", "moe_dispatch_gemm_backward", "ring_attention_backward", "ring_attention_packed_backward")
    }
