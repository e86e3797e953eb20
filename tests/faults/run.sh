#!/usr/bin/env bash
# Faults over real processes, see README.md. Arguments go to fault_run: --repetitions N --seed N --only FAULT --json FILE.
# Takes the build of MK_BUILD_ROOT (default: build/) /dev, building it if need be.
set -eu
cd "$(dirname "$0")/../.."
root=${MK_BUILD_ROOT:-$PWD/build}/dev
if [ ! -x "$root/tests/faults/fault_run" ]; then
  cmake --preset dev -B "$root" >/dev/null
  cmake --build "$root" -j "$(nproc)" --target fault_run
fi
exec "$root/tests/faults/fault_run" "$@"
