#!/usr/bin/env bash
# check_ptxas.sh [CuTe's include folder [build folder]]: reads ptxas' report of the hot kernels: what the build kept beside
# its objects, or, where it has none, of two kernels of each operator and all others, compiled here as the build does. Fails on
# a spill, a stack frame, wgmma serialised (C7509, C7510) or setmaxnreg ignored (C7506, C7508); prints each kernel's registers.
# The operators' leaders' roles may have a stack frame, which the product does not touch. The thread that loads for Ring
# Attention's, with 24 registers, may spill some words, once for each item.
# Needs nvcc where it compiles, no GPU; then a minute or two on two cores. NVCC and NVCC_FLAGS (added at the end) may be set.
set -u
cd "$(dirname "$0")/../.."
include=${1:-${MK_CUTLASS_INCLUDE:-}}
build=${2:-}
if [ -z "$include" ]; then
  include=$(find build*/ -maxdepth 5 -type d -path '*nvidia-cutlass/cutlass_library/source/include' 2>/dev/null | head -n 1)
fi
[ -f "$include/cute/arch/mma_sm90_gmma.hpp" ] || { echo "no CuTe headers in '$include': name their folder" >&2; exit 2; }
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

units=(kernels/cuda/*_kernels_*.cu kernels/cuda/core/*_kernels_*.cu tests/gpu/{gemm,grouped}_seams.cu)
units+=(kernels/ops/*/sm90{,_packed}_bf16.cu)
is_operator() { [[ $1 == kernels/ops/* ]]; }
# report <unit> <number>: puts it into $work/<number>.log.
report() {
  local few= kept=
  # The newest: a target that once had the unit leaves its report behind.
  [ -z "$build" ] || kept=$(find "$build" -path "*.dir/$(sed 's#^kernels/cuda/##; s#^kernels/ops/#__/ops/#; s#^tests/gpu/##' <<<"$1").o.ptxas" -not -path '*delays*' -printf '%T@ %p\n' |
    sort -rn | sed -n '1s/^[^ ]* //p')
  if [ -n "$kept" ]; then
    cp "$kept" "$work/$2.log"
    return
  fi
  is_operator "$1" && few=-DMK_CUDA_FEW_KERNELS
  "$nvcc" -std=c++20 -O3 -DNDEBUG --expt-relaxed-constexpr -I. -isystem "$include" \
    -gencode arch=compute_90a,code=sm_90a -Xptxas -v $few ${NVCC_FLAGS:-} -cubin -o "$work/$2.cubin" "$1" >"$work/$2.log" 2>&1 ||
    echo "$1 does not compile" >>"$work/$2.log.failed"
}
for i in "${!units[@]}"; do
  report "${units[$i]}" "$i" &
  [ $((i % 2)) = 1 ] && wait
done
wait

bad=0
for i in "${!units[@]}"; do
  if [ "$(cat "$work/$i.log")" = "front end only" ]; then
    echo "${units[$i]}: not in this build"
    continue
  fi
  echo "${units[$i]}"
  if [ -f "$work/$i.log.failed" ]; then
    cat "$work/$i.log"
    bad=1
    continue
  fi
  # One line per kernel: what it is, its registers, its stack and spills; and every line that ptxas adds to the usual ones.
  frames=0
  is_operator "${units[$i]}" && frames=1
  spills=0
  [[ ${units[$i]} == kernels/ops/ring/* ]] && spills=112
  c++filt <"$work/$i.log" | awk -v frames=$frames -v spills=$spills '
    /Compiling entry function/ { match($0, /\047.*\047 for/); name = substr($0, RSTART + 1, RLENGTH - 6); kernels++ }
    /bytes stack frame/ { frame = $0; if ((frames ? 0 : $1) > 0 || $5 + $9 > spills) { bad = 1; frame = frame "   <-- SPILLS" } }
    /Used [0-9]+ registers/ {
      match($0, /Used [0-9]+/)
      gsub(/mk::kernels::cuda::|mk::test::|\(anonymous namespace\)::|void |\(int\)|\(mk::kernels::cuda::BLayout\)/, "", name)
      sub(/>\(.*$/, ">", name)
      sub(/^ +/, "", frame)
      printf "  %s registers, %s\n      %s\n", substr($0, RSTART + 5, RLENGTH - 5), frame, name
    }
    /\(C7[0-9]+\)|serialized|setmaxnreg/ { print "  " $0; bad = 1 }
    END { if (!kernels) { print "  no kernel in the report"; bad = 1 }; exit bad }' || bad=1
done
[ $bad = 0 ] && echo "no spills, no stack frames where products are made, no serialised wgmma" || echo "FAILED"
exit $bad
