#!/usr/bin/env python3
"""check_dashboards.py <repository> <mkerneld> <gemm_all_reduce>: what the dashboards show in a running Prometheus. It scrapes two
daemons with two jobs by the scrape job of deploy/prometheus/README.md, once as it stands and once with honor_labels, as others set
it for all jobs of theirs. Every panel has data, every label of a legend exists, and jobs are told apart by their own names."""
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request

from cluster import Cluster, end_with_parent, wait_for

repository, mkerneld, program = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.path.append(str(repository / "tests/runner"))
from free_ports import free_ports  # noqa: E402

JOBS = {"alpha", "beta"}
if not shutil.which("prometheus"):
    print("prometheus is missing (Debian: prometheus)")
    sys.exit(77)


class Prometheus:
    def __init__(self, name, folder, scrape):
        self.name, (port,) = name, free_ports()
        (folder / f"{name}.yml").write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
            f"rule_files: [{repository.resolve()}/deploy/prometheus/mkernel.rules.yml]\n{scrape}")
        self.log = folder / f"{name}.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                ["prometheus", f"--config.file={folder}/{name}.yml", f"--storage.tsdb.path={folder}/{name}",
                 f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log, preexec_fn=end_with_parent)
        self.base = f"http://127.0.0.1:{port}/api/v1/query?"

    def ask(self, expression):
        """The series that it answers; none while it does not answer yet."""
        assert self.process.poll() is None, self.log.read_text()
        try:
            with urllib.request.urlopen(self.base + urllib.parse.urlencode({"query": expression}), timeout=10) as answer:
                return json.load(answer)["data"]["result"]
        except OSError:
            return []


def panels():
    """(title, expression, legend) of each target; a variable of Grafana's as it would fill it in."""
    for dashboard in sorted((repository / "deploy/grafana").glob("*.json")):
        for panel in json.loads(dashboard.read_text())["panels"]:
            for target in panel["targets"]:
                expression = target["expr"].replace("$__rate_interval", "30s").replace("$node", ".*")
                yield f"{dashboard.stem}: {panel['title']}", expression, target["legendFormat"]


def check(prometheus):
    wait_for(lambda: len(prometheus.ask("up == 1")) == 2, f"{prometheus.name}: two daemons are scraped", pause=0.2)
    seen = 0
    for title, expression, legend in panels():
        labels = re.findall(r"{{(\w+)}}", legend)
        where = f"{prometheus.name}: {title}: {expression}"
        # These show what is wrong, and nothing is.
        if re.search(r"(== 0|> 0)$", expression):
            continue
        series = wait_for(lambda: prometheus.ask(expression), where, pause=0.2)
        for one in series:
            missing = [label for label in labels if label not in one["metric"]]
            assert not missing, f"{where}: no label {missing} in {one['metric']}"
        if "job_name" in labels:
            jobs = {one["metric"]["job_name"] for one in series}
            assert jobs == JOBS, f"{where}: {jobs}"
        if title.endswith(": Jobs"):
            assert [one["value"][1] for one in series] == [str(len(JOBS))], f"{where}: {series}"
        seen += 1
    # A legend that names a job does so by the daemon's label, and so does the page of operations.
    assert not [where for where, _, legend in panels() if "{{job}}" in legend]
    assert not prometheus.ask('ALERTS{alertname="MkernelDaemonGone"}'), f"{prometheus.name}: MkernelDaemonGone with all daemons there"
    return seen


def main():
    readme = (repository / "deploy/prometheus/README.md").read_text()
    scrape = re.search(r"^```yaml\n(.*?)^```", readme, re.M | re.S)[1]
    with Cluster(mkerneld, more=lambda node: '[metrics]\nlisten = "127.0.0.1:0"\n') as nodes:
        addresses = [json.loads((nodes.folder / f"{node}/ready").read_text())["metrics"] for node in range(2)]
        assert scrape.count('"127.0.0.1:9464"') == 1, scrape
        scrape = scrape.replace('"127.0.0.1:9464"', ", ".join(f'"{address}"' for address in addresses))
        for job in JOBS:
            for rank in range(2):
                nodes.rank([program, "64", "64", "32", "600"], job, rank, local=1)
        wait_for(lambda: all(f"job '{job}' is up" in nodes.log(0) for job in JOBS), "both jobs")
        with tempfile.TemporaryDirectory() as folder:
            servers = []
            try:
                for name, text in (("as written", scrape), ("honor_labels", scrape.replace("- job_name:", "- honor_labels: true\n    job_name:"))):
                    servers.append(Prometheus(name.replace(" ", "-"), pathlib.Path(folder), text))
                counts = [check(one) for one in servers]
            finally:
                for one in servers:
                    one.process.kill()
                    one.process.wait()
    print(f"{counts[0]} expressions of dashboards, with each of {len(servers)} scrape jobs")


main()
