#!/usr/bin/env bash
# check_tidy.sh <build folder> [jobs] [path filter]: clang-tidy 14 on our own translation units, each once, those whose sources were
# committed last first: the product's, or all with MK_TIDY=all. It takes MK_TIDY_BUDGET_S (default: until MK_DEADLINE, a time in
# seconds of the epoch, but at least 120 s; else 900 s). What that does not reach is listed and counted, and is no failure: it is
# older than what was looked at.
set -u
cd "$(dirname "$0")/.."
build=$(cd "$1" && pwd)
jobs=${2:-2}
filter="^$PWD/(shm|kernels|client|daemon)/"
[ "${MK_TIDY:-}" != all ] || filter=.
filter=${3:-$filter}
left_s=900
if [ -n "${MK_DEADLINE:-}" ]; then left_s=$((MK_DEADLINE - $(date +%s))); fi
budget_s=${MK_TIDY_BUDGET_S:-$((left_s > 120 ? left_s : 120))}
tool=$(command -v clang-tidy-14 || command -v clang-tidy) || { echo "no clang-tidy" >&2; exit 1; }
work=$build/tidy
rm -rf "$work"
mkdir -p "$work/logs"

# A build that compiles several sources as one has no commands for each: those of the preset tidy, with what this build generates.
commands=$build
if grep -qs '^CMAKE_UNITY_BUILD:.*=ON' "$build/CMakeCache.txt"; then
  commands=$PWD/build/tidy
  cmake --preset tidy $(sed -n 's/^MK_CUTLASS_INCLUDE:PATH=/-DMK_CUTLASS_INCLUDE=/p' "$build/CMakeCache.txt") >"$work/configure.log" 2>&1 || { cat "$work/configure.log" >&2; exit 1; }
fi

# GCC's precompiled headers and GCC-only warnings mean nothing to clang.
sed -E -e 's# -include [^ ]*cmake_pch\.hxx##g; s# -(Winvalid-pch|fpch-preprocess|Wduplicated-cond|Wlogical-op|Wno-error=tsan|Wno-maybe-uninitialized|Werror)##g' \
  -e "s#$PWD/build/tidy/generated#$build/generated#g" "$commands/compile_commands.json" >"$work/compile_commands.json"
sed -n 's/^  "file": "\(.*\)",\{0,1\}$/\1/p' "$work/compile_commands.json" |
  grep -E "^$PWD/" | grep -vF "$PWD/build" | grep -E '\.(cc|c)$' | grep -E "$filter" | sort -u >"$work/all"
# Newest first: what is not committed, then by the last commit; without git, in the order of names.
{ git diff --name-only HEAD; git log --format= --name-only; } 2>/dev/null | awk -v root="$PWD/" '!seen[$0]++ { print root $0 }' |
  grep -xFf "$work/all" >"$work/units"
grep -vxFf "$work/units" "$work/all" >>"$work/units"
total=$(wc -l <"$work/units")
[ "$total" -gt 0 ] || { echo "no translation unit in $build/compile_commands.json matches '$filter'" >&2; exit 1; }

export tool work
one() {
  local log
  log=$work/logs/$(echo "$1" | tr / _).log
  if nice "$tool" -p "$work" --quiet --extra-arg=-Wno-unknown-warning-option "$1" >"$log" 2>&1; then
    echo "$1" >>"$work/passed"
  else
    echo "$1" >>"$work/failed"
  fi
}
export -f one
touch "$work/passed" "$work/failed"
timeout --foreground "$budget_s" xargs -a "$work/units" -d '\n' -P "$jobs" -I{} bash -c 'one "$1"' _ {}

# A finding in a header comes with every unit that includes it: print it once.
while read -r unit; do cat "$work/logs/$(echo "$unit" | tr / _).log"; done <"$work/failed" |
  awk '/^[0-9]+ (warnings?|errors?)|^Suppressed|^Use -header-filter|^Found compiler error/ { next }
       /^[^ ].*:[0-9]+:[0-9]+: (error|warning):/ { show = !seen[$0]++ }
       show'
ok=$(wc -l <"$work/passed")
bad=$(wc -l <"$work/failed")
echo "$ok of $total translation units are clean, $bad are not"
if [ $((ok + bad)) -lt "$total" ]; then
  echo "out of time after $budget_s s, of the least recently changed:"
  cat "$work/passed" "$work/failed" | grep -vxFf - "$work/units"
  echo "left out: $((total - ok - bad)) translation units, of the least recently changed; all: MK_BUDGET_S=7200 bash tests/run.sh --stage tidy"
fi
[ "$bad" = 0 ] && [ "$ok" -gt 0 ]
