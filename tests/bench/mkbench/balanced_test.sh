#!/usr/bin/env bash
# mkbench --link-bandwidth balanced MKBENCH: links as slow as what is computed; not paced where nothing is.
set -eu
mkbench=$1
fail() {
  echo "$1"
  exit 1
}
for op in "all-gather --m 256 --n 256" "reduce-scatter --m 256 --n 256" "gemm-ar --m 128 --n 128 --k 512"; do
  text=$("$mkbench" $op --nodes 2 --local 1 --warmup 1 --iters 2 --link-bandwidth balanced 2>&1) || fail "$op failed: $text"
  grep -q " correct: " <<<"$text" || fail "$op: $text"
done
grep -qE "paced to [0-9]+MB/s" <<<"$text" || fail "a product's links are not paced: $text"
text=$("$mkbench" gemm-ar --m 128 --n 128 --k 128 --nodes 1 --local 2 --link-bandwidth balanced 2>&1) && fail "one node has no link: $text"
grep -q "at least two nodes" <<<"$text" || fail "one node: $text"
