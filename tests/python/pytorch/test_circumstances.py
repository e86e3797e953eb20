"""Results and gradients under autocast, other default types, odd sizes and offsets; second derivatives. On two nodes of two ranks."""
import gradient_ranks
import pytest
import torch


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_autocast_and_a_default_type_change_no_bit_of_a_gradient(cluster, dtype):
    assert cluster.run(gradient_ranks.circumstances_change_nothing, dtype) == [20] * 4


def test_one_row_and_one_token_of_a_rank_have_gradients(cluster):
    assert cluster.run(gradient_ranks.smallest_sizes_work) == [20] * 4


def test_tensors_that_begin_between_two_vectors_are_copied(cluster):
    assert cluster.run(gradient_ranks.inputs_at_odd_offsets) == [8] * 4


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_rows_behind_the_sequences_are_zero_and_reach_nothing(cluster, dtype):
    assert cluster.run(gradient_ranks.rows_behind_the_sequences, dtype) == [True] * 4


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_gradients_of_routing_weights_have_the_range_of_float32(cluster, dtype):
    assert cluster.run(gradient_ranks.gradients_of_weights_have_their_range, dtype) == [True] * 4


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_gradients_of_routing_have_types_of_their_own(cluster, dtype):
    own = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    assert cluster.run(gradient_ranks.types_of_routing_gradients, dtype) == [[[own, torch.float32, own, torch.float32]] * 3] * 4


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_second_derivatives_of_products_and_collectives_are_right(cluster, dtype):
    assert cluster.run(gradient_ranks.second_derivatives_are_right, dtype) == [True] * 4


def test_composed_gradients_refuse_a_second_derivative(cluster):
    for said in cluster.run(gradient_ranks.composed_gradients_refuse_a_second_derivative):
        assert len(said) == 4
        for name, sentence in said.items():
            assert sentence is not None and f"mkernel.{name}_backward" in sentence and "no autograd formula" in sentence
