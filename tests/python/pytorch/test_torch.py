"""The operators of torch.library, the modules and the hooks, on two nodes of two ranks."""
import pytest
import torch_layer_ranks
import torch_ranks

import mkernel


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_results_and_gradients_are_within_the_rounding_error_of_float64(cluster, dtype):
    assert cluster.run(torch_ranks.gradients_are_right, dtype) == [True] * 4


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_collectives_are_each_others_gradients(cluster, dtype):
    assert cluster.run(torch_ranks.collectives_are_each_others_gradients, dtype) == [True] * 4


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_bias_and_activation_and_their_gradients_are_right(cluster, dtype):
    assert cluster.run(torch_ranks.epilogues_are_right, dtype) == [True] * 4


def test_a_wrong_gradient_of_the_bias_turns_the_check_red(cluster):
    for said in cluster.run(torch_ranks.wrong_bias_gradient_is_seen):
        assert said.startswith("dbias of ag_gemm")


def test_a_fused_activation_gives_no_silent_gradient(cluster):
    for said in cluster.run(torch_ranks.fused_activation_refuses_a_gradient):
        assert "gemm_ar with activation='gelu'" in said


def test_what_uses_the_gathered_input_has_a_gradient(cluster):
    assert cluster.run(torch_ranks.gradient_of_the_gathered_input) == [True] * 4


@pytest.mark.parametrize("which", ["ag_gemm", "gemm_rs", "gemm_ar", "copy_gemm"])
def test_a_wrong_gradient_of_b_turns_the_check_red(cluster, which):
    for said in cluster.run(torch_ranks.wrong_db_is_seen, which):
        assert said.startswith(f"dB of {which}")


def test_opcheck_finds_nothing(cluster):
    for outcomes in cluster.run(torch_ranks.operators_pass_opcheck):
        assert len(outcomes) == 48 and set(outcomes.values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    "sequence_parallel, compiled", [(True, ""), (False, ""), (True, "aot_eager"), (False, "aot_eager"), (True, "inductor")]
)
def test_modules_are_like_one_process(cluster, sequence_parallel, compiled):
    assert cluster.run(torch_ranks.modules_are_like_one_process, sequence_parallel, compiled, timeout=600) == [True] * 4


@pytest.mark.parametrize("causal", [False, True])
def test_attention_and_its_gradient_are_as_good_as_one_process(cluster, causal):
    for said in cluster.run(torch_layer_ranks.attention_and_gradients_are_right, causal):
        assert "attn_mask" in said


def test_attention_over_sequences_of_different_lengths_is_like_each_by_itself(cluster):
    for said in cluster.run(torch_layer_ranks.packed_attention_is_right):
        assert "torch.int32" in said


def test_a_layer_of_experts_and_its_gradients_are_as_good_as_one_process(cluster):
    for said in cluster.run(torch_layer_ranks.moe_layer_and_gradients_are_right):
        assert "experts=6, top_k=2" in said


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_dispatch_and_combine_and_their_gradients_are_within_the_rounding_error_of_float64(cluster, dtype):
    for outcomes in cluster.run(torch_layer_ranks.experts_gradients_are_right, dtype):
        assert len(outcomes) == 12 and set(outcomes.values()) == {"SUCCESS"}


def test_a_wrong_gradient_of_experts_turns_the_check_red(cluster):
    for said in cluster.run(torch_layer_ranks.wrong_gradient_of_experts_is_seen):
        assert "gemm_combine" in said


def test_one_operator_serves_all_counts_of_tokens(cluster):
    for rooms in cluster.run(torch_layer_ranks.one_operator_serves_all_counts_of_tokens):
        assert len(rooms) == 5 and all(len(here) == 1 and here[0][0] == here[0][1] for here in rooms)


def test_dispatches_on_a_gpu_ask_for_the_same_operator_whatever_their_count(cluster):
    for asked in cluster.run(torch_layer_ranks.shapes_of_dispatches_on_a_gpu, (1, 5, 64, 1000)):
        assert len(asked) == 4 and all(one == asked[0] for one in asked)


def test_attention_and_the_layers_are_in_mkernel_itself(cluster):
    for said in cluster.run(torch_ranks.names_of_torch_are_at_hand):
        assert "mkernel.attention" in said[0] and "mkernel.torch" in said[1]


def test_autocast_is_followed(cluster):
    assert cluster.run(torch_ranks.autocast_is_followed) == [True] * 4


def test_styles_of_parallelize_module_are_like_one_process(cluster, tmp_path):
    assert cluster.run(torch_ranks.styles_of_parallelize_module, str(tmp_path)) == ["ColwiseParallel(sequence_dim=None)"] * 4


def test_dimensions_of_a_device_mesh_are_groups_side_by_side(cluster, tmp_path):
    for rank, (refused, ranks, sums) in enumerate(cluster.run(torch_ranks.groups_of_a_mesh, str(tmp_path))):
        assert "dp, tp" in refused and "mesh['tp']" in refused
        dp, tp = divmod(rank, 2)
        assert ranks == (dp, tp)
        tp_sum = 4.0 * dp + 3.0
        assert sums == [4.0 + 2 * tp, tp_sum, tp_sum]


def test_a_rank_that_dies_in_a_training_step_is_named_to_the_others(cluster):
    with pytest.raises(mkernel.RankFailed, match="rank 1's process was ended by signal 9") as failed:
        cluster.run(torch_ranks.rank_dies_in_a_training_step, 1)
    assert sorted(failed.value.answers) == [0, 2, 3]
    for error in failed.value.answers.values():
        assert error.code == mkernel.ErrorCode.PEER_LOST and "rank 1" in error.sentence


def test_wrong_tensors_are_refused_in_words(cluster):
    for said in cluster.run(torch_ranks.wrong_tensors):
        assert len(said) == 7
        for sentence, telling in zip(said, ["float32", "bfloat16", "inner dimensions", "1 dimensions", "5 rows", "out_features=6", "out="]):
            assert sentence is not None and telling in sentence


def test_a_thousand_training_steps_leak_neither_memory_nor_descriptors():
    with mkernel.local_cluster(nodes=2, local=1) as two:
        answers = two.run(torch_ranks.thousand_steps, timeout=600)
    for (pages, descriptors), (pages_after, descriptors_after) in answers:
        assert descriptors_after == descriptors
        assert pages_after - pages < 512, "more than 2 MiB in 700 steps"
