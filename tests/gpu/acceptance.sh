#!/usr/bin/env bash
# All that wants GPUs, in one go, on a machine that need not be able to build it.
#
#   bash tests/gpu/acceptance.sh pack BUILD FOLDER     where there is a build: its programs, and the libraries they need
#   bash FOLDER/acceptance.sh run OUT STEP[=SECONDS]...     where there are GPUs; OUT: a folder for logs and JSON
#
# Steps, each for as many GPUs as there are (MK_DEVICES: fewer), cut off after so many seconds if given:
#
#   cases      dma_queue_test; operators_gpu_test: the worlds on that many GPUs, and what needs no world
#   cases_all  the worlds on fewer GPUs, too
#   ring       ring_attention_gpu_test: Ring Attention, in the worlds on so many GPUs and fewer
#   delays     operators_gpu_delays_test (where it was built): ranks held up at random inside launches
#   client     client_gpu_test: through libmkclient, kills of ranks and daemons among them
#   lifetime   lifetime_gpu_test in full: operators destroyed right after a launch
#   fabric     gpu_fabric_test: bytes, flags and pace of the loopback fabric
#   gemm       gemm_test, gemm_seams_test
#   memcheck   compute-sanitizer over small cases, racecheck over fewer
#   one_node   operators_bench: fused against cuBLAS and NCCL, every element judged
#   alone      as one_node, each side also in a loop of its own, at its own clock
#   two_nodes  as one_node, the GPUs as two nodes joined by two mkerneld at 50 GB/s a rail
#   across     as one_node, as two nodes that each span all GPUs, two ranks on each, the daemons in the same process
#   mirror     mirror_bench: rank 0 of eight on one GPU, the others played by a second, as one node and as two of four
#   core       gemm_bench: the product by itself against cuBLAS
#   rails      rails_bench: what the paced fabric carries, and unpaced
#   torch      PyTorch's async-TP, where PyTorch is
#   sweep_one, sweep_two   by numbers of communication groups and sizes of chunks
#   sweep_mirror           the same of a mirrored rank of eight
#
# A table ends it; the exit status is 1 when a step failed, was cut off, or (of those that test or judge) looked at nothing; 2
# when nothing was run. NVLink multicast stays off.
set -u

steps=(cases cases_all ring delays client lifetime fabric gemm memcheck one_node alone two_nodes across mirror core rails torch sweep_one
  sweep_two sweep_mirror)
programs=(dma_queue_test operators_gpu_test ring_attention_gpu_test operators_gpu_delays_test client_gpu_test lifetime_gpu_test gpu_fabric_test gemm_test
  gemm_seams_test operators_bench mirror_bench gemm_bench rails_bench)

pack() {
  local build=$1 folder=$2 program library any=
  mkdir -p "$folder/lib"
  cp "$0" "$(dirname "$0")/../bench/torch_async_tp.py" "$folder/"
  for program in "${programs[@]/#/tests/gpu/}" daemon/mkerneld; do
    if [ -x "$build/$program" ]; then
      cp "$build/$program" "$folder/"
      any=1
    else
      echo "acceptance: $build/$program is not built: its steps will fail" >&2
    fi
  done
  if [ -z "$any" ]; then
    echo "acceptance: there is nothing in '$build': name a build folder, as build/release" >&2
    return 2
  fi
  # All but what belongs to the system, the compiler and CUDA: those the other machine has, newer.
  for library in $(ldd "$folder"/* 2>/dev/null | awk '$2 == "=>" && $3 ~ /^\// {print $3}' | sort -u); do
    case ${library##*/} in
      libc.so* | libm.so* | libpthread.so* | librt.so* | libdl.so* | libresolv.so* | libstdc++.so* | libgcc_s.so* | \
        libcublas* | libcudart* | libcuda.so*) ;;
      *) cp -L "$library" "$folder/lib/" ;;
    esac
  done
  return 0
}

# What a log says that was looked at: "N passed, N failed", "N rows, N wrong elements", or "nothing".
counts() {
  python3 - "$@" <<'PYTHON'
import re, sys
text = "\n".join(open(name, errors="replace").read() for name in sys.argv[1:])
passed = len(re.findall(r"^\[       OK \] \S+ \(", text, re.M))
failed = len(set(re.findall(r"^\[  FAILED  \] (\S+?),? .*\(\d+ ms\)", text, re.M)))
wrong = sum(int(n) for n in re.findall(r"\| (\d+) wrong", text))
rows = len(re.findall(r"\| \d+ wrong", text))
print(f"{rows} rows, {wrong} wrong elements" if rows else
      f"{passed} passed, {failed} failed" if passed + failed else "nothing")
PYTHON
}

