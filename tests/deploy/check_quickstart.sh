#!/usr/bin/env bash
# check_quickstart.sh <repository>: what deploy/quickstart.sh does on machines with other GPUs, compilers and headers than this one:
# with programs in place of nvidia-smi, nvcc, cmake and mkbench, which only note how they were called. It builds kernels and runs on GPUs
# where all of them are of compute capability 9.0 and all is there; elsewhere it says why not, runs on CPUs, and ends well.
set -euo pipefail
source_root=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/bin" "$work/tree/deploy" "$work/tree/build/release/tests/bench/mkbench" "$work/wheels/bin"
cp "$source_root/deploy/quickstart.sh" "$work/tree/deploy/"
program() {  # <path>: its text comes on stdin
  cat >"$1"
  chmod +x "$1"
}
program "$work/bin/nvidia-smi" <<'SH'
#!/bin/sh
[ -n "$GPUS" ] || { echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."; exit 9; }
case $* in *compute_cap*) printf '%s\n' $GPUS ;; -L) printf 'GPU %s\n' $GPUS ;; *) exit 1 ;; esac
SH
program "$work/bin/nvcc" <<'SH'
#!/bin/sh
echo "Cuda compilation tools, release $NVCC, V$NVCC.1"
SH
sed 's/\$NVCC/13.0/g' "$work/bin/nvcc" | program "$work/wheels/bin/nvcc"
program "$work/bin/cmake" <<SH
#!/bin/sh
echo "cmake \$*" >>"$work/calls"
case \$* in *MK_CUDA=AUTO*) echo "--   cute        \$CUTE" ;; esac
[ "\$CUTE" = ON ] || echo "  CuTe's headers are missing and could not be fetched"
SH
program "$work/tree/build/release/tests/bench/mkbench/mkbench" <<SH
#!/bin/sh
echo "mkbench \$*" >>"$work/calls"
SH
program "$work/tree/deploy/cuda-wheels.sh" <<SH
#!/bin/sh
echo "cuda-wheels \$*" >>"$work/calls"
[ "\$WHEELS" = yes ] && echo "$work/wheels"
SH

run() {  # <GPUs' capabilities> <release of nvcc> <ON or OFF: CuTe> <yes or no: the compiler from PyPI>
  : >"$work/calls"
  what="GPUs '$1', nvcc $2, CuTe $3, wheels $4"
  env -u CUDA_HOME -u CUDA_PATH PATH="$work/bin:/usr/bin:/bin" GPUS="$1" NVCC="$2" CUTE="$3" WHEELS="$4" \
    bash "$work/tree/deploy/quickstart.sh" --no-install >"$work/said" 2>&1 || { echo "$what: ends with $?"; cat "$work/said"; exit 1; }
  grep -q 'what this says, and what to do next' "$work/said" || { echo "$what: no last words"; exit 1; }
  gpu_runs=$(grep -c -- '--executor cuda' "$work/calls" || true)
}
is() { [ "$1" = "$2" ] || { echo "$what: $3: $1, and $2 is expected"; cat "$work/said" "$work/calls"; exit 1; }; }
on_cpus() {  # <why>
  is "$gpu_runs" 0 "runs on GPUs"
  grep -qF "$1" "$work/said" || { echo "$what: does not say '$1'"; cat "$work/said"; exit 1; }
  grep -q 'on the CPU only' "$work/said"
}

run "" 13.0 ON no
is "$gpu_runs" 0 "runs on GPUs"
grep -q -- '-DMK_CUDA=OFF' "$work/calls"
run "9.0" 13.0 ON no
is "$gpu_runs" 4 "runs on GPUs"
grep -q -- '-DMK_CUDA=AUTO' "$work/calls"
run "9.0 9.0" 13.1 ON no
is "$gpu_runs" 8 "runs on GPUs"
if grep -q '^cuda-wheels' "$work/calls"; then echo "$what: offers a compiler beside one that serves"; exit 1; fi
for others in 8.0 8.9 10.0 12.0 "9.0 8.0"; do
  run "$others" 13.0 ON yes
  on_cpus "not all of compute capability 9.0"
  grep -q -- '-DMK_CUDA=OFF' "$work/calls"
  if grep -q '^cuda-wheels' "$work/calls"; then echo "$what: offers a compiler for nothing"; exit 1; fi
done
for old in 11.8 12.9; do
  run "9.0" $old ON no
  on_cpus "no nvcc 13.0"
  run "9.0" $old ON yes
  is "$gpu_runs" 4 "runs on GPUs"
  grep -q -- "-DMK_NVCC=$work/wheels/bin/nvcc" "$work/calls"
done
run "9.0" 13.0 OFF no
on_cpus "CuTe's headers are missing"

# The build itself: an nvcc that is too old is left alone by default, and named where it was asked for.
mkdir "$work/project"
cat >"$work/project/CMakeLists.txt" <<CMAKE
cmake_minimum_required(VERSION 3.25)
project(nvcc LANGUAGES CXX)
list(APPEND CMAKE_MODULE_PATH "$source_root/deploy/cmake")
include(options)
include(toolchain)
get_property(features GLOBAL PROPERTY mk_features)
message(STATUS "CUDA is \${MK_HAVE_CUDA}: \${features}")
CMAKE
configure() { NVCC=$1 cmake -S "$work/project" -B "$work/project/build" "-DMK_NVCC=$work/bin/nvcc" "-DMK_CUDA=$2" >"$work/said" 2>&1; }
for old in 11.8 12.9; do
  what="AUTO with nvcc $old"
  configure $old AUTO || { echo "$what fails"; cat "$work/said"; exit 1; }
  grep -q "CUDA is OFF: .*cuda|OFF|$work/bin/nvcc is of CUDA $old, and 13.0 or later is needed" "$work/said"
done
what="ON with nvcc 11.8"
if configure 11.8 ON; then echo "$what configures"; exit 1; fi
tr -s '[:space:]' ' ' <"$work/said" | grep -q "MK_CUDA=ON, but $work/bin/nvcc is of CUDA 11.8, and 13.0 or later is needed"
echo "quickstart: all well"
