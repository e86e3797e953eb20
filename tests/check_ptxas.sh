#!/usr/bin/env bash
# check_ptxas.sh <build folder>: no CUDA kernel may spill registers or have wgmma serialised. Reads the
# reports that the build keeps beside each object (deploy/cmake/ptxas_report.sh).
# One exception, as in kernels/cuda/check_ptxas.sh: the thread that loads for Ring Attention, with 24 registers, may spill some words,
# once for each item.
set -eu
mapfile -t reports < <(find "$1" -name '*.ptxas' | sort)
[ ${#reports[@]} -gt 0 ] || { echo "no ptxas report under $1: nothing was compiled" >&2; exit 1; }
bad=0
read=0
for report in "${reports[@]}"; do
  # Of a source that has moved, an earlier build's report is still there.
  object=${report#"${1%/}"/}
  [ ! -f "$1/compile_commands.json" ] || grep -qF -- "-o ${object%.ptxas}" "$1/compile_commands.json" || continue
  read=$((read + 1))
  most=0
  [[ $report != */ops/ring/* ]] || most=112
  # A function's name stands on the line before its figures.
  spills=$(awk -v most=$most '/Function properties for/ { name = $NF }
                /bytes spill stores/ && ($5 + $9 > most) { print name ": " $0 }' "$report" | c++filt)
  if [ -n "$spills" ]; then
    echo "$report spills:"
    echo "$spills"
    bad=1
  fi
  # C7510: wgmma serialised; C7508: setmaxnreg ignored; and their like.
  if grep -nE '\(C7[0-9]+\)|serialized|setmaxnreg' "$report"; then
    echo "$report: ptxas gave up an optimisation"
    bad=1
  fi
done
echo "$read reports read"
[ $read -gt 0 ] || bad=1
exit $bad
