#!/usr/bin/env bash
# run.sh BUILD OUT: the stage rdma of tests/run.sh. Runs job.sh over the build in the virtual machine; OUT gets what it wrote. Exit
# status 77 where that cannot be had.
set -u
cd "$(dirname "$0")/../.."
if [ ! -x "$1/tests/rdma/rdma_link_loss_test" ]; then
  echo "skipped: this build has no verbs fabric"
  exit 77
fi
# Below ten minutes where nothing else runs, 11 beside a build; the time-out is for a machine that hangs.
exec bash tests/rdma/run_vm.sh --timeout 2000 --out "$2" -- bash tests/rdma/job.sh "$PWD/$1"
