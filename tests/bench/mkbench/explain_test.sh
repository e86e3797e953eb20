#!/usr/bin/env bash
# mkbench explain MKBENCH: the choice, its terms and what else would cost, on one screen, of machines that are not here.
set -eu
mkbench=$1
fail() {
  echo "$1"
  exit 1
}
for op in ag-gemm gemm-rs gemm-ar; do
  for machine in H100 H200 CPU; do
    text=$("$mkbench" explain "$op" 4096x7168x2048 --nodes 2 --local 4 --machine "$machine")
    [ "$(wc -l <<<"$text")" -le 24 ] || fail "$op on $machine: more than a screen"
    for word in "$machine" compute network launch candidates; do
      grep -q "$word" <<<"$text" || fail "$op on $machine: no '$word' in
$text"
    done
  done
done
for op in "ring 16384x16x128 --key-heads 4 --causal" "moe 8192x2048x7168 --experts 64 --top-k 6" "combine 8192x7168x2048"; do
  for machine in H100 CPU; do
    # shellcheck disable=SC2086
    text=$("$mkbench" explain $op --nodes 2 --local 2 --machine "$machine")
    for word in "$machine" compute network candidates unfused; do
      grep -q "$word" <<<"$text" || fail "$op on $machine: no '$word' in
$text"
    done
  done
done
predicted() { "$mkbench" explain gemm-rs 4096x4096x4096 --nodes 2 --local 1 "$@" | grep -oP '[0-9]+(?=\.[0-9] us predicted)'; }
[ "$(predicted --network-gb-s 0.5)" -gt $((10 * $(predicted))) ] || fail "a slow network is not seen"
code=0
error=$("$mkbench" explain gemm-ar 1x8x8 --machine nowhere.json 2>&1) || code=$?
[ "$code" -eq 1 ] && grep -q nowhere.json <<<"$error" || fail "a missing machine file ends with $code: $error"
code=0
error=$("$mkbench" explain gemm-ar 64x64 2>&1) || code=$?
[ "$code" -eq 1 ] && grep -q "no shape" <<<"$error" || fail "a shape of two sides ends with $code: $error"
# Numbers no operator takes are refused, by a sentence.
for op in ag-gemm gemm-rs gemm-ar ring moe combine; do
  shape=64x64x64
  [ $op = ring ] && shape=4096x8x128
  for machine in H200 CPU; do
    for flags in "--nodes 0" "--local 0" "--nodes 65536 --local 65536" "--nodes 1024 --local 16" "--experts 0" "--top-k 0" "--nodes 4294967295"; do
      for command in explain plan; do
        case $command in
          # shellcheck disable=SC2086
          explain) arguments="explain $op $shape --machine $machine $flags" ;;
          plan) arguments="plan --op $op --shape $shape --gpu $machine ${flags/--local/--locals}" ;;
        esac
        code=0
        # shellcheck disable=SC2086
        error=$("$mkbench" $arguments 2>&1) || code=$?
        { [ "$code" -eq 1 ] || [ "$code" -eq 2 ]; } && [ -n "$error" ] || fail "$arguments ends with $code: $error"
      done
    done
  done
done
for arguments in "explain gemm-ar 64x64x64 --nodes 2 --network-gb-s 0" "explain gemm-ar 64x64x64 --nodes 2 --network-gb-s -5" \
  "explain gemm-ar 64x64x64 --nodes 2 --network-gb-s nan" "explain gemm-ar 64x64x64 --nodes 2 --network-gb-s 1e999" "calibrate --network-gb-s 0" \
  "explain ring 4096x8x128 --batch 0" "tune gemm-ar 64x64x64 --tuned /dev/null --time 0" "tune gemm-ar 64x64x64 --tuned /dev/null --within -1" \
  "tune gemm-ar 64x64x64 --tuned /dev/null --nodes 0" "gemm-ar --nodes 0" "gemm-ar --local 0" "gemm-ar --iters 0" "gemm-ar --m 0"; do
  code=0
  # shellcheck disable=SC2086
  error=$("$mkbench" $arguments 2>&1) || code=$?
  flag=${arguments% *}
  [ "$code" -eq 2 ] && grep -q -e "${flag##* }" <<<"$error" || fail "$arguments ends with $code: $error"
done
code=0
error=$("$mkbench" tune gemm-ar 64x64x64 --tuned /dev/null 2>&1) || code=$?
[ "$code" -eq 2 ] && grep -q "executor cuda" <<<"$error" || fail "a search without GPUs ends with $code: $error"
code=0
"$mkbench" explain attention 1x8x8 >/dev/null 2>&1 || code=$?
[ "$code" -eq 2 ] || fail "an operator that is not planned ends with $code"
