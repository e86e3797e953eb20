#!/usr/bin/env bash
# All that wants GPUs, in one go, on a machine that need not be able to build it.
#
#   bash tests/gpu/acceptance.sh pack BUILD FOLDER     where there is a build: its programs, and the libraries they need.
#                                                      MK_WHEELS: a folder of wheels to take along
#   bash tests/gpu/acceptance.sh archive FOLDER        FOLDER, stripped, as FOLDER.tar.xz
#   bash FOLDER/acceptance.sh run OUT STEP[=SECONDS]...     where there are GPUs; OUT: a folder for logs and JSON
#   bash FOLDER/acceptance.sh each OUT STEP[=SECONDS]...    the same, every step on one GPU, as many at once as there are GPUs
#
# Steps, each for as many GPUs as there are (MK_DEVICES: fewer), cut off after so many seconds if given. Those with PyTorch run
# MK_PYTHON (default python3), and want the wheels fa3-fwd and sgl-deep-gemm where they compare with them:
#
#   cases      dma_queue_test; operators_gpu_test: the worlds on that many GPUs, and what needs no world
#   cases_all  the worlds on fewer GPUs, too
#   ring       ring_attention_gpu_test: Ring Attention, in the worlds on so many GPUs and fewer
#   moe, combine   moe_gpu_test, combine_gpu_test: the worlds on that many GPUs, and what needs no world
#   adaptive   adaptive_roles_gpu_test: an adaptive partition of Ring Attention and the halves of the MoE layer
#   collectives    collectives_gpu_test: AllGather and ReduceScatter alone; and client_gpu_test's cases of batch_invariant
#   delays     operators_gpu_delays_test (where it was built): ranks held up at random inside launches
#   client     client_gpu_test: through libmkclient, kills of ranks and daemons among them
#   lifetime   lifetime_gpu_test in full: operators destroyed right after a launch
#   fabric     gpu_fabric_test: bytes, flags and pace of the loopback fabric
#   gemm       gemm_test, gemm_seams_test
#   attention, grouped   attention_test; grouped_gemm_test, grouped_seams_test
#   memcheck   compute-sanitizer over small cases, racecheck over fewer
#   memcheck_moe   the same over MoE Dispatch+GEMM, GEMM+Combine (no racecheck) and Ring Attention
#   one_node   operators_bench: fused against cuBLAS and NCCL, every element judged
#   alone      as one_node, each side also in a loop of its own, at its own clock
#   partition  partition_bench: adaptive partitions of Ring Attention and the halves of the MoE layer against static ones, at even and at skewed routing
#   two_nodes  as one_node, the GPUs as two nodes joined by two mkerneld at 50 GB/s a rail
#   across     as one_node, as two nodes that each span all GPUs, two ranks on each, the daemons in the same process
#   mirror     mirror_bench: rank 0 of eight on one GPU, the others played by a second, as one node and as two of four
#   core       gemm_bench: the product by itself against cuBLAS
#   rails      rails_bench: what the paced fabric carries, and unpaced
#   torch      PyTorch's async-TP, where PyTorch is
#   ring_figures, ring_two_nodes   ring_bench.py: Ring Attention, FlashAttention-3 and NCCL, as one node and as two
#   moe_figures, moe_two_nodes     moe_bench.py: the MoE layer, and NCCL with torch._grouped_mm or DeepGEMM
#   collective_figures, collective_two_nodes   mkbench all-gather and reduce-scatter: small shapes checked, then larger ones timed;
#              on one node then NCCL in the same shapes (collectives_baseline.py)
#   layer, layer_two_nodes         mkbench moe, combine and moe-layer: small shapes checked, then large ones timed
#   attention_figures, grouped_figures   the products alone, beside FlashAttention-3, cuDNN and DeepGEMM
#   choices, choices_two_nodes   choices_bench: the planner's choice beside up to 64 candidates, 40 shapes
#   sweep_one, sweep_two   by numbers of communication groups and sizes of chunks
#   sweep_mirror           the same of a mirrored rank of eight
#
# A table ends it; the exit status is 1 when a step failed, was cut off, or (of those that test or judge) looked at nothing; 2
# when nothing was run. NVLink multicast stays off.
set -u

steps=(cases cases_all ring moe combine adaptive collectives delays client lifetime fabric gemm attention grouped memcheck memcheck_moe one_node alone partition
  two_nodes across mirror core rails torch ring_figures ring_two_nodes moe_figures moe_two_nodes layer layer_two_nodes attention_figures grouped_figures
  collective_figures collective_two_nodes choices choices_two_nodes sweep_one sweep_two sweep_mirror)
