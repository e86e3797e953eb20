#!/usr/bin/env bash
# Installs, builds and runs every test. Ends with "N passed, N failed", alone on the last line; exits 1 when anything
# failed.
#
#   bash tests/run.sh [--stage deps,style,model,fuzz,unit,sim,cuda,ops,rdma,asan,tsan,tidy,package] [--jobs N] [--label REGEX]
#
# deps   install the Debian packages            unit   build the dev preset, run all its tests
# style  formatting, layout, folder READMEs     asan   the same under address and undefined-behaviour sanitizers; line coverage
# tidy   clang-tidy on the product's sources    tsan   the same under the thread sanitizer
# cuda   what can be checked of the CUDA kernels without a GPU (when nvcc is there)
# model  the protocol models and their mutants   fuzz   libFuzzer over what comes from outside (MK_FUZZ_SECONDS
#        each, default 20; nightly: 600)
# rdma   verbs over a software RDMA NIC in a virtual machine without KVM (tests/rdma): 4 to 11 minutes, beside the next build
# sim    whole clusters under simulation, fresh seeds for MK_SIM_SECONDS (default 120); the fixed seeds are in unit
# ops    units, metrics, alerts and dashboards, discovery, restarts, Slurm, launchers, Kubernetes, README's commands
# package  builds the Debian packages and lives with them in a Debian of their own; only when named (10 minutes)
#
# --label runs only the tests with a matching label. MK_BUILD_ROOT moves the build folders (default: build/).
# A run of all stages is to end within MK_BUDGET_S (default 3450 s): tsan and tidy begin only where they will have ended by then
# (tsan: two fifths of what unit took; tidy: 120 s); on a slow machine they are left out, and the summary says so. Nightly: more.
# MK_TIDY_BUDGET_S bounds clang-tidy, which begins with what changed last (default: what is left of MK_BUDGET_S, at least
# 120 s); MK_TIDY=all gives it the tests' sources too (twice the time).
set -u
cd "$(dirname "$0")/.."
root=$PWD
# By name only, for its time: package.
default_stages=deps,style,model,fuzz,unit,sim,cuda,ops,rdma,asan,tsan,tidy
all_stages=$default_stages,package
stages=$default_stages
budget_s=${MK_BUDGET_S:-3450}
jobs=$(nproc)
label=
while [ $# -gt 0 ]; do
  case $1 in
    --stage | --stages | --jobs | --label)
      [ $# -ge 2 ] || { echo "run.sh: $1 needs a value" >&2; exit 2; }
      case $1 in --jobs) jobs=$2 ;; --label) label=$2 ;; *) stages=$2 ;; esac
      shift 2 ;;
    -h | --help) sed -n '2,23s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "run.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
  esac
done
for stage in ${stages//,/ }; do
  case ,$all_stages, in
    *,"$stage",*) ;;
    *) echo "run.sh: no stage '$stage'; there are: ${all_stages//,/ }" >&2; exit 2 ;;
  esac
done

build_root=${MK_BUILD_ROOT:-$root/build}
logs=$build_root/logs
mkdir -p "$logs"
passed=0
failed=0
skipped=0
failures=()
unsteady=()
left_out=()

# note <passed> <failed> <skipped>: adds to the totals.
note() {
  passed=$((passed + $1))
  failed=$((failed + $2))
  skipped=$((skipped + $3))
}

# skip_stage <stage> <reason>: a stage that cannot run here, said again at the end.
skip_stage() {
  note 0 0 1
  left_out+=("$1: $2")
  echo "  skipped: $2"
}

# fail <what> <log>: one failed case, listed again at the end.
fail() {
  note 0 1 0
  failures+=("$1: $2")
  echo "  FAILED  $1 (log: $2)"
}

