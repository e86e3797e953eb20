#!/usr/bin/env bash
# From a fresh Debian 12 machine to a checked two-node run, in one command: installs what the build needs, builds the
# daemon, the client library and the tools, starts two mkerneld processes as two nodes of this machine with two ranks
# each, runs the six fused operators over them beside their unfused forms, and checks every element of every result.
# Where all GPUs are H100 or H200, it builds the kernels too and runs the three tensor-parallel operators and Ring
# Attention on them, as one node and, of an even number, as two; without nvcc 13.0 it offers to put PyPI's pinned CUDA compiler
# into the build folder. Elsewhere everything runs on CPUs.
#
#   bash deploy/quickstart.sh [--no-install] [extra options of `mkbench all`]
#
# Everything it starts ends with it; it leaves the build folder build/release and nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = "--no-install" ]; then
  shift
else
  bash deploy/install-deps.sh --build
fi

log=build/quickstart.log
mkdir -p build
started=$SECONDS
# Before the build, which is work of our own.
load=$(cut -d ' ' -f 1 /proc/loadavg)
step() { printf '== %s\n' "$*"; }
# Build output matters only when it fails.
quiet() {
  "$@" >"$log" 2>&1 || { tail -n 40 "$log"; printf 'quickstart: failed: %s (whole output: %s)\n' "$*" "$log"; exit 1; }
}

on_cpus() {  # <why>
  printf 'quickstart: %s: on the CPU only\n' "$1"
  gpus=0
}
# The nvcc that the build would take, if it is of CUDA 13.0 or later (cmake/toolchain.cmake).
nvcc_serves() {
  local nvcc
  for nvcc in "${CUDA_HOME:+$CUDA_HOME/bin/nvcc}" "${CUDA_PATH:+$CUDA_PATH/bin/nvcc}" "$(command -v nvcc)" /usr/local/cuda/bin/nvcc; do
    [ -x "$nvcc" ] || continue
    [ "$("$nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9]*\).*/\1/p')" -ge 13 ] 2>/dev/null
    return
  done
  return 1
}
# The kernels are machine code for compute capability 9.0, and ranks take GPUs by number: all must have it.
gpus=0 nvcc=()
if capabilities=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null) && [ -n "$capabilities" ]; then
  gpus=$(wc -l <<<"$capabilities")
  if others=$(grep -vx '9\.0' <<<"$capabilities"); then
    on_cpus "$gpus GPUs, not all of compute capability 9.0 (H100, H200) but $(sort -u <<<"$others" | paste -sd ' ')"
  fi
fi
if [ "$gpus" -gt 0 ] && ! nvcc_serves; then
  if CUDA_HOME=$(bash deploy/cuda-wheels.sh --ask); then
    export CUDA_HOME
    nvcc=("-DMK_NVCC=$CUDA_HOME/bin/nvcc")  # an older one may have been found before
  else
    on_cpus "$gpus GPUs, but no nvcc 13.0 to build kernels for them"
  fi
fi
if [ "$gpus" -gt 0 ]; then cuda=AUTO; else cuda=OFF; fi

step "building (build/release; the first time takes some minutes, ccache makes the next one quick)"
quiet cmake --preset release -DMK_TESTS=OFF -DMK_BENCH=OFF -DMK_CUDA="$cuda" "${nvcc[@]}"
if [ "$gpus" -gt 0 ] && ! grep -qE '^-- +cute +ON' "$log"; then
  on_cpus "$gpus GPUs, but $(grep -oE "(CuTe's headers are missing|[^ ]*nvcc[^ ]* is of CUDA).*|no nvcc.*" "$log" | head -n 1)"
fi
quiet cmake --build build/release --target mkerneld mkctl mkbench
rm -f "$log"
printf '   done after %d s\n' $((SECONDS - started))

step "two nodes on this machine, two ranks each: fused against unfused over links paced to take as long as the computation"
build/release/tests/bench/mkbench/mkbench all --nodes 2 --local 2 --warmup 1 --iters 5 "$@"

step "one of them at a size where overlap gains more, and its links"
build/release/tests/bench/mkbench/mkbench gemm-ar --nodes 2 --local 2 --m 2048 --n 2048 --k 1024 \
  --link-bandwidth balanced --warmup 1 --iters 3

step "all of them over libfabric's tcp provider, at full speed"
build/release/tests/bench/mkbench/mkbench all --nodes 2 --local 2 --warmup 1 --iters 3 --fabric ofi

# The checks take longest here: a few launches.
on_gpus() {
  local nodes=$1 operator
  shift
  for operator in "ag-gemm --m 4096 --n 2048 --k 4096" "gemm-rs --m 4096 --n 4096 --k 1024" "gemm-ar --m 4096 --n 4096 --k 1024" \
    "ring --seq 8192 --query-heads 32 --key-heads 8 --head-dim 128 --causal"; do
    # shellcheck disable=SC2086  # an operator and its sizes
    build/release/tests/bench/mkbench/mkbench $operator --executor cuda --nodes "$nodes" \
      --local $((gpus / nodes)) --warmup 1 --iters 3 "$@"
  done
}
if [ "$gpus" -gt 0 ]; then
  step "AllGather+GEMM, GEMM+ReduceScatter, GEMM+AllReduce and Ring Attention on $gpus GPUs, a rank on each"
  on_gpus 1
  if [ $((gpus % 2)) = 0 ]; then
    step "the same as two nodes, joined at 50 GB/s a GPU"
    on_gpus 2 --link-bandwidth 50GB/s
  fi
fi

# The rows above may end on "slower". This says why on a machine of $1 CPUs whose load was $2 when we began.
figures_mean() {
  if [ "$1" -lt 8 ]; then
    printf '   %s\n' \
      "This machine is small, so speed-ups below 1 say little about mkernel: four ranks, two daemons and the copies of the network" \
      "share $1 CPUs. A fused kernel gains by hiding the time of a network that works beside the computation. The rows with paced" \
      "links show that, and the last ones have nothing to hide. With a CPU for each rank and daemon, or a GPU for each rank, those" \
      "rows gain, too."
  fi
  if awk -v cpus="$1" -v load="$2" 'BEGIN { exit !(load > cpus / 4) }'; then
    printf '   %s\n' "This machine was busy when the quickstart began (load $2 on $1 CPUs), so the times mean little. Run it again on an idle one."
  fi
}
step "what this says, and what to do next"
printf '   Results were compared with a float64 reference: every element, but of Ring Attention on GPUs some hundred rows.\n'
figures_mean "$(nproc)" "$load"
printf '   %s\n' \
  "Next: all documents, deploy/docs/index.md; a job of your own, deploy/examples;" \
  "daemons on real nodes, deploy/docs/tutorials/03_two_nodes.md; other sizes, build/release/tests/bench/mkbench/mkbench --help."
