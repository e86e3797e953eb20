#!/usr/bin/env bash
# A daemon whose configuration names no device starts while no port is up: it waits, says for what, and is ready when the port is up.
# Runs in the virtual machine of run_vm.sh; job.sh has written the configurations.
#
#   late_port.sh BUILD_FOLDER FOLDER_WITH_node0.toml
set -u
build=$1 folder=$2
interface=$MK_RDMA_VM_INTERFACE
sed "s/ARRIVAL/flag/" "$folder/node0.toml" >"$folder/late.toml"

ip link set "$interface" down
"$build/daemon/mkerneld" --config "$folder/late.toml" --ready-file "$folder/late-up" >"$folder/late.log" 2>&1 &
daemon=$!
die() {
  echo "late port: $1"
  cat "$folder/late.log"
  ip link set "$interface" up
  kill -9 $daemon 2>/dev/null
  exit 1
}
# await <what> <command>...
await() {
  local until=$((SECONDS + 90)) what=$1
  shift
  until "$@"; do
    kill -0 $daemon 2>/dev/null || die "$what: the daemon has ended"
    [ $SECONDS -lt $until ] || die "$what"
    sleep 0.2
  done
}
await "does not say that it waits" grep -q "waiting: .*no active RDMA port for rail 0" "$folder/late.log"
[ ! -e "$folder/late-up" ] || die "is ready without a port"
ip link set "$interface" up
await "is not ready with the port up" test -s "$folder/late-up"
kill $daemon
wait $daemon || die "did not stop in order"
echo "waited for the port"
