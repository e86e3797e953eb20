#!/usr/bin/env bash
# Builds the fuzz targets with clang's libFuzzer, address and undefined-behaviour sanitizers, and lets each look for new
# failures, starting from its committed corpus.
#
#   bash tests/fuzz/run.sh [TARGET...]      protocol, ring, config, peer
#
# MK_FUZZ_SECONDS   how long each target runs (default 20; nightly: 600)
# MK_FUZZ_GROW=1    adds what reached new code to the committed corpus, as few files as possible
# MK_BUILD_ROOT     where programs, found inputs and logs go (default build/): its folder fuzz/
#
# A failure prints the input's path; run the program with that path to see it again, and add the input to the corpus with the
# fix. Exits with 1 when anything failed, 77 without clang.
set -u
cd "$(dirname "$0")/../.."
root=$PWD
seconds=${MK_FUZZ_SECONDS:-20}
work=${MK_BUILD_ROOT:-$root/build}/fuzz
compiler=
for name in clang++-14 clang++; do
  command -v $name >/dev/null && { compiler=$name; break; }
done
[ -n "$compiler" ] || { echo "no clang++: nothing is fuzzed (bash deploy/install-deps.sh --test)"; exit 77; }
mkdir -p "$work"
ccache=()
if command -v ccache >/dev/null; then ccache=(ccache); fi
targets=("$@")
[ $# -gt 0 ] || targets=(protocol ring config peer)

flags=(-std=c++20 -O1 -gline-tables-only -w -DFMT_SHARED -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all "-I$root" "-I$work")

# build <target>
build() {
  local sources libraries=(-lfmt)
  case $1 in
    protocol) sources=(shm/host/protocol.cc shm/host/unix_socket.cc shm/host/unix_listener.cc shm/host/result.cc) ;;
    ring) sources=(daemon/proxy/command_validation.cc shm/host/result.cc) ;;
    config) sources=(daemon/config/*.cc shm/host/result.cc) ;;
    peer)
      protoc --cpp_out="$work" proto/mkernel/v1/peer.proto || return
      sources=(daemon/service/peer_convert.cc shm/host/result.cc "$work/proto/mkernel/v1/peer.pb.cc")
      libraries+=(-lprotobuf) ;;
    *) echo "no such target: $1"; return 1 ;;
  esac
  local objects=() source object
  mkdir -p "$work/objects-$1"
  for source in "tests/fuzz/$1_fuzz.cc" "${sources[@]}"; do
    object=$work/objects-$1/${source//\//_}.o
    objects+=("$object")
    "${ccache[@]}" "$compiler" "${flags[@]}" -c "$source" -o "$object" || return
  done
  "$compiler" "${flags[@]}" "${objects[@]}" -o "$work/$1" "${libraries[@]}"
}

# fuzz <target>: one run from the committed corpus; what is found new stays in the work folder.
fuzz() {
  local corpus=$root/tests/fuzz/corpus/$1
  mkdir -p "$work/found-$1" "$corpus"
  "$work/$1" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=4096 -print_final_stats=1 \
    -artifact_prefix="$work/failed-$1-" "$work/found-$1" "$corpus" >"$work/$1.log" 2>&1 || return
  [ "${MK_FUZZ_GROW:-0}" = 1 ] || return 0
  rm -rf "$work/merged-$1" && mkdir "$work/merged-$1" && "$work/$1" -set_cover_merge=1 -use_counters=0 -max_len=512 "$work/merged-$1" "$corpus" "$work/found-$1" >>"$work/$1.log" 2>&1 &&
    rm -f "$corpus"/* && cp "$work/merged-$1"/* "$corpus" && rm -r "$work/merged-$1"
}

# judge <target>: builds and fuzzes it; one line says what came of it.
judge() {
  local target=$1
  if ! build "$target" >"$work/$target.build.log" 2>&1; then
    grep -E 'error|no such' "$work/$target.build.log" | head -n 5
    echo "FAILED  $target: does not build ($work/$target.build.log)"
  elif fuzz "$target"; then
    echo "passed  $target ($(sed -n 's/^stat::number_of_executed_units: *//p' "$work/$target.log") inputs, $seconds s)"
  else
    echo "FAILED  $target: $(grep -m1 -E 'ERROR|SUMMARY' "$work/$target.log"); $(grep -m1 'Test unit written' "$work/$target.log") ($work/$target.log)"
  fi
}

for target in "${targets[@]}"; do judge "$target"; done | tee "$work/verdicts-${targets[*]}"
# Figures: what was tried, and how often it did harm.
{
  echo "{ \"seconds\": $seconds,"
  sed -n 's/^passed  \([a-z]*\) (\([0-9]*\) inputs.*/  "\1_inputs": \2,/p' "$work/verdicts-${targets[*]}"
  echo "  \"failures\": $(grep -c '^FAILED' "$work/verdicts-${targets[*]}") }"
} >"$work/figures-${targets[*]}.json"
! grep -q '^FAILED' "$work/verdicts-${targets[*]}"
