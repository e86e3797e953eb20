#!/usr/bin/env bash
# build_previous.sh <folder> [jobs]: builds the release before this one, and prints the folder that then has its mkerneld, mkctl,
# libmkclient and the example of GEMM + AllReduce.
#
# That release is $MK_PREVIOUS (any name of a commit), or else the newest tag v* with another version than this one. Without tags it
# is the last commit of the previous minor version of the ABI. Exits 77, with the reason, where the history does not have it.
set -euo pipefail
cd "$(dirname "$0")/../.."
mkdir -p "$1"
folder=$(cd "$1" && pwd) jobs=${2:-$(nproc)}
skip() { echo "$*" >&2; exit 77; }

git rev-parse --git-dir >/dev/null 2>&1 || skip "this is no git checkout: there is no previous release to build"
previous=${MK_PREVIOUS:-}
if [ -z "$previous" ]; then
  version=v$(sed -n 's/^project(mkernel VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
  previous=$(git tag --merged HEAD --list 'v*' --sort=-v:refname | grep -vx "$version" | head -n 1 || true)
fi
if [ -z "$previous" ]; then
  minor=$(sed -n 's/.*kAbiMinor = \([0-9]*\);.*/\1/p' shm/layout.h)
  first=$(git log --format=%H -S"kAbiMinor = $minor;" -- shm/layout.h | tail -n 1)
  [ -n "$first" ] || skip "the history does not show when the ABI became 1.$minor (a shallow clone: git fetch --unshallow)"
  previous=$first^
fi
commit=$(git rev-parse --verify --quiet "$previous^{commit}") ||
  skip "the history has no $previous (a shallow clone: git fetch --unshallow)"

built=$folder/$commit
if [ ! -e "$built/done" ]; then
  mkdir -p "$built/source"
  git archive "$commit" | tar -x -C "$built/source"
  {
    cmake -S "$built/source" -B "$built/build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_C_FLAGS_RELWITHDEBINFO=-O1 \
      -DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -DMK_CUDA=OFF -DMK_TESTS=OFF -DMK_BENCH=OFF
    nice -n 5 cmake --build "$built/build" -j "$jobs" --target mkerneld mkctl mkclient
    library=$(find "$built/build" -name libmkclient.so | head -n 1)
    c++ -std=c++20 -I"$built/source" -I"$built/source/client/include" "$built/source/deploy/examples/gemm_all_reduce.cc" "$library" \
      -Wl,-rpath,"$(dirname "$library")" -o "$built/build/gemm_all_reduce_example"
  } >"$built/log" 2>&1 || { tail -n 30 "$built/log" >&2; exit 1; }
  touch "$built/done"
fi
echo "$built"
