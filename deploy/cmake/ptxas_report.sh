#!/usr/bin/env bash
# Launcher for nvcc: runs the command it is given and keeps ptxas' report as <object>.ptxas beside the object, so that
# the build's output stays readable and a check can look for spills afterwards. Of a source that is not compiled to the end the report
# says so.
set -u
object=
previous=
for argument in "$@"; do
  [ "$previous" = -o ] && object=$argument
  previous=$argument
done
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$@" 2>"$log"
status=$?
if [[ " $* " == *" -fdevice-syntax-only "* ]]; then
  echo "front end only" >"$object.ptxas"
elif [ -n "$object" ]; then
  grep -E '^ptxas info|bytes stack frame' "$log" >"$object.ptxas"
fi
grep -vE '^ptxas info|bytes stack frame' "$log" >&2
exit $status