programs=(dma_queue_test operators_gpu_test collectives_gpu_test ring_attention_gpu_test moe_gpu_test combine_gpu_test adaptive_roles_gpu_test operators_gpu_delays_test
  client_gpu_test lifetime_gpu_test gpu_fabric_test gemm_test gemm_seams_test attention_test grouped_gemm_test grouped_seams_test operators_bench choices_bench mirror_bench
  partition_bench gemm_bench rails_bench libring_abi.so libmoe_abi.so libattention_abi.so libgrouped_gemm_abi.so)
scripts=({collectives_baseline,attention_bench,attention_judge,gpu_world,grouped_gemm_bench,grouped_judge,moe_baseline,moe_bench,moe_judge,moe_world}.py
  {ring_bench,ring_shards,ring_world,world_bench,../bench/torch_async_tp}.py)

# lacks LIBRARY SCRIPT...: says which functions that these scripts name the library does not show, in $folder.
lacks() {
  local library=$1 function
  shift
  [ -f "$folder/$library" ] || return
  for function in $(comm -23 <(grep -oh '\bmk_[a-z_]*[a-z]\b' "$@" | sort -u) \
    <(nm -D --defined-only "$folder/$library" | awk '{print $3}' | sort -u)); do
    echo "acceptance: $library shows no $function: steps that call it will fail" >&2
  done
}

pack() {
  local build=$1 folder=$2 program library wheel any=
  mkdir -p "$folder/lib"
  cp "$0" "${scripts[@]/#/$(dirname "$0")/}" "$folder/"
  for program in "${programs[@]/#/tests/gpu/}" daemon/mkerneld daemon/mkctl/mkctl tests/bench/mkbench/mkbench; do
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
  lacks libmoe_abi.so "$folder"/{moe_,gpu_world,grouped_gemm_bench}*.py
  lacks libring_abi.so "$folder"/{ring_,gpu_world,attention_bench}*.py
  # All but what belongs to the system, the compiler and CUDA: those the other machine has, newer.
  for library in $(ldd "$folder"/* 2>/dev/null | awk '$2 == "=>" && $3 ~ /^\// {print $3}' | sort -u); do
    case ${library##*/} in
      libc.so* | libm.so* | libpthread.so* | librt.so* | libdl.so* | libresolv.so* | libstdc++.so* | libgcc_s.so* | \
        libcublas* | libcudart* | libcuda.so*) ;;
      *) cp -L "$library" "$folder/lib/" ;;
    esac
  done
  # libmkclient loads oneDNN by itself.
  if grep -qs libdnnl "$folder/client_gpu_test" "$folder/mkbench"; then
    cp -L "$(ldconfig -p | awk '$1 ~ /^libdnnl/ {print $NF; exit}')" "$folder/lib/"
  fi
  for wheel in "${MK_WHEELS:+$MK_WHEELS/}"*.whl; do
    [ ! -f "$wheel" ] || python3 -m zipfile -e "$wheel" "$folder/wheels"
  done
  return 0
}

