#!/usr/bin/env bash
# What the virtual machine runs: the fabrics' common tests over verbs, link loss, and every operator of mkbench over two
# daemons. Each step's cases (tests/runner/cases.py) and output come to /rdma-out.
#
#   job.sh BUILD_FOLDER [STEPS]      STEPS: only those whose names match this extended regular expression
set -u
build=$1
only=${2:-.}
here=$(dirname "$0")
out=/rdma-out
export MK_TEST_PATIENCE=5  # an emulated machine beside whatever else the host does

# step <name> <command>...: its cases are those of the GoogleTest XML that it wrote, or it is one itself.
step() {
  local name=$1 started=$SECONDS status=0 xml=$out/$1.xml verdict=passed
  [[ $name =~ $only ]] || return 0
  shift
  timeout 1500 "$@" >"$out/$name.log" 2>&1 || status=$?
  [ "$status" = 0 ] || verdict=failed
  if [ ! -s "$xml" ] || { [ "$verdict" = failed ] && ! grep -q '<failure' "$xml"; }; then
    echo "<testsuites><testcase classname='$name' name='' outcome='$verdict'/></testsuites>" >"$out/$name-itself.xml"
  fi
  echo "rdma: $name: $verdict ($((SECONDS - started)) s)"
  [ "$verdict" = passed ] || tail -n 30 "$out/$name.log"
}

# tests <name> <binary> <filter>
tests() { step "$1" "$build/tests/$2" --gtest_filter="$3" --gtest_output="xml:$out/$1.xml"; }

folder=$(mktemp -d)
for node in 0 1; do
  cat >"$folder/node$node.toml" <<END
node_id = $node
listen = "unix:$folder/peer$node"
[socket]
path = "$folder/client$node"
[[peer]]
id = $((1 - node))
address = "unix:$folder/peer$((1 - node))"
[fabric]
name = "verbs"
[fabric.verbs]
timeout = 18  # a software NIC in a slow machine acknowledges late
arrival = "ARRIVAL"
END
done

# operators <arrival>: two daemons, two ranks each, every element checked.
operators() {
  local node
  grep -oE '^[^ ]+' "$folder/operators" | sed "s/$/-$1/" | grep -qE "$only" || return 0
  for node in 0 1; do
    sed "s/ARRIVAL/$1/" "$folder/node$node.toml" >"$folder/run$node.toml"
    rm -f "$folder/ready$node"
    "$build/daemon/mkerneld" --config "$folder/run$node.toml" --ready-file "$folder/ready$node" >"$out/mkerneld$node-$1.log" 2>&1 &
    daemons[node]=$!
  done
  for node in 0 1; do
    until [ -s "$folder/ready$node" ] || ! kill -0 "${daemons[node]}" 2>/dev/null; do sleep 0.1; done
  done
  while read -r name arguments; do
    # shellcheck disable=SC2086
    step "$name-$1" "$build/tests/bench/mkbench/mkbench" "$name" --nodes 2 --local 2 --join "$folder/client0,$folder/client1" \
      --warmup 0 --iters 2 --timeout-ms 120000 $arguments
  done <"$folder/operators"
  kill "${daemons[@]}" 2>/dev/null
  wait "${daemons[@]}" 2>/dev/null
}
daemons=()

tests conformance daemon/fabric/fabric_conformance_test '*verbs*'
# The other forms of verbs fail in the same ways above the driver: fabric_verbs_test runs them all over software NICs of its own.
tests failure daemon/fabric/fabric_failure_test '*/verbs:*/verbs_immediate_striped'
tests two-processes daemon/fabric/fabric_two_process_test '*verbs*'
tests link-loss rdma/rdma_link_loss_test '*'
# Whatever operators this mkbench has, at sizes for a slow machine.
"$build/tests/bench/mkbench/mkbench" --help >"$folder/help"
while read -r name arguments; do
  if grep -q "^  $name  " "$folder/help"; then echo "$name $arguments"; fi
done >"$folder/operators" <<'END'
gemm-ar --m 192 --n 128 --k 64
gemm-rs --m 192 --n 128 --k 64
ag-gemm --m 192 --n 128 --k 64
moe --tokens 48 --hidden 128 --features 128 --experts 8
ring --seq 256 --query-heads 4 --causal
END
operators flag
operators immediate
step late-port bash "$here/late_port.sh" "$build" "$folder"
step recovery bash "$here/recovery.sh" "$build" "$folder" flag