step() {
  local devices=$1 out=$2 name=$3
  local worlds="*_on_$devices:OperatorBlocks*:OperatorLimits*" bench=(./operators_bench --devices "$devices")
  local nodes=(--nodes 2 --mkerneld ./mkerneld)
  case $name in
    cases) ./dma_queue_test && ./operators_gpu_test --gtest_filter="$worlds" ;;
    cases_all) ./dma_queue_test && ./operators_gpu_test ;;
    ring) ./ring_attention_gpu_test ;;
    delays) ./operators_gpu_delays_test --gtest_filter="$worlds" ;;
    client) ./client_gpu_test ;;
    lifetime) MK_TEST_LIFETIME=full ./lifetime_gpu_test ;;
    fabric) ./gpu_fabric_test ;;
    gemm) ./gemm_test && ./gemm_seams_test ;;
    memcheck)
      local case
      for case in memcheck:{ag_gemm,gemm_rs,gemm_ar}_{1x2,2x1} racecheck:{ag_gemm_1x2,ag_gemm_2x1,gemm_rs_1x2,gemm_ar_2x1}; do
        compute-sanitizer --error-exitcode 9 --tool "${case%%:*}" ./operators_gpu_test \
          --gtest_filter="*SmallShapes/${case#*:}_on_1" || return
      done ;;
    one_node) "${bench[@]}" --launches 20 --check-up-to 32768 --json "$out/operators_x$devices.json" ;;
    alone)
      "${bench[@]}" --launches 10 --alone 0.1 --check-up-to 32768 --json "$out/operators_x${devices}_alone.json" ;;
    two_nodes)
      "${bench[@]}" "${nodes[@]}" --launches 20 --check-up-to 32768 --json "$out/operators_2x$((devices / 2)).json" ;;
    across)
      "${bench[@]}" --ranks $((2 * devices)) --nodes 2 --launches 20 --check-up-to 16384 \
        --json "$out/operators_2x${devices}_on_$devices.json" ;;
    mirror)
      local mirror=(./mirror_bench --ranks 8 --launches 20 --check-up-to 16384)
      "${mirror[@]}" --json "$out/operators_1x8_mirrored.json" &&
        "${mirror[@]}" "${nodes[@]}" --json "$out/operators_2x4_mirrored.json" ;;
    sweep_mirror)
      local sweep=(./mirror_bench --ranks 8 --launches 8 --check-up-to 0) groups=() pairs=() chunks=() larger=() count
      for count in 0 3 6 12 24 36 48 72 96 144 192; do groups+=(--streams "$count"); done
      for count in 0 12 24 48 96; do pairs+=(--streams "$count"); done
      for count in 0 6 24 48; do pairs+=(--receive "$count"); done
      for count in 0 32768 65536 131072 262144; do chunks+=(--chunk "$count"); done
      for count in 0 131072 262144 524288 1048576; do larger+=(--chunk "$count"); done
      "${sweep[@]}" "${groups[@]}" --json "$out/operators_1x8_mirrored_sweep.json" &&
        "${sweep[@]}" --op ag_gemm "${chunks[@]}" --json "$out/operators_1x8_mirrored_chunks.json" &&
        "${sweep[@]}" "${nodes[@]}" "${pairs[@]}" --json "$out/operators_2x4_mirrored_sweep.json" &&
        "${sweep[@]}" "${nodes[@]}" "${larger[@]}" --json "$out/operators_2x4_mirrored_chunks.json" ;;
    core) ./gemm_bench --check --speed --json "$out/gemm.json" ;;
    rails)
      local rails=(./rails_bench ./mkerneld --locals $((devices > 1 ? devices / 2 : 1)))
      "${rails[@]}" --bandwidth 50GB/s && "${rails[@]}" ;;
    torch) env -u LD_LIBRARY_PATH python3 torch_async_tp.py | tee "$out/torch_async_tp_x$devices.json" ;;
    sweep_one | sweep_two)
      local groups=() all=() count op
      for count in 0 3 6 12 24 48 96 192; do groups+=(--streams "$count"); done
      [ "$name" = sweep_one ] || all=("${nodes[@]}" --receive 0 --receive 6 --receive 24 --receive 60)
      for op in ag_gemm gemm_rs gemm_ar; do
        local shapes=(--shape 4096x4096x512 --shape 16384x8192x3584)
        [ "$op" != ag_gemm ] || shapes=(--shape 4096x512x4096 --shape 16384x7168x8192)
        "${bench[@]}" "${all[@]}" --op "$op" "${shapes[@]}" "${groups[@]}" --chunk 0 --chunk 131072 --chunk 524288 \
          --launches 10 --json "$out/$name-$op.json" || return
      done ;;
  esac
}

run() {
  local out devices word name seconds log status began seen failed=0 table=()
  mkdir -p "$1" && out=$(realpath "$1") || return 2
  shift
  for word in "$@"; do
    case " ${steps[*]} " in
      *" ${word%%=*} "*) ;;
      *) echo "acceptance: no step '${word%%=*}'; there are: ${steps[*]}" >&2; return 2 ;;
    esac
  done
  devices=${MK_DEVICES:-$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')}
  if [ "$devices" -lt 1 ]; then
    echo "acceptance: nvidia-smi lists no GPU here" >&2
    return 2
  fi
  cd "$(dirname "$0")" || return 2
  export LD_LIBRARY_PATH=$PWD/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
  export -f step
  for word in "$@"; do
    name=${word%%=*}
    seconds=${word#"$name"}
    seconds=${seconds#=}
    log=$out/$name.log
    began=$SECONDS
    # By SIGKILL: programs that load libfabric catch SIGTERM.
    timeout -s KILL "${seconds:-0}" bash -o pipefail -c 'step "$@"' step "$devices" "$out" "$name" >"$log" 2>&1
    status=$?
    seen=$(counts "$log")
    case $status:$name:$seen in
      0:core:* | 0:rails:* | 0:torch:* | 0:sweep_*) word=ok ;;
      0:*:nothing) word="LOOKED AT NOTHING" ;;
      0:*) word=ok ;;
      124:* | 137:*) word="cut off after ${seconds:-0} s" ;;
      *) word="FAILED ($status)" ;;
    esac
    [ "$word" = ok ] || failed=1
    table+=("$(printf '%-12s %-22s %5d s  %s' "$name" "$word" $((SECONDS - began)) "$seen")")
    grep -E '^\[  FAILED  \]|: error|Failure$|hazard|ERROR SUMMARY: [^0]' "$log" | head -n 12
  done
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null
  printf '%s\n' "${table[@]}"
  return $failed
}

case ${1:-} in
  pack) [ $# -eq 3 ] && pack "$2" "$3" && exit ;;
  run) [ $# -ge 3 ] && shift && run "$@"; exit ;;
esac
sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2
exit 2
