"""Gradients that ranks have parts of: each part counts once. On two nodes of two ranks."""
import finish_ranks
import pytest
import torch


@pytest.mark.parametrize("kind", ["plain", "daemons", "compiled", "fsdp", "ddp", "ddp with views"])
def test_gradients_are_finished_once_after_one_backward_pass_or_many(cluster, tmp_path, kind):
    compared = cluster.run(finish_ranks.sums_of_a_schedule, str(tmp_path), kind, timeout=600)
    assert min(compared) > 800


def test_gradients_of_bf16_are_finished_once_too(cluster, tmp_path):
    assert min(cluster.run(finish_ranks.sums_of_a_schedule, str(tmp_path), "plain", torch.bfloat16)) > 800


def test_a_gradient_is_summed_over_the_groups_that_it_is_marked_for(cluster, tmp_path):
    for ambiguous, changed in cluster.run(finish_ranks.marks_know_their_groups, str(tmp_path)):
        assert "cp, tp" in ambiguous and "group=" in ambiguous
        assert "'tp'" in changed and "'cp'" in changed and "mark_sequence_parallel" in changed


def test_frozen_layers_stay_frozen(cluster, tmp_path):
    assert cluster.run(finish_ranks.frozen_layers_stay_frozen, str(tmp_path)) == [True] * 4


@pytest.mark.parametrize("kind", ["alone", "with fsdp", "a place of its own"])
def test_shards_count_once_where_the_group_has_no_process_group(cluster, tmp_path, kind):
    for refused in cluster.run(finish_ranks.shards_count_once, str(tmp_path), kind):
        assert "has other ranks" in refused
