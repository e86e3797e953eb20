#!/usr/bin/env bash
# Installs, builds and runs every test. Ends with "N passed, N failed", alone on the last line; exits 1 when anything
# failed.
#
#   bash tests/run.sh [--stage deps,style,model,fuzz,unit,sim,cuda,ops,rdma,asan,tsan,tidy,package] [--jobs N] [--label REGEX]
#
# deps   install the Debian packages            unit   build the dev preset, run its tests
# style  formatting, layout, folder READMEs     asan   the same under address and undefined-behaviour sanitizers; line coverage
# tidy   clang-tidy on the product's sources    tsan   the same under the thread sanitizer
# cuda   what can be checked of the CUDA kernels without a GPU (when nvcc is there)
# model  the protocol models and their mutants  fuzz   libFuzzer over what comes from outside (MK_FUZZ_SECONDS each, default 20;
#        nightly: 600)
# rdma   verbs over a software RDMA NIC in a virtual machine without KVM (tests/rdma): 4 to 11 minutes, beside builds
# sim    whole clusters under simulation, fresh seeds for MK_SIM_SECONDS (default 120); the fixed seeds are in unit
# ops    units, metrics, alerts and dashboards, discovery, restarts, Slurm, launchers, Kubernetes, README's commands
# python   the Python package with PyTorch; only when named (5 minutes, and once 10 for 7 GB of packages from PyPI)
# versions this build beside the previous release's daemons, clients and tools; only when named (once 15 minutes to build that)
# package  builds the Debian packages and lives with them in a Debian of their own; only when named (10 minutes)
#
# The stages' steps are CTest's (tests/stages says what needs what): it runs side by side what may be. --label runs only the tests with a
# matching label.
# A run of all stages ends within MK_BUDGET_S (default 3450 s). It skips asan, tsan and tidy where they would exceed the time budget,
# and the summary lists them. clang-tidy begins with what changed last, and ends with the budget or after MK_TIDY_BUDGET_S. MK_TIDY=all
# gives it the tests' sources too (twice the time).
set -u
cd "$(dirname "$0")/.."
default_stages=deps,style,model,fuzz,unit,sim,cuda,ops,rdma,asan,tsan,tidy
stages=$default_stages
jobs=$(nproc)
logs=$PWD/build/logs
while [ $# -gt 0 ]; do
  case $1 in
    --stage | --stages | --jobs | --label)
      [ $# -ge 2 ] || { echo "run.sh: $1 needs a value" >&2; exit 2; }
      case $1 in --jobs) jobs=$2 ;; --label) export MK_LABEL=$2 ;; *) stages=$2 ;; esac
      shift 2 ;;
    -h | --help) sed -n '2,26s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "run.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
  esac
done
for stage in ${stages//,/ }; do
  case ,$default_stages,python,versions,package, in
    *,"$stage",*) ;;
    *) echo "run.sh: no stage '$stage'; there are: ${default_stages//,/ } python versions package" >&2; exit 2 ;;
  esac
done
[ "$stages" != $default_stages ] || export MK_ALL_STAGES=1
export MK_LOGS=$logs MK_DEADLINE=$(($(date +%s) + ${MK_BUDGET_S:-3450}))

mkdir -p "$logs"
rm -f "$logs"/took "$logs"/*.late "$logs"/steps.xml
failed=()
if [[ ,$stages, == *,deps,* ]]; then
  bash deploy/install-deps.sh || failed+=("install dependencies: the lines above")
fi
if [ "$stages" != deps ]; then
  # New: what a run before has left would change the order.
  rm -rf build/stages
  log=$logs/stages.log
  if cmake -S tests/stages -B build/stages -DMK_JOBS="$jobs" >"$log" 2>&1; then
    # Every process of a step has ended before this script ends: killed if a second of SIGTERM was not enough.
    end_group() {
      kill -- -"$1" 2>/dev/null
      for _ in {1..20}; do kill -0 -- -"$1" 2>/dev/null || return; sleep 0.05; done
      kill -KILL -- -"$1" 2>/dev/null
    }
    set -m
    ctest --test-dir build/stages -L "^(${stages//,/|})\$" ${MK_LABEL:+-E '^coverage-asan$'} -j $((jobs + 1)) --output-on-failure --no-label-summary \
      --output-junit "$logs/steps.xml" </dev/null &
    trap "end_group $!" EXIT
    wait $!
    trap - EXIT
  else
    cat "$log"
    failed+=("configure tests/stages: $log")
  fi
fi
python3 tests/runner/report.py "$logs" $SECONDS "$stages" "${failed[@]}"
