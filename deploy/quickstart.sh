#!/usr/bin/env bash
# From a fresh Debian 12 machine to a checked two-node run, in one command: installs what the build needs, builds the
# daemon, the client library and the tools, starts two mkerneld processes as two nodes of this machine with two ranks
# each, runs the fused GEMM+AllReduce over them beside its unfused form, and checks every element of every result.
#
#   bash deploy/quickstart.sh [--no-install] [extra options of `mkbench gemm-ar`]
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
step() { printf '== %s\n' "$*"; }
# Build output matters only when it fails.
quiet() {
  "$@" >"$log" 2>&1 || { tail -n 40 "$log"; printf 'quickstart: failed: %s (whole output: %s)\n' "$*" "$log"; exit 1; }
}

step "building (build/release; the first time takes some minutes, ccache makes the next one quick)"
quiet cmake --preset release -DMK_TESTS=OFF -DMK_BENCH=OFF -DMK_CUDA=OFF
quiet cmake --build build/release --target mkerneld mkctl mkbench
rm -f "$log"
printf '   done after %d s\n' $((SECONDS - started))

step "two nodes on this machine, two ranks each: fused against unfused GEMM+AllReduce over a paced link"
build/release/tests/bench/mkbench/mkbench gemm-ar --nodes 2 --local 2 --m 2048 --n 2048 --k 1024 \
  --fabric loopback --link-bandwidth balanced --warmup 1 --iters 3 "$@"

step "the same over libfabric's tcp provider"
build/release/tests/bench/mkbench/mkbench gemm-ar --nodes 2 --local 2 --m 512 --n 768 --k 256 \
  --fabric ofi --iters 3
