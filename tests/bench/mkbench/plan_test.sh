#!/usr/bin/env bash
# mkbench plan MKBENCH: a launch on clusters that are not here: time, what a node needs, what limits, and what is in the way.
set -eu
mkbench=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
fail() {
  echo "$1"
  exit 1
}
plan() { "$mkbench" plan --locals 8 --gpu h200 "$@"; }
for op in "ag-gemm --shape 65536x2048x7168" "gemm-rs --shape 65536x8192x2048" "gemm-ar --shape 8192x8192x7168" \
  "ring --shape 1048576x32x128" "moe --shape 65536x2048x7168 --experts 8192" "combine --shape 65536x7168x2048 --experts 8192"; do
  # shellcheck disable=SC2086
  text=$(plan --op $op --nodes 128)
  for word in predicted bound compute network "queue pairs" workspace limit; do
    grep -q "$word" <<<"$text" || fail "$op: no '$word' in
$text"
  done
  # shellcheck disable=SC2086
  text=$(plan --op $op --table --json "$folder/plan.json" --overwrite)
  [ "$(wc -l <<<"$text")" -eq 12 ] || fail "$op: not a line for each of 1 to 1024 nodes:
$text"
  python3 - "${op%% *}" "$folder/plan.json" <<'PROGRAM' || fail "$op: the JSON is not what the table shows"
import json, sys
op, path = sys.argv[1:]
report = json.load(open(path))
# All but these run in the largest job: kernels have no room for them.
crowded = {"ring": lambda nodes: nodes > 16, "moe": lambda nodes: 23 < nodes < 34 or nodes > 705}.get(op, lambda nodes: False)
plans = report["plans"]
assert [p["nodes"] for p in plans] == [2**i for i in range(11)]
for plan in plans:
    if op == "ring" and plan["nodes"] > 256:
        assert "too few for any way" in plan["error"], plan
        continue
    assert "error" not in plan, plan
    assert 0 < plan["share_of_bound"] <= 1.2 and plan["time_us"] > 0, plan
    assert bool(plan["obstacles"]) == crowded(plan["nodes"]), plan
    assert all("fewer nodes" in obstacle for obstacle in plan["obstacles"]), plan
PROGRAM
done
time_of() { plan --op gemm-ar --shape 8192x8192x7168 --nodes 16 "$@" | grep -oP '[0-9]+(?=\.[0-9] us predicted)'; }
# A rank sends 2 (N - 1) / N of its 16.8 MB, which takes 6291 us at 40 Gb/s.
slow=$(time_of --nic 40Gb/s)
[ "$slow" -ge 6291 ] && [ "$slow" -gt $((3 * $(time_of))) ] || fail "a slow NIC is not seen"
for rate in fast 0Gb/s -1GB/s 1e400Gb/s nanGB/s; do
  code=0
  error=$(plan --op gemm-ar --shape 64x64x64 --nic $rate 2>&1) || code=$?
  [ "$code" -eq 1 ] && grep -q "400Gb/s" <<<"$error" || fail "a rate that is none, $rate, ends with $code: $error"
done
