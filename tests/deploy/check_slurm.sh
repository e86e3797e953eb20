#!/usr/bin/env bash
# check_slurm.sh <mkerneld> <mkctl> <gemm_all_reduce>: a real slurmctld and two slurmd with our prolog, epilog and health check, one
# mkerneld for each. Jobs run over both nodes by srun and by sbatch; a node whose daemon is drained or gone gets no job and is
# drained with a reason of ours; it is resumed when the daemon is back, unless somebody else had drained it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
deploy=$(cd "$here/../../deploy" && pwd)
mkerneld=$1 mkctl=$2 program=$3
. "$here/slurm.sh"
reason=$(slurm_missing)
[ -z "$reason" ] || { echo "$reason"; exit 77; }

work=$(mktemp -d)
daemons=()
finish() {
  status=$?
  [ $status = 0 ] || tail -n 15 "$work"/*.log "$work"/*.out 2>/dev/null || true
  slurm_stop
  for daemon in "${daemons[@]}"; do kill "$daemon" 2>/dev/null || true; done
  wait || true
  rm -rf "$work"
}
trap finish EXIT
step() { echo "-- $*"; }
until_ok() {  # <tenths of a second> <command>...
  local left=$1
  shift
  until "$@" >/dev/null 2>&1; do
    left=$((left - 1))
    [ $left -gt 0 ] || { echo "never: $*"; return 1; }
    sleep 0.1
  done
}
fails() { if "$@"; then echo "should have failed: $*"; return 1; fi; }

start_daemon() {  # <node>
  local other=$((1 - $1))
  "$mkerneld" --node-id "$1" --listen "unix:$work/node$1.peer" --socket "$work/node$1.sock" --peer "$other=unix:$work/node$other.peer" \
    --ready-file "$work/node$1.ready" 2>>"$work/daemon$1.log" &
  daemons[$1]=$!
  until_ok 300 test -e "$work/node$1.ready"
}
stop_daemon() { kill "${daemons[$1]}"; wait "${daemons[$1]}" || true; }
state_of() { sinfo --noheader --nodes="$1" --format=%T | head -n 1; }
reason_of() { sinfo --noheader --nodes="$1" --format=%E | head -n 1; }
is() { [ "$(state_of "$1")" = "$2" ]; }
# What slurmd runs with its own, bare environment: the scripts as installed, their configuration elsewhere.
mkdir "$work/scripts"
cp "$deploy"/slurm/{prolog,epilog,node-health,common.sh} "$work/scripts/"
sed -i "s#^mkernel_conf=.*#mkernel_conf=$work/mkernel.conf#" "$work/scripts/common.sh"
cat >"$work/mkernel.conf" <<END
PATH=\$PATH:$(dirname "$(command -v scontrol)")
export SLURM_CONF=$work/slurm.conf
MKCTL="$mkctl --address unix:$work/\$node.peer"
END
# Each of the two nodes of this one machine has a daemon of its own.
cat >"$work/task-prolog" <<END
#!/bin/sh
echo "export MKERNEL_SOCKET=$work/\$SLURMD_NODENAME.sock"
END
chmod +x "$work/task-prolog"

start_daemon 0
start_daemon 1
slurm_start "Prolog=$work/scripts/prolog" "Epilog=$work/scripts/epilog" "TaskProlog=$work/task-prolog" \
  "HealthCheckProgram=$work/scripts/node-health" "HealthCheckInterval=2" "PrologFlags=Alloc"

step "a job over two nodes by srun, and by sbatch"
timeout 150 srun -N 2 --ntasks-per-node=1 --distribution=block "$program" >"$work/srun.out" 2>&1
diff <(sort "$work/srun.out") - <<'END'
rank 0 of 2 (node 0 of 2): 1 launches, 32768 elements checked
rank 1 of 2 (node 1 of 2): 1 launches, 32768 elements checked
END
GEMM_ALL_REDUCE=$program timeout 150 sbatch --wait --quiet --chdir="$work" --output="$work/sbatch.out" "$deploy/examples/gemm_all_reduce.sbatch" 64 64 32
[ "$(grep -c 'launches, 2048 elements checked$' "$work/sbatch.out")" = 2 ]

step "a drained daemon: its node gets no job, and says why"
"$mkctl" --address "unix:$work/node1.peer" drain --timeout 0s >/dev/null
until_ok 150 is node1 drained
[ "$(reason_of node1)" = "mkernel: mkerneld is drained or shutting down" ]
fails timeout 5 srun -N 2 --immediate=1 true 2>/dev/null
timeout 30 srun -N 1 --nodelist=node0 true

step "resumed with the daemon"
"$mkctl" --address "unix:$work/node1.peer" resume >/dev/null
until_ok 150 is node1 idle
timeout 150 srun -N 2 --ntasks-per-node=1 "$program" >"$work/again.out" 2>&1

step "a daemon that is gone: the prolog drains its node and the job waits for another"
scontrol update nodename=node0 state=drain reason="a fan is broken"
sed -i 's/^HealthCheckInterval=.*/HealthCheckInterval=0/' "$work/slurm.conf"
scontrol reconfigure
stop_daemon 1
sbatch --quiet --requeue --chdir="$work" --output="$work/requeued.out" --wrap "echo it ran on \$SLURMD_NODENAME"
until_ok 200 is node1 drained
[ "$(reason_of node1)" = "mkernel: mkerneld does not answer" ]
fails test -s "$work/requeued.out"

step "without Slurm's programs, or without its configuration: each hook says so"
# As where Slurm is in /opt and /etc/mkernel/slurm.conf does not say so: a PATH that has all but Slurm.
mkdir "$work/bare" "$work/unconfigured"
for program in sh readlink dirname hostname head cat; do ln -s "$(command -v $program)" "$work/bare/$program"; done
printf '#!/bin/sh\necho "$*" >>"%s"\n' "$work/logged" >"$work/bare/logger"
chmod +x "$work/bare/logger"
cp "$work"/scripts/* "$work/unconfigured/"
sed -i "s#^mkernel_conf=.*#mkernel_conf=$work/unconfigured.conf#" "$work/unconfigured/common.sh"
echo "MKCTL='$mkctl --address unix:$work/node1.peer'" >"$work/unconfigured.conf"  # nobody answers there
for hook in prolog epilog node-health; do
  : >"$work/logged"
  status=0
  env -i PATH="$work/bare" SLURMD_NODENAME=node1 "$work/unconfigured/$hook" 2>"$work/hook.said" || status=$?
  [ $status = "$([ $hook = node-health ] && echo 0 || echo 1)" ]
  program=$([ $hook = node-health ] && echo sinfo || echo scontrol)
  for said in "$work/logged" "$work/hook.said"; do
    grep -q "$program failed on node1: .*PATH is $work/bare; $work/unconfigured.conf may set PATH, and export SLURM_CONF" "$said" ||
      { echo "$hook does not say that it has no $program:"; cat "$said"; exit 1; }
  done
done
[ "$(reason_of node1)" = "mkernel: mkerneld does not answer" ]

step "back: ours is resumed, and runs the job; what somebody else drained stays"
start_daemon 1
SLURMD_NODENAME=node0 "$work/scripts/node-health"
SLURMD_NODENAME=node1 "$work/scripts/node-health"
until_ok 300 grep -q 'it ran on node1' "$work/requeued.out"
[ "$(reason_of node0)" = "a fan is broken" ]
is node0 drained
echo "slurm: all well"