archive() {
  strip --strip-unneeded "$1"/{*_test,*_bench,*.so,mkerneld,mkctl,mkbench} "$1"/lib/* 2>/dev/null
  # Programs hold the same kernels: one dictionary over all of them.
  tar -C "$(dirname "$1")" -cf - "$(basename "$1")" | xz -T1 --lzma2=preset=1,dict=256MiB >"$1.tar.xz"
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

# TOOL of compute-sanitizer over a program's small case on one GPU.
sanitize() {
  compute-sanitizer --error-exitcode 9 --tool "$1" "./$2" --gtest_filter="*SmallShapes/$3_on_1"
}

# layer OUT NODES LOCALS: the two halves of a MoE layer and the whole, checked where float64 on the CPU is quick.
layer() {
  local name rank=(--nodes "$2" --local "$3" --executor cuda) world=$2x$3
  local rails=() experts=$((16 / ($2 * $3) * $2 * $3))
  [ "$2" = 1 ] || rails=(--link-bandwidth 50GB/s)
  for name in moe combine moe-layer; do
    ./mkbench $name "${rank[@]}" "${rails[@]}" --tokens 512 --hidden 1024 --features 512 --experts "$experts" --top-k 4 --iters 5 &&
      ./mkbench $name "${rank[@]}" "${rails[@]}" --tokens 4096 --hidden 7168 --features 2048 --experts "$experts" --top-k 8 --iters 9 \
        --lead 20 --verify none --json "$1/${name//-/_}_$world.json" || return
  done
}

# collective_figures OUT NODES LOCALS SHAPE...: of MxN each. Rows of few launches, as the CPU draws their inputs.
collective_figures() {
  local name shape out=$1 world=$2x$3 rank=(--nodes "$2" --local "$3" --executor cuda) rails=()
  [ "$2" = 1 ] || rails=(--link-bandwidth 50GB/s)
  shift 3
  for name in all-gather reduce-scatter; do
    ./mkbench $name "${rank[@]}" "${rails[@]}" --m 1030 --n 1024 --iters 5 || return
    for shape in "$@"; do
      ./mkbench $name "${rank[@]}" "${rails[@]}" --m "${shape%x*}" --n "${shape#*x}" --iters 9 --lead 20 --verify none \
        --json "$out/${name//-/_}_${world}_$shape.json" || return
    done
  done
}

step() {
  local devices=$1 out=$2 name=$3 case tool
  local worlds="*_on_$devices:OperatorBlocks*:OperatorLimits*" bench=(./operators_bench --devices "$devices")
  local nodes=(--nodes 2 --mkerneld ./mkerneld) ring=("$MK_PYTHON" ring_bench.py --library ./libring_abi.so)
  local moe=("$MK_PYTHON" moe_bench.py --library ./libmoe_abi.so)
  case $name in
    cases) ./dma_queue_test && ./operators_gpu_test --gtest_filter="$worlds" ;;
    cases_all) ./dma_queue_test && ./operators_gpu_test ;;
    ring) ./ring_attention_gpu_test ;;
    moe) ./moe_gpu_test --gtest_filter="$worlds" ;;
    combine) ./combine_gpu_test --gtest_filter="$worlds" ;;
    adaptive) ./adaptive_roles_gpu_test ;;
    collectives) ./collectives_gpu_test && ./client_gpu_test --gtest_filter='*BatchInvariance*' ;;
    delays) ./operators_gpu_delays_test --gtest_filter="$worlds" ;;
    client) ./client_gpu_test ;;
    lifetime) MK_TEST_LIFETIME=full ./lifetime_gpu_test ;;
    fabric) ./gpu_fabric_test ;;
    gemm) ./gemm_test && ./gemm_seams_test ;;
    attention) ./attention_test ;;
    grouped) ./grouped_gemm_test && ./grouped_seams_test ;;
    memcheck)
      for case in {ag_gemm,gemm_rs,gemm_ar}_{1x2,2x1}; do sanitize memcheck operators_gpu_test "$case" || return; done
      for case in ag_gemm_1x2 ag_gemm_2x1 gemm_rs_1x2 gemm_ar_2x1; do sanitize racecheck operators_gpu_test "$case" || return; done ;;
    memcheck_moe)
      for case in {moe,combine,ring_attention}_gpu_test:{1x2,2x1}; do sanitize memcheck "${case%:*}" "*${case#*:}" || return; done
      # GEMM+Combine has what racecheck does not follow (README.md).
      for case in {moe,ring_attention}_gpu_test:{1x2,2x1}; do sanitize racecheck "${case%:*}" "*${case#*:}" || return; done ;;
    one_node) "${bench[@]}" --launches 20 --check-up-to 32768 --json "$out/operators_x$devices.json" ;;
    alone)
      "${bench[@]}" --launches 10 --alone 0.1 --check-up-to 32768 --json "$out/operators_x${devices}_alone.json" ;;
    partition)
      local partition=(./partition_bench --devices "$devices" --ranks $((devices > 1 ? devices : 2)) --op ring --op moe --op combine)
      "${partition[@]}" --json "$out/partition_roles_x$devices.json" &&
        "${partition[@]}" --hot 0.6 --json "$out/partition_roles_hot_x$devices.json" ;;
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
    torch) env -u LD_LIBRARY_PATH "$MK_PYTHON" torch_async_tp.py | tee "$out/torch_async_tp_x$devices.json" ;;
    ring_figures)
      "${ring[@]}" --nodes 1 --locals "$devices" --set paper --set causal --set heads --set d64 --set batch --trace \
        --json "$out/ring_1x$devices.json" ;;
    ring_two_nodes)
      "${ring[@]}" --nodes 2 --locals $((devices / 2)) --set heads --set paper --set causal --set d64 --set batch --trace \
        --json "$out/ring_2x$((devices / 2)).json" ;;
    moe_figures)
      "${moe[@]}" --nodes 1 --locals "$devices" --set deepseek --set skew --set models --set decode --set one \
        --json "$out/moe_1x$devices.json" ;;
    moe_two_nodes)
      "${moe[@]}" --nodes 2 --locals $((devices / 2)) --set deepseek --set skew --set models --set decode \
        --json "$out/moe_2x$((devices / 2)).json" ;;
    collective_figures)
      local shapes=(1024x8192 4096x8192 16384x8192)
      collective_figures "$out" 1 "$devices" "${shapes[@]}" &&
        env -u LD_LIBRARY_PATH "$MK_PYTHON" collectives_baseline.py --devices "$devices" "${shapes[@]/#/--shape=}" \
          --json "$out/collectives_nccl_x$devices.json" ;;
    collective_two_nodes) collective_figures "$out" 2 $((devices / 2)) 4096x8192 16384x8192 ;;
    layer) layer "$out" 1 "$devices" ;;
    layer_two_nodes) layer "$out" 2 $((devices / 2)) ;;
    attention_figures)
      "$MK_PYTHON" attention_bench.py --library ./libattention_abi.so --set goals --set f16 --set batch --json "$out/attention.json" ;;
    grouped_figures)
      "$MK_PYTHON" grouped_gemm_bench.py --library ./libgrouped_gemm_abi.so --set goals --set models --set small \
        --json "$out/grouped_gemm.json" ;;
    choices | choices_two_nodes)
      local op shapes world=1x$devices across=()
      if [ "$name" = choices_two_nodes ]; then
        world=2x$((devices / 2))
        across=("${nodes[@]}")
      fi
      for op in ag_gemm gemm_rs gemm_ar; do
        shapes=(2048x4096x7168 8192x4096x7168 512x4096x7168 16384x8192x4096 4096x4096x2048 64x4096x2048 1000x5120x12800
          16384x8192x14336 8192x2560x4864 256x8192x14336 32768x4096x2048 3000x5120x3072 128x8192x4096)
        [ "$op" != ag_gemm ] || shapes=(2048x14336x4096 8192x14336x4096 512x14336x4096 16384x5120x8192 4096x3072x4096 64x3072x4096
          1000x25600x5120 16384x7168x8192 8192x7168x8192 4096x1280x8192 256x14336x8192 32768x2560x4096 3000x9728x2560 128x5120x8192)
        # shellcheck disable=SC2046 # a word each
        ./choices_bench --devices "$devices" "${across[@]}" --op "$op" $(printf -- "--shape %s " "${shapes[@]}") --launches 15 \
          --check-up-to 2100 --json "$out/choices_${world}_$op.json" || return
      done ;;
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

# measured NAME[=SECONDS] DEVICES OUT: runs a step, with its output in OUT/NAME.log, and its line of the table in OUT/NAME.line.
measured() {
  local name=${1%%=*} seconds=${1#"${1%%=*}"} log=$3/${1%%=*}.log began=$SECONDS status seen word
  seconds=${seconds#=}
  # By SIGKILL: programs that load libfabric catch SIGTERM.
  timeout -s KILL "${seconds:-0}" bash -o pipefail -c 'step "$@"' step "$2" "$3" "$name" >"$log" 2>&1
  status=$?
  seen=$(counts "$log")
  case $status:$name:$seen in
    0:core:* | 0:rails:* | 0:torch:* | 0:choices* | 0:sweep_* | 0:ring_*:* | 0:moe_*:* | 0:layer*:* | 0:*_figures:* | 0:collective_two_nodes:*) word=ok ;;
    0:*:nothing) word="LOOKED AT NOTHING" ;;
    0:*) word=ok ;;
    124:* | 137:*) word="cut off after ${seconds:-0} s" ;;
    *) word="FAILED ($status)" ;;
  esac
  printf '%-17s %-22s %5d s  %s\n' "$name" "$word" $((SECONDS - began)) "$seen" >"$3/$name.line"
  grep -E '^\[  FAILED  \]|: error|Failure$|hazard|ERROR SUMMARY: [^0]' "$log" | head -n 12
  [ "$word" = ok ]
}

run() {
  local how=$1 out devices word failed=0 gpu free=() names=()
  mkdir -p "$2" && out=$(realpath "$2") || return 2
  shift 2
  for word in "$@"; do
    case " ${steps[*]} " in
      *" ${word%%=*} "*) names+=("${word%%=*}") ;;
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
  export PYTHONPATH=$PWD/wheels${PYTHONPATH:+:$PYTHONPATH} MK_PYTHON=${MK_PYTHON:-python3}
  export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
  export -f step sanitize layer collective_figures
  if [ "$how" = run ]; then
    for word in "$@"; do measured "$word" "$devices" "$out" || failed=1; done
  else
    # The numbers of free GPUs go round in a pipe.
    exec {free}<> <(:)
    for ((gpu = 0; gpu < devices; ++gpu)); do echo "$gpu" >&"$free"; done
    for word in "$@"; do
      read -r gpu <&"$free"
      { CUDA_VISIBLE_DEVICES=$gpu measured "$word" 1 "$out"; echo "$gpu" >&"$free"; } &
    done
    wait
    exec {free}>&-
    for word in "${names[@]}"; do grep -q "^$word *ok " "$out/$word.line" || failed=1; done
  fi
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null
  for word in "${names[@]}"; do cat "$out/$word.line"; done
  return $failed
}

case ${1:-} in
  pack) [ $# -eq 3 ] && pack "$2" "$3" && exit ;;
  archive) [ $# -eq 2 ] && archive "$2" && exit ;;
  run | each) [ $# -ge 3 ] && run "$@"; exit ;;
esac
sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2
exit 2
