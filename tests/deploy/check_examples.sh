#!/usr/bin/env bash
# check_examples.sh <mkerneld> <gemm_all_reduce> <libmkclient.so>: deploy/examples as its README starts them, but for Slurm's
# (check_slurm.sh): Open MPI on one node, torchrun on two, the CPU executor throughout.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
examples=$(cd "$here/../../deploy/examples" && pwd)
mkerneld=$1 program=$2 library=$3
ran=0

work=$(mktemp -d)
daemons=()
finish() {
  status=$?
  [ $status = 0 ] || tail -n 20 "$work"/*.out "$work"/*.log || true
  for daemon in "${daemons[@]}"; do kill "$daemon" 2>/dev/null || true; done
  wait || true
  rm -rf "$work"
}
trap finish EXIT
for node in 0 1; do
  "$mkerneld" --node-id $node --listen "unix:$work/$node.peer" --socket "$work/$node.sock" --peer "$((1 - node))=unix:$work/$((1 - node)).peer" \
    --ready-file "$work/$node.ready" 2>"$work/$node.log" &
  daemons+=($!)
done
for node in 0 1; do
  for _ in $(seq 300); do [ -e "$work/$node.ready" ] && break; sleep 0.1; done
  [ -e "$work/$node.ready" ]
done

if command -v mpirun >/dev/null; then
  MKERNEL_SOCKET=$work/0.sock timeout 60 mpirun --allow-run-as-root --oversubscribe -np 2 --map-by slot "$program" >"$work/mpirun.out" 2>&1
  diff <(sort "$work/mpirun.out") - <<'END'
rank 0 of 2 (node 0 of 1): 1 launches, 32768 elements checked
rank 1 of 2 (node 0 of 1): 1 launches, 32768 elements checked
END
  echo "mpirun: well"
  ran=$((ran + 1))
else
  echo "mpirun is missing (Debian: openmpi-bin)"
fi

# Debian's own Python: its torch is there, or not. Its torchrun (1.13 under Python 3.11) fails on "redirect nothing", the
# default, so that stderr goes through a file here.
if /usr/bin/python3 -c 'import torch.distributed.run' 2>/dev/null; then
  port=$(python3 "$here/../runner/free_ports.py")
  launchers=()
  for node in 0 1; do
    MKERNEL_SOCKET=$work/$node.sock MKERNEL_LIBRARY=$library OMP_NUM_THREADS=1 timeout 90 /usr/bin/python3 -m torch.distributed.run \
      --redirects 2 --tee 2 --nnodes 2 --node_rank $node --nproc_per_node 2 --master_addr 127.0.0.1 --master_port "$port" \
      "$examples/gemm_all_reduce.py" 64 96 32 >"$work/torchrun$node.out" 2>&1 &
    launchers+=($!)
  done
  for launcher in "${launchers[@]}"; do wait "$launcher"; done
  diff <(cat "$work"/torchrun?.out | grep elements | sort) - <<'END'
rank 0 of 4: 6144 elements checked
rank 1 of 4: 6144 elements checked
rank 2 of 4: 6144 elements checked
rank 3 of 4: 6144 elements checked
END
  echo "torchrun: well"
  ran=$((ran + 1))
else
  echo "torch is missing (Debian: python3-torch)"
fi
[ $ran = 2 ] || exit 77
