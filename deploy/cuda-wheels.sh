#!/usr/bin/env bash
# cuda-wheels.sh [--ask] [folder]: CUDA's compiler for a machine that has a GPU and its driver, but no toolkit. Installs
# PyPI's wheels of nvcc that cuda-wheels.txt pins by their hashes into the folder (build/cuda-13.0; 105 MB to fetch, 270 MB
# on disk), tries the compiler, and prints what CUDA_HOME must be: configure with it, and CMake finds this nvcc. Nothing
# outside the folder changes; removing it undoes all. What is there already is used again.
#
# --ask: asks on the terminal first. Where there is none, the answer is $MK_CUDA_WHEELS (yes or no; no).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
ask=no
if [ "${1:-}" = "--ask" ]; then
  ask=yes
  shift
fi
[ $# -le 1 ] || { echo "usage: cuda-wheels.sh [--ask] [folder]" >&2; exit 2; }
folder=${1:-"$here/../build/cuda-13.0"}
[ "$(uname -m)" = x86_64 ] || { echo "cuda-wheels.sh: pinned for x86_64, not $(uname -m)" >&2; exit 1; }

# Whether nvcc in $1 makes a kernel for the GPU and a program around it.
works() {
  local work status=0
  [ -x "$1/bin/nvcc" ] || return 1
  work=$(mktemp -d)
  cat >"$work/try.cu" <<'CU'
#include <cuda/atomic>
__global__ void add(int* word) { cuda::atomic_ref<int>(*word).fetch_add(1); }
int main() { add<<<1, 1>>>(nullptr); }
CU
  "$1/bin/nvcc" -std=c++20 -gencode arch=compute_90a,code=sm_90a -o "$work/try" "$work/try.cu" >"$work/log" 2>&1 || {
    status=1
    cat "$work/log" >&2
  }
  rm -rf "$work"
  return $status
}

home=$folder/nvidia/cu13
if ! cmp -s "$here/cuda-wheels.txt" "$folder/installed.txt"; then
  if [ "$ask" = yes ]; then
    answer=${MK_CUDA_WHEELS:-}
    if [ -z "$answer" ] && [ -t 0 ]; then
      read -r -p "Install CUDA's compiler from PyPI into $folder (105 MB to fetch)? [y/N] " answer
    fi
    case "$answer" in
      [yY]*) ;;
      *)
        echo "cuda-wheels.sh: not installed; MK_CUDA_WHEELS=yes says yes without being asked" >&2
        exit 1
        ;;
    esac
  fi
  python3 -m pip --version >/dev/null 2>&1 || { echo "cuda-wheels.sh: needs pip (Debian: python3-pip)" >&2; exit 1; }
  rm -rf "$folder"
  mkdir -p "$folder"
  PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-compile \
    --no-deps --require-hashes --only-binary :all: --target "$folder" -r "$here/cuda-wheels.txt" >&2
  # Where nvcc looks for libraries, and what CMake looks for.
  ln -s lib "$home/lib64"
  ln -s libcudart.so.13 "$home/lib/libcudart.so"
  works "$home" || { echo "cuda-wheels.sh: the compiler in $home does not work" >&2; exit 1; }
  cp "$here/cuda-wheels.txt" "$folder/installed.txt"
fi
(cd "$home" && pwd)