# check <name> <command>...: a command that counts as one case.
check() {
  local name=$1 log
  log=$logs/${name// /-}.log
  shift
  if "$@" >"$log" 2>&1; then
    note 1 0 0
    echo "  passed  $name"
  else
    tail -n 40 "$log"
    fail "$name" "$log"
  fi
}

# build <preset> [<cmake argument>...]: configures and builds, going on after errors so that one broken test does not
# hide the others. A failure counts as a failed case; success is not a test and counts as nothing. Returns 1 when the
# build failed (there may still be tests to run), 2 when there is nothing to run.
build() {
  local preset=$1 log=$logs/build-$1.log began=$SECONDS
  shift
  if ! cmake --preset "$preset" -B "$build_root/$preset" "$@" >"$log" 2>&1; then
    sed -n '/CMake Error/,$p' "$log" | head -n 40
    fail "configure $preset" "$log"
    return 2
  fi
  [ "$preset" != dev ] || sed -n '/^-- mkernel/,$p' "$log" | grep -E '^--   ' | sed 's/^--//'
  # Beside the RDMA machine, whose tests have deadlines, a build takes what is left.
  if ! ${rdma:+nice -n 5} cmake --build "$build_root/$preset" -j "$jobs" -- -k 0 >>"$log" 2>&1; then
    grep -E -A12 '^FAILED:|error:' "$log" | head -n 80
    fail "build $preset" "$log"
    return 1
  fi
  [ $((SECONDS - began)) -lt 10 ] || echo "  built $preset in $((SECONDS - began)) s"
}

# What runs beside the next stages, each in a process group of its own: stages sim and rdma.
beside=()
trap 'for group in "${beside[@]}"; do kill -- "-$group" 2>/dev/null; done' EXIT
# begin_beside <command>...: its process is $! then.
begin_beside() {
  set -m
  "$@" &
  set +m
  beside+=($!)
}

# The RDMA machine's process, while it runs (stage rdma).
rdma=

# run_tests <preset> <excluded labels> [<ctest argument>...]: runs ctest and counts single cases (tests/runner).
run_tests() {
  local preset=$1 exclude=$2 result=$logs/result name=$1${4:+-${4//[^a-z]/}} kind text
  shift 2
  rdma_end  # tests have deadlines
  [ -z "$label" ] || set -- "$@" -L "$label"
  rm -f "$result"
  "${runner[@]}" python3 tests/runner/run_ctest.py "$build_root/$preset" "$name" "$logs" "$result" "$jobs" -LE "$exclude" "$@"
  if [ ! -s "$result" ]; then
    fail "ctest $preset" "the lines above"
    return
  fi
  while read -r kind text; do
    case $kind in
      counts) # shellcheck disable=SC2086
        note $text ;;
      failure) failures+=("$text") ;;
      unsteady) unsteady+=("$text") ;;
    esac
  done <"$result"
}

# TSan of these years does not start under some kernels' address randomisation; switch it off where that is allowed.
runner=()
quiet_addresses() {
  if setarch "$(uname -m)" -R true 2>/dev/null; then runner=(setarch "$(uname -m)" -R); fi
}

no_gpu='^(gpu|perf|rdma)$'
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then no_gpu='^(perf|rdma)$'; fi

stage_deps() {
  bash deploy/install-deps.sh || fail "install dependencies" "the lines above"
}

stage_style() {
  check "style layout" bash tests/check_style.sh
  check "style format" bash tests/check_format.sh
}

# run_counted <name> <script>: a script that prints "FAILED  ..." for each failed case, ends with "N passed, N failed", and
# exits with 77 when it cannot run here.
run_counted() {
  local name=$1 log=$logs/$1.log status counts line
  MK_BUILD_ROOT=$build_root bash "$2" >"$log" 2>&1
  status=$?
  counts=$(sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p' "$log")
  if [ $status = 77 ]; then
    echo "  $(head -n 1 "$log"): skipped"
    note 0 0 1
  elif [ -z "$counts" ]; then
    tail -n 20 "$log"
    fail "$name" "$log"
  else
    note "${counts% *}" 0 0
    while IFS= read -r line; do fail "$name ${line#FAILED  }" "$log"; done < <(grep '^FAILED' "$log")
    echo "  ${counts% *} passed, ${counts#* } failed"
  fi
}

stage_model() {
  run_counted model tests/model/run.sh
}

stage_fuzz() {
  run_counted fuzz tests/fuzz/run.sh
}

stage_unit() {
  build dev || [ $? = 1 ] || return
  # What the stage `ops` runs as well, with its tools installed, need not run twice.
  local later=
  case ,$stages, in *,ops,*) later='|^ops$' ;; esac
  run_tests dev "$no_gpu|^cuda\$$later"
  local library
  library=$(find "$build_root/dev/client" -name 'libmkclient.so.*' -type f 2>/dev/null | head -n 1)
  if [ -n "$library" ]; then check "client library dependencies" bash tests/check_client_library.sh "$library"; fi
}

