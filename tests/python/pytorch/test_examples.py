"""The examples that need PyTorch run as their heads say."""
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys

import pytest

import mkernel

PACKAGE = pathlib.Path(mkernel.__file__).resolve().parents[1]
CHECKOUT = pathlib.Path(__file__).resolve().parents[3]
EXAMPLES = CHECKOUT / "client/python/examples"
sys.path.insert(0, str(CHECKOUT / "tests/runner"))


def torchrun(cluster, *command, nodes=None, fails=False, timeout=600):
    """The outputs of one torchrun per node, each with its node's daemon; of all nodes, or of so many. All succeed, or all fail."""
    nodes = nodes or cluster.nodes
    port = subprocess.run([sys.executable, CHECKOUT / "tests/runner/free_ports.py"], capture_output=True, text=True, check=True).stdout.strip()
    agents = []
    for node in range(nodes):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--node-rank", str(node)]
        launcher += ["--nproc-per-node", str(cluster.local), "--master-addr", "127.0.0.1", "--master-port", port]
        environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "MKERNEL_SOCKET": cluster.socket(node), "OMP_NUM_THREADS": "1"}
        agents.append(subprocess.Popen([*launcher, *map(str, command)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        outputs = [agent.communicate(timeout=timeout)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    for agent, output in zip(agents, outputs):
        assert (agent.returncode != 0) == fails, output
    return outputs


def test_the_script_of_the_tutorial_runs_as_the_tutorial_says(tmp_path):
    page = (CHECKOUT / "deploy/docs/tutorials/04_your_model.md").read_text(encoding="utf-8")
    script = re.search(r"Save this as your_script\.py:\n\n```python\n(.*?)^```", page, re.M | re.S)[1]
    command = re.search(r"^python (-m mkernel .*) your_script\.py$", page, re.M)[1].split()
    (tmp_path / "your_script.py").write_text(script, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command, "your_script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and sorted(re.findall(r"\b([0-3]) \(32, 1, 256\)", done.stdout)) == list("0123"), done.stdout + done.stderr


def steps_of(output):
    found = re.findall(r"^step (\d+): loss (\S+), norm (\S+), (\d+) tokens/s$", output, re.M)
    assert all(int(rate) > 0 for *_, rate in found), output
    return {int(step): (float(loss), float(norm)) for step, loss, norm, _ in found}


def test_the_training_script_of_the_tutorial_trains_and_goes_on_over_another_number_of_nodes(cluster, tmp_path):
    page = (CHECKOUT / "deploy/docs/tutorials/04_your_model.md").read_text(encoding="utf-8")
    (script,) = [block for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "argparse" in block]
    train = tmp_path / "train.py"
    train.write_text(script, encoding="utf-8")
    said = torchrun(cluster, train, "--checkpoints", tmp_path / "whole", "--steps", "12")[0]
    whole = steps_of(said)
    assert sorted(whole) == list(range(12)) and whole[11][0] < 0.95 * whole[0][0]
    # The rates are those of the steps, and the median is theirs.
    rates = [int(rate) for rate in re.findall(r"^step .*, (\d+) tokens/s$", said, re.M)]
    assert abs(int(re.search(r"^median without the first 3 steps: (\d+) tokens/s$", said, re.M)[1]) - statistics.median(rates[3:])) <= 1, said
    # PyTorch's own tensor parallelism trains the same model, without mkernel.
    said = torchrun(cluster, train, "--checkpoints", tmp_path / "baseline", "--steps", "4", "--baseline")[0]
    baseline = steps_of(said)
    assert sorted(baseline) == list(range(4)) and "mkernel.Group" not in said
    assert all(abs(baseline[step][i] - whole[step][i]) < 0.02 * whole[step][i] for step in range(4) for i in range(2)), (baseline, whole)
    # Compiled, to its first checkpoint; then eager from there, and then on one node of the two.
    compiled = steps_of(torchrun(cluster, train, "--checkpoints", tmp_path / "parts", "--steps", "5", "--compile", "aot_eager")[0])
    assert all(abs(compiled[step][0] - whole[step][0]) < 0.02 * whole[step][0] for step in range(5))
    on = steps_of(torchrun(cluster, train, "--checkpoints", tmp_path / "whole", "--steps", "14")[0])
    assert sorted(on) == [10, 11, 12, 13] and on[10] == whole[10] and on[11] == whole[11]
    one = steps_of(torchrun(cluster, train, "--checkpoints", tmp_path / "parts", "--steps", "7", nodes=1)[0])
    assert sorted(one) == [5, 6] and one[6][0] < compiled[0][0]


#: Runs the script of its first argument; rank 1 is killed when a checkpoint has been written.
KILLED = """
import os, runpy, signal, sys
import torch.distributed.checkpoint as dcp

save = dcp.save

def save_and_die(*arguments, **more):
    save(*arguments, **more)
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)

dcp.save = save_and_die
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_rank_that_is_killed_ends_torchrun_on_all_nodes_and_the_next_run_goes_on(cluster, tmp_path):
    page = (CHECKOUT / "deploy/docs/tutorials/04_your_model.md").read_text(encoding="utf-8")
    (script,) = [block for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "argparse" in block]
    train, killed = tmp_path / "train.py", tmp_path / "killed.py"
    train.write_text(script, encoding="utf-8")
    killed.write_text(KILLED, encoding="utf-8")
    options = ("--checkpoints", tmp_path / "checkpoints", "--steps", "7")
    said = torchrun(cluster, killed, train, *options, fails=True, timeout=120)[0]
    assert sorted(steps_of(said)) == list(range(5)) and "Signal 9" in said
    assert sorted(steps_of(torchrun(cluster, train, *options)[0])) == [5, 6]


def test_the_training_script_of_the_tutorial_reads_weights_of_hugging_face(cluster, tmp_path):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    page = (CHECKOUT / "deploy/docs/tutorials/04_your_model.md").read_text(encoding="utf-8")
    (script,) = [block for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "argparse" in block]
    (loading,) = [block for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "HuggingFaceStorageReader" in block]
    (again,) = re.findall(r"make them anew: `([^`]*)`", page)
    train, on_meta = tmp_path / "train.py", tmp_path / "on_meta.py"
    train.write_text(script, encoding="utf-8")
    # The other recipe: the model is made on "meta", and filled after step 4.
    make, fill = loading.split("# steps 3 and 4, without model.to(device)\n")
    start, rest = script.split("# 2. The model.")[0], "# 3." + script.split("# 3.")[1]
    shard, train_on = rest.split("optimizer = torch")
    shard = shard.replace("model.to(device)\n", "")
    folder = "folder = options.weights\n"
    on_meta.write_text(f"{start}{folder}{make}model.config.use_cache = False\n{shard}{fill}{again}\noptimizer = torch{train_on}", encoding="utf-8")
    torch.manual_seed(5)
    config = LlamaConfig(vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "weights")
    for number, file in enumerate((train, on_meta)):
        options = ("--weights", tmp_path / "weights", "--steps", "2", "--checkpoints", tmp_path / str(number))
        seen = steps_of(torchrun(cluster, file, *options)[0])
        first = seen if number == 0 else first
        assert seen == first and len(seen) == 2


def test_the_llama_learns_under_torchrun_on_two_nodes(cluster, tmp_path):
    script = EXAMPLES / "train_llama.py"
    assert len(script.read_text().splitlines()) < 80
    said = torchrun(cluster, script, "--steps", "30", "--sequence", "64", "--curve", tmp_path / "loss.svg")[0]
    first, last = map(float, re.search(r"loss (\S+) to (\S+) in 30 steps", said).groups())
    assert last < 0.7 * first, said
    assert (tmp_path / "loss.svg").read_text().count(",") >= 30


@pytest.mark.parametrize("more", [[], ["--whole"]], ids=["sequence parallel", "whole"])
def test_the_comparison_with_dtensor_runs_and_both_are_right(cluster, tmp_path, more):
    shape = ["--width", "64", "--hidden", "128", "--rows", "64", "--rounds", "3"]
    said = torchrun(cluster, "-m", "mkernel.torch.bench", *shape, "--json", tmp_path / "found.json", *more)[0]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ranks"] == 4 and set(found["ms"]) == set(found["errors"]) == {"mkernel", "dtensor"}
    assert all(error < 0.01 for error in found["errors"].values()) and min(found["ms"].values()) > 0
    assert f"mkernel takes {found['ms']['mkernel'] / found['ms']['dtensor']:.2f} of DTensor's time on 4 ranks" in said
