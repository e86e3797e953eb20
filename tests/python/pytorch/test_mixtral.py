"""A Mixtral-shaped model with context and expert parallelism on four ranks: 20 steps, each gradient against float64."""
import mixtral_ranks

STEPS = 20


def test_twenty_steps_have_gradients_as_good_as_one_process(cluster):
    answers = cluster.run(mixtral_ranks.train, STEPS, timeout=900)
    for step, (loss, exact_loss, errors) in enumerate(answers[0]):
        assert abs(loss - exact_loss) < 0.01 * exact_loss, f"step {step}"
        for name, (ours, one_process) in errors.items():
            assert ours <= 1.5 * one_process, f"step {step}: {name}: error {ours:.2e}, and {one_process:.2e} in one process"
    assert answers[0][-1][0] < answers[0][0][0] / 2, "it does not learn"
