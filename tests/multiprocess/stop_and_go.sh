#!/usr/bin/env bash
# stop_and_go.sh <mkbench> <operator> [launches of each form] [longest stop in ms] [seed]
#
# Ranks that fall behind at any point of a launch: real rank processes are stopped and continued at random, in the middle of
# whatever they do, while launches of changing sizes follow each other without a barrier and every element is checked. A stale
# flag or a bank used again too early gives a wrong element; a wait without an end gives a time-out.
set -eu
mkbench=$1
operator=$2
launches=${3:-100}
longest_ms=${4:-1000}
seed=${5:-$((RANDOM * 32768 + RANDOM))}
echo "seed $seed"
RANDOM=$((seed % 32768))
"$mkbench" "$operator" --nodes 2 --local 2 --sizes vary --no-barrier --skew-ms 20 --verify all --seed "$seed" \
  --warmup 0 --iters "$launches" --timeout-ms 60000 &
bench=$!
ranks=()
trap 'for rank in "${ranks[@]:-}"; do [ -z "$rank" ] || kill -CONT "$rank" 2>/dev/null || true; done; kill "$bench" 2>/dev/null || true' EXIT
stops=0
while kill -0 "$bench" 2>/dev/null; do
  mapfile -t ranks < <(pgrep -P "$bench" -f ' rank ' || true)
  if [ ${#ranks[@]} -gt 0 ]; then
    rank=${ranks[RANDOM % ${#ranks[@]}]}
    kill -STOP "$rank" 2>/dev/null || true
    sleep "$(printf '0.%03d' $((RANDOM % longest_ms)))"
    kill -CONT "$rank" 2>/dev/null || true
    stops=$((stops + 1))
  fi
  sleep "$(printf '0.%03d' $((RANDOM % 50)))"
done
status=0
wait "$bench" || status=$?
echo "$stops stops"
exit $status