# Its virtual machine keeps one core busy: the next build runs beside it.
rdma_took=
stage_rdma() {
  build dev || [ $? = 1 ] || return
  if [ ! -x "$build_root/dev/tests/rdma/rdma_link_loss_test" ]; then
    skip_stage rdma "this build has no verbs fabric"
    return
  fi
  # Here, so that no other stage installs anything meanwhile. What is missing then, run_vm.sh says.
  bash deploy/install-deps.sh --rdma >"$logs/rdma-deps.log" 2>&1
  rm -rf "$logs/rdma" "$logs/rdma.end"
  begin_beside rdma_machine
  rdma=$!
  case ,$stages in *,rdma) rdma_end ;; *) echo "  runs beside the next build" ;; esac
}

rdma_machine() {
  local began=$SECONDS status=0
  # Below ten minutes where nothing else runs, 11 beside a build; the time-out is for a machine that hangs.
  MK_BUILD_ROOT=$build_root bash tests/rdma/run_vm.sh --timeout 2000 --out "$logs/rdma" -- \
    bash tests/rdma/job.sh "$build_root/dev" >"$logs/rdma.log" 2>&1 || status=$?
  echo "$status $((SECONDS - began))" >"$logs/rdma.end"
}

rdma_end() {
  [ -n "$rdma" ] || return 0
  local log=$logs/rdma.log status=none took=0 name ok bad skip
  wait "$rdma"
  rdma=
  read -r status took <"$logs/rdma.end"  # none: it was killed
  if [ "$status" = 77 ]; then
    skip_stage rdma "$(sed -n 's/^run_vm: skipped: //p' "$log")"
    return
  fi
  sed -n 's/^rdma: /  rdma /p' "$log"
  rdma_took="The virtual machine of rdma took $took s."
  echo "  $rdma_took"
  while read -r name ok bad skip; do
    note "$ok" 0 "$skip"
    for ((; bad > 0; bad--)); do fail "rdma $name" "$logs/rdma/$name.log"; done
  done < <(cat "$logs/rdma/results" 2>/dev/null)
  [ "$status" = 0 ] || fail "rdma virtual machine (status $status)" "$log"
}

# Fresh seeds; the fixed ones are a test of their own. A failing one is in the log with the command that replays it. It is
# one thread for two minutes: when other stages follow it runs beside them, and is heard at the end.
simulation=
stage_sim() {
  build dev || [ $? = 1 ] || return
  begin_beside simulate
  simulation=$!
  case ,$stages in *,sim) simulation_end ;; *) echo "  runs beside the next stages" ;; esac
}

simulate() {
  nice -n 19 "$build_root/dev/tests/sim/mksim" --seconds "${MK_SIM_SECONDS:-120}" >"$logs/mksim.log" 2>&1
}

simulation_result() {
  local status=0
  wait "$simulation" || status=$?
  cat "$logs/mksim.log"
  return $status
}

simulation_end() {
  [ -n "$simulation" ] || return
  check "simulation" simulation_result
  simulation=
  tail -n 1 "$logs/simulation.log" | sed 's/^/  /'
}

stage_cuda() {
  if ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ]; then
    echo "  no nvcc: skipped"
    return
  fi
  if [ ! -d kernels/cuda ]; then
    echo "  no CUDA kernels yet: skipped"
    return
  fi
  build dev || [ $? = 1 ] || return
  check "cuda ptxas" bash tests/check_ptxas.sh "$build_root/dev"
  if ctest --test-dir "$build_root/dev" -N -L '^cuda$' -LE "$no_gpu" 2>/dev/null | grep -q 'Total Tests: [1-9]'; then
    run_tests dev "$no_gpu" -L '^cuda$'
  fi
}

stage_asan() {
  build asan || [ $? = 1 ] || return
  rm -rf "$build_root/asan/coverage"
  run_tests asan "$no_gpu|^(noasan|cuda)\$"
  [ -z "$label" ] || return
  # What the lines above ran, of the folders that the daemon and its clients are made of.
  check "line coverage" python3 tests/check_coverage.py "$build_root/asan" 85 shm daemon client
  grep -E ' (client|daemon|shm)$|^line coverage' "$logs/line-coverage.log" | sed 's/^/  /'
}

