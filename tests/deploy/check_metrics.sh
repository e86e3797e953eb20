#!/usr/bin/env bash
# check_metrics.sh <mkerneld> <mkbench> <mkctl>: two daemons serve metrics while a job runs over them. promtool finds no fault with
# the live text, counters move and never fall, also when the job has gone, and no label but the bounded ones appears. The Admin
# service has the same families and series.
set -euo pipefail
mkerneld=$1 mkbench=$2 mkctl=$3
command -v promtool >/dev/null || { echo "promtool is missing (Debian: prometheus)"; exit 77; }

work=$(mktemp -d)
daemons=() job=
finish() {
  [ -z "$job" ] || kill "$job" 2>/dev/null || true
  for daemon in "${daemons[@]}"; do kill "$daemon" 2>/dev/null || true; done
  wait || true
  rm -rf "$work"
}
trap finish EXIT
for node in 0 1; do
  other=$((1 - node))
  cat >"$work/$node.toml" <<END
node_id = $node
listen = "unix:$work/$node.peer"
[socket]
path = "$work/$node.sock"
[[peer]]
id = $other
address = "unix:$work/$other.peer"
[fabric]
name = "${MK_FABRIC:-loopback}"
[metrics]
listen = "127.0.0.1:0"
END
  "$mkerneld" --config "$work/$node.toml" --ready-file "$work/$node.ready" 2>"$work/$node.log" &
  daemons+=($!)
done
for node in 0 1; do
  for _ in $(seq 300); do [ -e "$work/$node.ready" ] && break; sleep 0.1; done
  [ -e "$work/$node.ready" ] || { cat "$work/$node.log"; exit 1; }
done

scrape() {  # <file>
  python3 - "$work/0.ready" >"$1" <<'END'
import json, sys, urllib.request
address = json.load(open(sys.argv[1]))["metrics"]
with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
    sys.stdout.write(answer.read().decode())
END
  promtool check metrics <"$1"
}
value() { awk -v name="$2" 'index($1, name "{") == 1 { sum += $2 } END { print sum + 0 }' "$1"; }
rises() {  # <metric> <from file> <to file>
  awk -v a="$(value "$2" "$1")" -v b="$(value "$3" "$1")" 'BEGIN { exit !(b > a) }' || {
    echo "$1 did not rise"; exit 1; }
}

"$mkbench" gemm-ar --join "$work/0.sock" "$work/1.sock" --local 1 --m 256 --n 256 --k 256 --iters 100000 \
  --verify none >"$work/job.log" 2>&1 &
job=$!
for _ in $(seq 300); do
  scrape "$work/first"
  [ "$(value "$work/first" mkernel_commands_total)" = 0 ] || break
  kill -0 "$job" 2>/dev/null || { cat "$work/job.log"; exit 1; }
  sleep 0.2
done
sleep 1
scrape "$work/second"
for metric in mkernel_commands_total mkernel_command_bytes_total mkernel_link_bytes_total mkernel_proxy_busy_passes_total \
    mkernel_commit_to_post_seconds_count mkernel_post_to_completion_seconds_count mkernel_queue_commands_total; do
  rises "$metric" "$work/first" "$work/second"
done
[ "$(value "$work/second" mkernel_link_up)" = 1 ]
[ "$(value "$work/second" mkernel_sessions)" = 1 ]
# By uid are only the operators of jobs, whose number is bounded; by process is nothing.
if grep -E "pid=|uid=" "$work/second" | grep -v "^mkernel_operator_[a-z_]*{job_name="; then exit 1; fi
rises mkernel_link_batch_writes_count "$work/first" "$work/second"
# Where the daemon publishes flags itself, it says how long that took.
if [ "${MK_FABRIC:-loopback}" = ofi ]; then rises mkernel_arrival_to_flag_seconds_count "$work/first" "$work/second"; fi

# The same over gRPC: each series that Prometheus is shown, by name and labels.
"$mkctl" --address "unix:$work/0.peer" metrics >"$work/grpc"
promtool check metrics <"$work/grpc"
series() { sed -n 's/^\(mkernel[^ ]*\) .*/\1/p' "$1" | sed 's/le="[^"]*"/le/' | sort; }
diff <(series "$work/second") <(series "$work/grpc")

kill "$job"; wait "$job" || true; job=
for _ in $(seq 300); do
  scrape "$work/third"
  [ "$(value "$work/third" mkernel_sessions)" = 0 ] && break
  sleep 0.1
done
[ "$(value "$work/third" mkernel_jobs)" = 0 ]
if grep "^mkernel_queue" "$work/third"; then exit 1; fi
for metric in mkernel_commands_total mkernel_link_bytes_total mkernel_post_to_completion_seconds_count; do
  awk -v a="$(value "$work/second" "$metric")" -v b="$(value "$work/third" "$metric")" 'BEGIN { exit !(b >= a) }' || {
    echo "$metric fell when the job had gone"; exit 1; }
done
echo "$(grep -c '^mkernel' "$work/second") series under load"
