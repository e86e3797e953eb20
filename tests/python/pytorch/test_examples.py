"""The examples that need PyTorch run as their heads say."""
import os
import pathlib
import re
import subprocess
import sys

import mkernel

PACKAGE = pathlib.Path(mkernel.__file__).resolve().parents[1]
CHECKOUT = pathlib.Path(__file__).resolve().parents[3]
EXAMPLES = CHECKOUT / "client/python/examples"
sys.path.insert(0, str(CHECKOUT / "tests/runner"))


def torchrun(cluster, *command, timeout=600):
    """The outputs of one torchrun per node, each with its node's daemon."""
    port = subprocess.run([sys.executable, CHECKOUT / "tests/runner/free_ports.py"], capture_output=True, text=True, check=True).stdout.strip()
    agents = []
    for node in range(cluster.nodes):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(cluster.nodes), "--node-rank", str(node)]
        launcher += ["--nproc-per-node", str(cluster.local), "--master-addr", "127.0.0.1", "--master-port", port]
        environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "MKERNEL_SOCKET": cluster.socket(node), "OMP_NUM_THREADS": "1"}
        agents.append(subprocess.Popen([*launcher, *map(str, command)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        outputs = [agent.communicate(timeout=timeout)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    for agent, output in zip(agents, outputs):
        assert agent.returncode == 0, output
    return outputs


def test_the_script_of_the_tutorial_runs_as_the_tutorial_says(tmp_path):
    page = (CHECKOUT / "deploy/docs/tutorials/04_your_model.md").read_text(encoding="utf-8")
    script = re.search(r"Save this as your_script\.py:\n\n```python\n(.*?)^```", page, re.M | re.S)[1]
    command = re.search(r"^python (-m mkernel .*) your_script\.py$", page, re.M)[1].split()
    (tmp_path / "your_script.py").write_text(script, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command, "your_script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and sorted(re.findall(r"\b([0-3]) \(32, 1, 256\)", done.stdout)) == list("0123"), done.stdout + done.stderr


def test_the_llama_learns_under_torchrun_on_two_nodes(cluster, tmp_path):
    script = EXAMPLES / "train_llama.py"
    assert len(script.read_text().splitlines()) < 80
    said = torchrun(cluster, script, "--steps", "30", "--sequence", "64", "--curve", tmp_path / "loss.svg")[0]
    first, last = map(float, re.search(r"loss (\S+) to (\S+) in 30 steps", said).groups())
    assert last < 0.7 * first, said
    assert (tmp_path / "loss.svg").read_text().count(",") >= 30