stage_tsan() {
  build tsan || [ $? = 1 ] || return
  quiet_addresses
  run_tests tsan "$no_gpu|^(notsan|cuda)\$"
  runner=()
}

stage_tidy() {
  [ -f "$build_root/dev/compile_commands.json" ] || build dev
  local filter="^$root/(shm|kernels|client|daemon)/"
  [ "${MK_TIDY:-}" != all ] || filter=.
  local left=$((budget_s - SECONDS))
  check "clang-tidy" bash tests/check_tidy.sh "$build_root/dev" "$jobs" "${MK_TIDY_BUDGET_S:-$((left > 120 ? left : 120))}" "$filter"
  sed -n 's/^[0-9]* of [0-9]* translation units are clean.*/  &/p' "$logs/clang-tidy.log"
  local later
  later=$(sed -n 's/ not reached$//p' "$logs/clang-tidy.log")
  [ -z "$later" ] || skip_stage tidy "$later translation units, of the least recently changed; all: MK_BUDGET_S=7200 bash tests/run.sh --stage tidy"
}

# Without this stage, the unit stage runs them, but for those that lack a tool which only this stage installs.
stage_ops() {
  bash deploy/install-deps.sh --ops || { fail "install what the ops tests need" "the lines above"; return; }
  build dev || [ $? = 1 ] || return
  run_tests dev "$no_gpu" -L '^ops$'
}

stage_package() {
  bash deploy/install-deps.sh --ops || { fail "install what the package tests need" "the lines above"; return; }
  local dir=$build_root/package log=$logs/package.log result=0
  if ! { cmake --preset package -B "$dir" && cmake --build "$dir" -j "$jobs" --target package; } >"$log" 2>&1; then
    grep -E -A12 '^FAILED:|error:|CMake Error|CPack Error' "$log" | head -n 60
    fail "build packages" "$log"
    return
  fi
  log=$logs/packages.log
  bash tests/deploy/check_packages.sh "$dir" >"$log" 2>&1 || result=$?
  cat "$log"
  case $result in
    0) note 1 0 0 ;;
    77) note 0 0 1 ;;
    *) fail packages "$log" ;;
  esac
  log=$logs/image.log result=0
  bash tests/deploy/check_image.sh "$dir" >"$log" 2>&1 || result=$?
  cat "$log"
  case $result in
    0) note 1 0 0 ;;
    77) note 0 0 1 ;;
    *) fail image "$log" ;;
  esac
}

# too_late <stage>: whether a run of all stages has no time left for it. asan's own time says nothing: the RDMA machine ran beside.
unit_took=0
too_late() {
  local takes
  case $stages/$1 in
    "$default_stages"/tsan) takes=$((unit_took * 2 / 5)) ;;
    "$default_stages"/tidy) takes=120 ;;
    *) return 1 ;;
  esac
  [ $((SECONDS + takes)) -gt "$budget_s" ]
}

started=$SECONDS
for stage in ${stages//,/ }; do
  echo "== $stage"
  stage_started=$SECONDS
  if too_late "$stage"; then
    skip_stage "$stage" "it would end later than $budget_s s after the start; by itself: bash tests/run.sh --stage $stage"
    continue
  fi
  "stage_$stage"
  [ "$stage" != unit ] || unit_took=$((SECONDS - stage_started))
  echo "== $stage: $((SECONDS - stage_started)) s"
done
rdma_end
simulation_end

echo
if [ ${#failures[@]} -gt 0 ]; then
  echo "Failures:"
  printf '  %s\n' "${failures[@]}"
fi
if [ ${#unsteady[@]} -gt 0 ]; then
  echo "Failed beside other tests, passed when run again, alone:"
  printf '  %s\n' "${unsteady[@]}"
fi
if [ ${#left_out[@]} -gt 0 ]; then
  echo "Stages that could not run here:"
  printf '  %s\n' "${left_out[@]}"
fi
[ -z "$rdma_took" ] || echo "$rdma_took"
echo "Took $((SECONDS - started)) s; skipped $skipped."
if [ $((passed + failed)) = 0 ]; then
  echo "Nothing was checked by: $stages"
fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
