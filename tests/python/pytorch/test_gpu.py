"""The same on GPUs, which ranks share where there are too few: one node of two ranks, and two nodes of one rank."""
import compile_ranks
import gradient_ranks
import graph_ranks
import pytest
import torch
import torch_layer_ranks
import torch_ranks

import mkernel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(scope="module", params=[(1, 2), (2, 1)], ids=["one node", "two nodes"])
def pair(request):
    with mkernel.local_cluster(*request.param) as started:
        yield started


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_results_and_gradients_are_within_the_rounding_error_of_float64(pair, dtype):
    assert pair.run(torch_ranks.gradients_are_right, dtype, "cuda", 256, 192, 128) == [True] * 2


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_collectives_are_each_others_gradients_on_gpus(pair, dtype):
    assert pair.run(torch_ranks.collectives_are_each_others_gradients, dtype, "cuda", 96, 128) == [True] * 2


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_bias_and_activation_and_their_gradients_are_right(pair, dtype):
    assert pair.run(torch_ranks.epilogues_are_right, dtype, "cuda", 256, 192, 128) == [True] * 2


@pytest.mark.parametrize("sequence_parallel, compiled", [(True, ""), (False, "aot_eager"), (True, "inductor")])
def test_modules_are_like_one_process(pair, sequence_parallel, compiled):
    assert pair.run(torch_ranks.modules_are_like_one_process, sequence_parallel, compiled, "cuda") == [True] * 2


@pytest.mark.parametrize("causal", [False, True])
def test_attention_and_its_gradient_are_as_good_as_one_process(pair, causal):
    for said in pair.run(torch_layer_ranks.attention_and_gradients_are_right, causal, "cuda"):
        assert "attn_mask" in said


def test_attention_over_sequences_of_different_lengths_is_like_each_by_itself(pair):
    for said in pair.run(torch_layer_ranks.packed_attention_is_right, "cuda"):
        assert "torch.int32" in said


def test_dispatch_and_combine_and_their_gradients_are_within_the_rounding_error_of_float64(pair):
    for outcomes in pair.run(torch_layer_ranks.experts_gradients_are_right, "bf16", "cuda"):
        assert set(outcomes.values()) == {"SUCCESS"}


def test_a_layer_of_experts_and_its_gradients_are_as_good_as_one_process(pair):
    for said in pair.run(torch_layer_ranks.moe_layer_and_gradients_are_right, "cuda"):
        assert "experts=6" in said


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_autocast_and_a_default_type_change_no_bit_of_a_gradient(pair, dtype):
    assert pair.run(gradient_ranks.circumstances_change_nothing, dtype, "cuda") == [20] * 2


def test_tensors_that_begin_between_two_vectors_are_copied(pair):
    assert pair.run(gradient_ranks.inputs_at_odd_offsets, "cuda") == [8] * 2


def test_rows_behind_the_sequences_are_zero_and_reach_nothing(pair):
    assert pair.run(gradient_ranks.rows_behind_the_sequences, "bf16", "cuda") == [True] * 2


def test_one_operator_serves_all_counts_of_tokens(pair):
    for rooms in pair.run(torch_layer_ranks.one_operator_serves_all_counts_of_tokens, "cuda"):
        assert len(rooms) == 5 and all(len(here) == 1 and here[0][0] == here[0][1] for here in rooms)


def test_compiled_graphs_leave_out_what_waits_for_the_device(pair):
    assert pair.run(compile_ranks.cuda_graphs_hold_what_they_can, timeout=600) == [True] * 2


@pytest.mark.parametrize("name", ["ag_gemm", "gemm_rs", "gemm_ar", "copy_gemm", "all_gather", "reduce_scatter"])
def test_a_captured_step_is_replayed_with_other_numbers(pair, name):
    assert pair.run(graph_ranks.cuda_graphs_replay, name) == [True] * 2


def test_a_captured_graph_outlives_larger_and_newer_operators(pair):
    assert pair.run(graph_ranks.cuda_graphs_outlive_other_operators) == [True] * 2
