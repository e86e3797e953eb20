"""A training loop around the layers: recomputation, dynamic shapes, clipping, data parallelism, checkpoints. On two nodes of two ranks."""
import pytest
import training_ranks


@pytest.mark.parametrize("sequence_parallel, how, compiled", [
    (True, "full", ""), (False, "full", ""), (True, "reentrant", ""), (True, "selective", ""), (False, "selective", ""),
    (True, "full", "aot_eager"), (False, "full", "aot_eager"), (True, "selective", "inductor"),
])
def test_recomputed_activations_give_the_same_gradients(cluster, how, compiled, sequence_parallel):
    gradients = ["ag-gemm", "gemm-rs"] if sequence_parallel else ["gemm-ar"]
    for launches in cluster.run(training_ranks.recomputation_gives_the_same, how, sequence_parallel, compiled, timeout=600):
        again = {"full": 1, "reentrant": 1, "selective": 0}[how]
        # A compiled graph leaves out what nobody needs: the block's last product.
        assert launches[-len(gradients) :] == gradients and (len(launches) > len(gradients)) == (again == 1 and (sequence_parallel or not compiled))


def test_one_compiled_graph_takes_sequences_of_any_length(cluster):
    for graphs, rooms in cluster.run(training_ranks.lengths_vary_in_one_graph, "aot_eager"):
        assert graphs == 1
        assert rooms == [("ag-gemm", 160), ("gemm-rs", 160)]


@pytest.mark.parametrize(
    "kind", ["plain daemons", "dtensors", "styles", "plain whole", "plain fsdp", "dtensors fsdp", "styles fsdp"]
)
def test_the_norm_of_a_model_s_gradient_is_that_of_one_process(cluster, tmp_path, kind):
    assert len(set(cluster.run(training_ranks.clipped_like_one_process, str(tmp_path), kind))) == 1


@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)], ids=lambda shape: f"dp{shape[0]} tp{shape[1]}")
def test_a_checkpoint_is_loaded_over_another_number_of_ranks(cluster, tmp_path, shape):
    (tmp_path / "two").mkdir()
    resumed = cluster.run(training_ranks.saved_over_two_and_loaded_over, str(tmp_path), shape)
    assert len(set(resumed)) == 1
    if shape == (2, 2):
        whole = cluster.run(training_ranks.the_same_without_a_break, str(tmp_path / "two"), shape)
        assert resumed == whole


def test_weights_of_hugging_face_are_loaded_into_the_shards(cluster, tmp_path):
    for ours, theirs in cluster.run(training_ranks.hugging_face_weights_are_loaded, str(tmp_path)):
        assert abs(ours - theirs) < 0.002 * theirs


@pytest.mark.parametrize("sharded", [False, True], ids=["alone", "with fsdp"])
def test_pytorch_s_styles_for_the_vocabulary_stand_in_one_plan_with_ours(cluster, tmp_path, sharded):
    for theirs, ours in cluster.run(training_ranks.pytorch_s_own_styles_compose, str(tmp_path), sharded):
        assert abs(ours - theirs) < 0.002 * theirs


def test_experts_as_dtensors_have_the_same_gradients_and_the_norm_of_all_experts(cluster, tmp_path):
    for experts, refused in cluster.run(training_ranks.experts_as_dtensors, str(tmp_path)):
        assert experts == 8 and "6 experts do not divide over 4 ranks" in refused
