#!/usr/bin/env python3
"""check_monitoring.py <repository>: promtool accepts the alert rules and their tests pass; every expression of the
dashboards parses; every metric that rules and dashboards name is one that the daemon exports."""
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

root = pathlib.Path(sys.argv[1])
rules = root / "deploy/prometheus"
if not shutil.which("promtool"):
    print("promtool is missing (Debian: prometheus)")
    sys.exit(77)


def run(*command):
    done = subprocess.run(command, text=True, capture_output=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


run("promtool", "check", "rules", rules / "mkernel.rules.yml")
run("promtool", "test", "rules", rules / "mkernel.rules.test.yml")

exported = set(re.findall(r'"(mkernel_[a-z_]+)"', (root / "daemon/metrics/families.cc").read_text()))
recorded = set(re.findall(r"record: (\S+)", (rules / "mkernel.rules.yml").read_text()))
texts = {"mkernel.rules.yml": (rules / "mkernel.rules.yml").read_text()}
expressions = []
for dashboard in sorted((root / "deploy/grafana").glob("*.json")):
    page = json.loads(dashboard.read_text())
    ids = [panel["id"] for panel in page["panels"]]
    assert len(ids) == len(set(ids)), f"{dashboard}: panel ids repeat"
    for panel in page["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "5m").replace("$node", ".*")
            expressions.append(expression)
    texts[dashboard.name] = "\n".join(expressions)

# promtool 2.42 checks expressions only as parts of rules.
with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
    entries = [{"record": f"check:{i}", "expr": text} for i, text in enumerate(expressions)]
    json.dump({"groups": [{"name": "dashboards", "rules": entries}]}, file)  # JSON is YAML
    file.flush()
    run("promtool", "check", "rules", "--lint=none", file.name)

for name, text in texts.items():
    for metric in re.findall(r"\bmkernel[_:][a-z_]+", re.sub(r"mkernel\.rules\.\w+", "", text)):
        plain = re.sub(r"_(bucket|sum|count)$", "", metric)
        if plain not in exported and metric not in recorded and metric not in exported:
            sys.exit(f"{name} names {metric}, which mkerneld does not export")
print(f"{len(expressions)} expressions, {len(exported)} metrics")
