"""A Llama-shaped model in TP=4 with sequence parallelism: 20 steps, each gradient against float64."""
import llama_ranks
import pytest

STEPS = 20


def test_twenty_steps_have_gradients_as_good_as_one_process(cluster):
    answers = cluster.run(llama_ranks.train, STEPS, timeout=900)
    for step, (loss, exact_loss, errors) in enumerate(answers[0]):
        assert abs(loss - exact_loss) < 0.01 * exact_loss, f"step {step}"
        for name, (ours, one_process) in errors.items():
            assert ours <= 1.5 * one_process, f"step {step}: {name}: error {ours:.2e}, and {one_process:.2e} in one process"
    assert [step[0] for step in answers[1]] == [step[0] for step in answers[0]]
    assert answers[0][-1][0] < answers[0][0][0] / 2, "it does not learn"


@pytest.mark.parametrize("spoil", ["ag_gemm", "gemm_rs"])
def test_a_wrong_gradient_of_a_weight_is_seen(cluster, spoil):
    ((_, _, errors),) = cluster.run(llama_ranks.train, 1, spoil, 1)[0]
    spoilt = {"ag_gemm": ["qkv", "gate_up"], "gemm_rs": ["out", "down"]}[spoil]
    for part in spoilt:
        ours, one_process = errors[f"blocks.0.{part}.weight"]
        assert ours > 10 * one_process
