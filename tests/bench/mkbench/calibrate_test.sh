#!/usr/bin/env bash
# mkbench calibrate MKBENCH: a file of numbers that were measured here, by which the planner then plans.
set -eu
mkbench=$1
fail() {
  echo "$1"
  exit 1
}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$mkbench" calibrate --out "$folder/cpu.json" --network-gb-s 3 >"$folder/said" || fail "it ends with $?"
grep -q "MKERNEL_MACHINE=$folder/cpu.json" "$folder/said" || fail "it does not say how to use the file: $(cat "$folder/said")"
number() { grep -oP "\"$1\": \K[0-9.e+-]+" "$folder/cpu.json"; }
[ "$(number sms)" = "$(nproc)" ] || fail "$(nproc) cores are here, not $(number sms)"
[ "$(number network_gb_s)" = 3.0 ] || fail "the network's rate is $(number network_gb_s)"
for key in cpu_gflops cpu_f32_gflops cpu_memory_gb_s; do
  awk -v value="$(number $key)" 'BEGIN { exit !(value > 0.05 && value < 1e6) }' || fail "$key is $(number $key)"
done
"$mkbench" explain gemm-ar 4096x4096x1024 --machine "$folder/cpu.json" | grep -q predicted || fail "the planner does not take the file"
code=0
error=$("$mkbench" calibrate --out "$folder/no/where.json" 2>&1) || code=$?
[ "$code" -eq 1 ] && grep -q where.json <<<"$error" || fail "a file that cannot be written ends with $code: $error"
