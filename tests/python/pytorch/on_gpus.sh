#!/usr/bin/env bash
# on_gpus.sh: the package with CUDA tensors, on a machine that has GPUs, Python and PyTorch, and need not be able to build.
#
#   bash tests/python/pytorch/on_gpus.sh pack BUILD FOLDER     the wheels of a build with CUDA kernels, and the tests
#   bash FOLDER/on_gpus.sh run [pytest argument]...            where the GPUs are
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
case ${1:-} in
  pack)
    build=$2 folder=$3
    mkdir -p "$folder/tests"
    bash "$here/../../../deploy/wheels.sh" --build "$build" --out "$folder"
    cp -r "$here/.." "$folder/tests/python"
    cp "$here/on_gpus.sh" "$folder/" ;;
  run)
    shift
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    # A wheel is an archive: nothing more is needed, and nothing of the machine's Python changes.
    for wheel in "$here"/*.whl; do python3 -m zipfile -e "$wheel" "$work"; done
    chmod -R a+rx "$work"
    export PYTHONPATH=$work MKERNEL_INSTALLED=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
    cd "$here"
    python3 -B -m pytest -q -p no:cacheprovider -rs tests/python/pytorch/test_gpu.py "$@" ;;
  *)
    sed -n '2,5s/^# \{0,1\}//p' "$0"
    exit 2 ;;
esac
