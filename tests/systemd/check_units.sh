#!/usr/bin/env bash
# check_units.sh <mkerneld.service> <mkerneld.socket> <sysusers> <mkerneld>: systemd finds no fault with the units, the
# service's exposure is at most 2.5, the module of a device group that it allows is loaded first, and the user is one that
# systemd-sysusers can make.
set -euo pipefail
service=$1 socket=$2 sysusers=$3 program=$4
exposure_max=2.5
command -v systemd-analyze >/dev/null || { echo "systemd-analyze is missing (Debian: systemd)"; exit 77; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The program is where it was built, not where it will be installed.
sed "s#^ExecStart=[^ ]*#ExecStart=$program#" "$service" >"$work/mkerneld.service"
cp "$socket" "$work/"
complaints=$(systemd-analyze verify --man=no "$work/mkerneld.service" "$work/mkerneld.socket" 2>&1) || {
  echo "$complaints"
  exit 1
}
[ -z "$complaints" ] || { echo "$complaints"; exit 1; }

# systemd finds the number of a char-* group in /proc/devices when the unit starts; a group that comes later stays forbidden.
grep -q '^DeviceAllow=char-infiniband_verbs rw$' "$service"
for line in Wants After; do
  grep -qE "^$line=(.* )?modprobe@ib_uverbs\.service( |\$)" "$service" || { echo "$line= lacks modprobe@ib_uverbs.service"; exit 1; }
done

report=$(systemd-analyze security --offline=yes --no-pager "$work/mkerneld.service")
exposure=$(sed -n 's/.*Overall exposure level for mkerneld.service: \([0-9.]*\).*/\1/p' <<<"$report")
echo "exposure $exposure"
awk -v is="$exposure" -v max="$exposure_max" 'BEGIN { exit !(is != "" && is <= max) }' || {
  grep -v '^.\?✓' <<<"$report"
  echo "the exposure is above $exposure_max"
  exit 1
}

systemd-sysusers --dry-run "$sysusers" 2>&1 | tee "$work/sysusers"
if grep -iE 'fail|ignor' "$work/sysusers"; then exit 1; fi
