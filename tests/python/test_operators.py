"""The operators and their gradients on NumPy arrays, against float64."""
import layer_ranks
import on_ranks
import pytest

import mkernel


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_every_element_and_gradient_is_within_the_rounding_error(cluster, dtype):
    assert cluster.run(on_ranks.operators_are_right, dtype) == [len(on_ranks.SHAPES)] * 4


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_bias_activation_partials_in_float32_and_gaps_between_rows(cluster, dtype):
    assert cluster.run(on_ranks.epilogues_are_right, dtype) == [45] * 4


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_rows_are_gathered_and_sums_scattered(cluster, dtype):
    assert cluster.run(on_ranks.collectives_are_right, dtype) == [10] * 4


def test_a_wrong_activation_turns_the_check_red(cluster):
    for said in cluster.run(on_ranks.wrong_epilogue_is_seen):
        assert "gelu" in said


def test_wrong_epilogues_are_refused_in_words(cluster):
    for said in cluster.run(on_ranks.epilogue_errors):
        for sentence, telling in zip(said, ["(4, 8)", "relu, gelu", "9 columns", "'f32'", "'quick'"], strict=True):
            assert sentence is not None and telling in sentence


def test_tuning_and_mode_are_followed(cluster):
    for ran, said in cluster.run(on_ranks.tuning_and_mode_are_followed):
        assert ran == [(True, True, True), (False, True, True)] and "tile_m=32" in said


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_both_forms_of_an_exchange_over_three_nodes_have_the_same_bits(dtype):
    with mkernel.local_cluster(nodes=3, local=1) as three:
        one, two = (three.run(on_ranks.exchange_form_is_right, form, dtype) for form in (1, 2))
    assert [bits for bits, _ in one] == [bits for bits, _ in two] and one[0][0] == one[1][0]
    assert sum(sent for _, sent in two) < sum(sent for _, sent in one)


def test_other_layouts_of_nodes_and_ranks_are_right_too(other_cluster):
    other_cluster.run(on_ranks.operators_are_right, "f16", on_ranks.SHAPES[:3])


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_attention_over_all_ranks_is_right(cluster, dtype):
    assert cluster.run(layer_ranks.attention_is_right, dtype) == [True] * 4


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_attention_over_sequences_of_different_lengths_is_right(cluster, dtype):
    for none, negative, rows in cluster.run(layer_ranks.packed_attention_is_right, dtype):
        assert "at least one" in none and "none below 0" in negative and "this rank has 2" in rows


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_each_expert_gets_its_tokens_and_the_products_are_right(cluster, dtype):
    assert sum(cluster.run(layer_ranks.moe_is_right, dtype)) > 30


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_each_token_gets_the_sum_of_its_experts(cluster, dtype):
    assert sum(cluster.run(layer_ranks.combine_is_right, dtype)) == 30


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_gradients_of_attention_are_right(cluster, dtype):
    assert cluster.run(layer_ranks.attention_gradients_are_right, dtype) == [True] * 4


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_gradients_of_experts_are_right(cluster, dtype):
    assert sum(cluster.run(layer_ranks.experts_gradients_are_right, dtype)) > 60


def test_rows_are_of_ranks_that_are_there(cluster):
    for said in cluster.run(layer_ranks.rows_of_others):
        assert [code for code, _ in said] == ["invalid-argument"] * 12
        for (_, sentence), telling in zip(said[::2], ["rank 4", "rank -1", f"rank {2**32}", f"rank {2**70}", "-1 rows", f"{2**31} rows"]):
            assert telling in sentence


@pytest.mark.parametrize(
    "formula, check, telling",
    [("attention_of_head", "attention_gradients_are_right", "dv"), ("combine_of_expert", "experts_gradients_are_right", "dW of combine")],
)
def test_a_wrong_formula_turns_the_check_red(cluster, formula, check, telling):
    assert all(telling in said for said in cluster.run(layer_ranks.wrong_formula_is_seen, formula, check))


def test_wrong_shapes_of_experts_are_refused_in_words(cluster):
    for said in cluster.run(layer_ranks.wrong_experts_are_refused):
        for sentence, telling in zip(said, ["(1, 8)", "(1, 4, 8)", "uint16", "(1, 8)", "(2, 2)", "(1, 4, 8)", "bias is (2, 8)"]):
            assert sentence is not None and telling in sentence


def test_tensors_of_dlpack_may_have_three_dimensions(cluster):
    assert cluster.run(layer_ranks.foreign_tensors_of_three_dimensions) == [True] * 4


@pytest.mark.parametrize("which", ["ag_gemm", "gemm_rs", "gemm_ar", "copy_gemm"])
def test_a_wrong_gradient_of_b_turns_the_check_red(cluster, which):
    for said in cluster.run(on_ranks.wrong_db_is_seen, which):
        assert f"dB of {which}" in said


def test_bf16_arrays_of_ml_dtypes_are_taken_where_it_is_installed(cluster):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for answer in cluster.run(on_ranks.product_of, ml_dtypes.bfloat16):
        assert answer.dtype == ml_dtypes.bfloat16 and (answer == 32).all()


def test_dlpack_tensors_are_read_and_written_in_place(cluster):
    assert cluster.run(on_ranks.dlpack_tensors) == [True] * 4


def test_operators_are_kept_by_shape_and_the_oldest_dropped(cluster):
    assert cluster.run(on_ranks.operators_are_kept) == [[(1, 4), (1, 4), (1, 9), 3]] * 4


def test_operators_longest_unused_make_room_for_new_ones(cluster):
    most = cluster.run(on_ranks.operators_make_room_for_each_other)
    assert len(set(most)) == 1 and 1 < most[0] < 32


def test_operators_of_captured_graphs_outlive_larger_and_newer_ones(cluster):
    assert cluster.run(on_ranks.captured_operators_stay, 0) == [None] * 4


def test_operators_of_captured_graphs_that_fill_the_memory_are_named(cluster):
    for error in cluster.run(on_ranks.captured_operators_stay, 1024):
        assert error.code == mkernel.ErrorCode.LIMIT_EXCEEDED
        assert "CUDA graphs have captured" in error.sentence and "'default'" in error.sentence


def test_small_float32_sums_are_exact_and_alike(cluster):
    assert cluster.run(on_ranks.sums_of_float32) == [(2, 20000)] * 4


def test_a_thousand_steps_leak_neither_memory_nor_descriptors():
    with mkernel.local_cluster(nodes=2, local=1) as two:
        answers = two.run(on_ranks.thousand_steps)
    for (pages, descriptors), (pages_after, descriptors_after) in answers:
        assert descriptors_after == descriptors
        assert pages_after - pages < 256, "more than 1 MiB in 800 steps"
