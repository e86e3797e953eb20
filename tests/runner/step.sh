#!/usr/bin/env bash
# step.sh NAME COMMAND...: runs one step of tests/stages, with its output in build/logs/NAME.log and its time in build/logs/took.
#
# Of a failed step it shows what matters of the log. Of one that ends with 77 it says why: the log's last "skipped: REASON", or its
# first line. Lines "left out: REASON" pass on to the summary (report.py).
# MK_TAKES is about how long the step takes, in seconds: bash arithmetic over the steps before (build_dev, unit). In a run of all stages
# (MK_ALL_STAGES=1) a step that would end after MK_DEADLINE, in seconds of the epoch, is skipped, and with it what it prepares.
set -u
name=$1 logs=${MK_LOGS:-build/logs}
log=$logs/$name.log
mkdir -p "$logs"
shift
build_dev=0 unit=0 asan=0
[ ! -f "$logs/took" ] || . "$logs/took"
late=$logs/${name#*-}.late  # build-tsan and tsan share one, build-asan, asan and coverage-asan, too
[ ! -e "$late" ] || exit 77
if [ "${MK_ALL_STAGES:-0}" = 1 ] && [ -n "${MK_TAKES:-}" ] && [ $(($(date +%s) + MK_TAKES)) -gt "$MK_DEADLINE" ]; then
  touch "$late"
  echo "left out: it would end too late; by itself: bash tests/run.sh --stage ${name#*-}"
  exit 77
fi
rm -rf "${logs:?}/$name"
status=0
"$@" >"$log" 2>&1 || status=$?
echo "${name//[^a-z]/_}=$SECONDS" >>"$logs/took"
case $status in
  0) grep '^left out: ' "$log" ;;
  77)
    reason=$(sed -n 's/.*skipped: //p' "$log" | tail -n 1)
    echo "left out: ${reason:-$(head -n 1 "$log")}" ;;
  *)
    case $name in
      configure-* | build-*) grep -E -A12 '^FAILED:|error:|CMake Error|CPack Error' "$log" | head -n 80 ;;
      *) tail -n 150 "$log" ;;
    esac
    echo "FAILED  $name (log: $log)" ;;
esac
exit $status
