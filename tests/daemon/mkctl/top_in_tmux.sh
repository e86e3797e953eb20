#!/usr/bin/env bash
# top_in_tmux.sh <mkerneld> <mkctl> <mkbench>: `mkctl top` as a person sees it, in tmux: tables that move, keys, a window that
# changes its size, an end that leaves the terminal as it was.
set -euo pipefail
mkerneld=$1 mkctl=$2 mkbench=$3
command -v tmux >/dev/null || { echo "tmux is missing (Debian: tmux)"; exit 77; }

work=$(mktemp -d)
export TMUX_TMPDIR=$work LC_ALL=C.UTF-8
unset TMUX
started=()
finish() {
  tmux -L top kill-server 2>/dev/null || true
  for process in "${started[@]}"; do kill "$process" 2>/dev/null || true; done
  wait || true
  rm -rf "$work"
}
trap finish EXIT

for node in 0 1; do
  other=$((1 - node))
  "$mkerneld" --node-id $node --listen "unix:$work/$node.peer" --socket "$work/$node.sock" \
    --peer "$other=unix:$work/$other.peer" --ready-file "$work/$node.ready" 2>"$work/$node.log" &
  started+=($!)
done
for node in 0 1; do
  for _ in $(seq 300); do [ -e "$work/$node.ready" ] && break; sleep 0.1; done
  [ -e "$work/$node.ready" ] || { cat "$work/$node.log"; exit 1; }
done
"$mkbench" gemm-ar --join "$work/0.sock" "$work/1.sock" --local 1 --m 256 --n 256 --k 256 --iters 100000 \
  --verify none >"$work/job.log" 2>&1 &
started+=($!)

screen() { tmux -L top capture-pane -p -t top; }
keys() { tmux -L top send-keys -t top "$@"; }
# sees <pattern>: within half a minute.
sees() {
  for _ in $(seq 300); do
    if screen | grep -Eq -- "$1"; then return; fi
    sleep 0.1
  done
  echo "no \"$1\" on the screen:"
  screen
  exit 1
}
sees_no() {
  for _ in $(seq 300); do
    if ! screen | grep -Eq -- "$1"; then return; fi
    sleep 0.1
  done
  echo "\"$1\" is still on the screen:"
  screen
  exit 1
}

tmux -L top -f /dev/null new-session -d -s top -x 150 -y 20 "bash --norc -i"
keys "PS1='prompt> '" Enter "echo before" Enter
sees '^before'
keys "'$mkctl' --hosts unix:$work/0.peer,unix:$work/1.peer top --interval 200ms" Enter

# All three tables, of both nodes, with rates and sparklines: any rate, a machine may have much else to do.
some='[0-9.]*[1-9][0-9.]*' bytes='[KMG]?B' spark='.*[▁▂▃▄▅▆▇█]'
sees '2 of 2 daemons, 2 ranks of 1 jobs, 2 of 2 links up'
sees "^ 0 unix:.* up .* $some $bytes $spark"
sees '^ 1 unix:.* up '
keys 2
sees '\[2\] queues'
sees "^ 0 unix:.* $some k? +$some $bytes $spark"
keys Tab
sees '\[3\] jobs'
sees '^ 1 unix:.* up .* 1/1 '

# Sorting: the mark moves, and the order turns.
keys 1 s
sees 'vWRITES/s'
keys S r
sees '\^BYTES/s'
keys r

# Filtering.
keys / z z
sees 'no links with "zz"'
keys Escape
sees '^ 0 unix:'
keys / 1 . p e e r Enter
sees '/1\.peer'
sees_no '^ 0 unix:'
sees '^ 1 unix:'
keys Escape
sees '^ 0 unix:'

# Pausing, help.
keys p
sees PAUSED
keys p
sees_no PAUSED
keys '?'
sees 'turn the order round'
keys '?'
sees_no 'turn the order round'

# Another size, narrower and wider: never a line too many, and what fits is there.
for size in "60 8" "40 5" "200 40" "150 20"; do
  tmux -L top resize-window -t top -x "${size% *}" -y "${size#* }"
  sees '^mkctl top  2 of 2 daemons'
  sleep 0.5
  rows=$(screen | grep -c . || true)
  [ "$rows" -le "${size#* }" ] || { echo "$rows rows at $size"; exit 1; }
  [ "$(screen | grep -c '^mkctl top')" = 1 ] || { echo "drawn twice at $size:"; screen; exit 1; }
done
sees '^ 1 unix:.* up '

# A daemon that stops is said to; the other goes on.
kill "${started[1]}"
sees '1 of 2 daemons'
sees '^! unix:.*1\.peer: no answer'

# The end: the screen of before, its echo and its prompt.
keys q
sees '^before'
sees_no 'mkctl top  1 of'
keys 'echo after' Enter
sees '^after'

# A signal leaves the terminal in order, too.
keys "'$mkctl' --address unix:$work/0.peer top" Enter
sees '^mkctl top  1 of 1 daemons'
keys C-c
sees '^after'
keys 'echo "still $((40 + 2))"' Enter
sees '^still 42'
echo "top: all well"
