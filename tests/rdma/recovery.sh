#!/usr/bin/env bash
# What a running job and its two daemons live through over verbs: a peer's daemon killed and started again, a port that
# goes down and comes back, an address replaced by another. Each time the job must have moved data over the network before,
# it must end with an error that names what broke (none may hang, none may go on with wrong numbers), the links must come
# back by themselves without a restart of what still runs, and the next job's every element must be right. Runs in the
# virtual machine of run_vm.sh; job.sh has written the configurations.
#
#   recovery.sh BUILD_FOLDER FOLDER_WITH_node0.toml ARRIVAL
set -u
build=$1 folder=$2 arrival=$3
interface=$MK_RDMA_VM_INTERFACE
daemons=()

die() {
  echo "recovery: $1"
  for node in 0 1; do echo "-- links of node $node"; links $node; done
  tail -n 15 "$folder"/recovery*.log
  kill -9 "${daemons[@]}" 2>/dev/null
  exit 1
}
# second_gid: where the GID table has 10.78.0.1 of RoCE v2.
second_gid() {
  local port=/sys/class/infiniband/rxe0/ports/1 i
  for i in $(seq 0 15); do
    grep -q 'ffff:0a4e:0001' "$port/gids/$i" && grep -q v2 "$port/gid_attrs/types/$i" && echo "$i" && return
  done 2>/dev/null
  return 1
}
start_daemon() {
  local node=$1
  sed "s/ARRIVAL/$arrival/" "$folder/node$node.toml" >"$folder/recovery$node.toml"
  # Node 1 speaks from the second address, which stays: it is node 0 that moves.
  [ "$node" = 0 ] || echo "gid_index = $(second_gid)" >>"$folder/recovery$node.toml"
  rm -f "$folder/up$node"
  "$build/daemon/mkerneld" --config "$folder/recovery$node.toml" --ready-file "$folder/up$node" >>"$folder/recovery$node.log" 2>&1 &
  daemons[node]=$!
  until [ -s "$folder/up$node" ]; do
    kill -0 "${daemons[node]}" 2>/dev/null || die "daemon $node did not start"
    sleep 0.1
  done
}
links() { "$build/daemon/mkctl/mkctl" --config "$folder/recovery$1.toml" --timeout 20s link list; }
# The bytes that node 0's links have carried so far.
sent() {
  "$build/daemon/mkctl/mkctl" --config "$folder/recovery0.toml" --timeout 20s --json link list |
    awk '$1 == "\"bytes\":" { sum += $2 } END { printf "%d\n", sum }'
}
traffic() { [ "$(sent)" -gt "$1" ]; }
bench() {
  "$build/tests/bench/mkbench/mkbench" gemm-ar --nodes 2 --local 2 --join "$folder/client0,$folder/client1" --m 192 --n 128 \
    --k 64 --warmup 0 --iters "$1" --timeout-ms 60000 >"$folder/bench.log" 2>&1
}
# await <seconds> <what> <command>...
await() {
  local until=$((SECONDS + $1)) what=$2
  shift 2
  until "$@"; do
    [ $SECONDS -lt $until ] || die "$what"
    sleep 2
  done
}
both_up() {
  local node
  for node in 0 1; do links $node 2>/dev/null | grep -q ' up ' || return 1; done
  for node in 0 1; do links $node 2>/dev/null | grep -q ' error ' && return 1; done
  return 0
}
# survive <name> <trouble> <repair> <broken>: trouble in the middle of a long job, then everything works again. `broken`: what
# the job's error has to name, an extended regular expression.
survive() {
  local name=$1 job status=0 before error
  before=$(sent)
  bench 3000 &  # longer than all that follows: it does not end by itself
  job=$!
  await 90 "$name: the job moves no data" traffic "$before"
  sleep 1
  kill -0 $job 2>/dev/null || { cat "$folder/bench.log"; die "$name: the job ended before the trouble"; }
  eval "$2"
  local since=$SECONDS
  while kill -0 $job 2>/dev/null; do
    [ $((SECONDS - since)) -lt 60 ] || { kill -9 $job; die "$name: the job hangs"; }
    sleep 0.2
  done
  wait $job || status=$?
  [ $status != 0 ] || die "$name: the job ended without an error"
  # The job was up when the trouble came, so no rank may complain that it did not come up.
  if grep -qE 'did not come up|not attached|nobody listens' "$folder/bench.log"; then
    cat "$folder/bench.log"
    die "$name: the job failed before all of it was up"
  fi
  error=$(grep -E "^ *rank [0-3]: (link-down|peer-lost): .*$4" "$folder/bench.log" | head -n 1)
  [ -n "$error" ] || { cat "$folder/bench.log"; die "$name: no error names '$4'"; }
  echo "$name: the job ended after $((SECONDS - since)) s:$error"
  eval "$3"
  since=$SECONDS
  # A job asks for the links at once; without one they come back with backoff.
  await 90 "$name: the links did not come back" both_up
  echo "$name: links up again after $((SECONDS - since)) s"
  bench 2 || { cat "$folder/bench.log"; die "$name: a job after it fails"; }
}

ip addr add 10.78.0.1/24 dev "$interface"
await 20 "the second address is not in the GID table" second_gid >/dev/null
start_daemon 0
start_daemon 1
bench 2 || { cat "$folder/bench.log"; die "the first job fails"; }
first=${daemons[0]}
link='(the link of rail 0 to node [01] .* is in error|node [01] \(.*\) rail 0 )'
survive "peer killed" 'kill -9 ${daemons[1]}; wait ${daemons[1]} 2>/dev/null' 'start_daemon 1; bench 2' \
  '(lost rank [23] on node 1 |the link of rail 0 to node 1 .* is in error|node 1 \(.*\) rail 0 )'
survive "port down" 'ip link set $interface down' 'ip link set $interface up' "$link"
survive "other address" 'ip addr del 10.77.0.1/24 dev $interface' ':' "$link"
kill -0 "$first" || die "daemon 0 did not live through all of it"
kill "${daemons[@]}"
wait "${daemons[@]}" 2>/dev/null
ip addr flush dev "$interface"
ip addr add 10.77.0.1/24 dev "$interface"
echo "recovered from all"
