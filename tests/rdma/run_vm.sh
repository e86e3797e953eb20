#!/usr/bin/env bash
# Runs a command in a virtual machine that has a software RDMA NIC (Debian's kernel with rdma_rxe, device rxe0): this
# machine's files, read-only with a scratch layer on top, and nothing of its network.
#
#   bash tests/rdma/run_vm.sh [--cpus N] [--memory MIB] [--timeout S] [--out FOLDER] -- COMMAND...
#
# The command runs as root in the present folder; what it writes under /rdma-out comes back in FOLDER. Exit status: the
# command's; 77 when no such machine can be had here (said plainly, with the reason); 124 after the time-out.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)

cpus=2 memory=3072 timeout=600 out=
while [ $# -gt 0 ]; do
  case $1 in
    --cpus) cpus=$2; shift 2 ;;
    --memory) memory=$2; shift 2 ;;
    --timeout) timeout=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --) shift; break ;;
    -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "run_vm: unknown argument '$1'; see --help" >&2; exit 2 ;;
  esac
done
[ $# -gt 0 ] || { echo "run_vm: no command; see --help" >&2; exit 2; }

unable() {
  echo "run_vm: skipped: no virtual machine with an RDMA NIC here: $1" >&2
  exit 77
}
[ "$(uname -m)" = x86_64 ] || unable "the machine is $(uname -m), and the kernel package is of amd64"
bash "$root/deploy/install-deps.sh" --rdma >&2 || unable "the packages could not be installed"
for tool in qemu-system-x86_64 busybox cpio depmod modprobe ip rdma; do
  command -v "$tool" >/dev/null || unable "$tool is missing"
done

# The kernel is unpacked, never installed: this machine's own boot is left alone.
cache=${MK_BUILD_ROOT:-$root/build}/rdma
mkdir -p "$cache"
package=$(apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/.*Depends: \(linux-image-[^ ]*\).*/\1/p' | head -n 1)
[ -n "$package" ] || unable "apt knows no linux-image-amd64"
release=${package#linux-image-}
kernel=$cache/$release
if [ ! -e "$kernel/ready" ]; then
  fresh=$(mktemp -d "$cache/fresh.XXXXXX")
  (cd "$fresh" && apt-get -q download "$package" >download.log 2>&1) || { tail -n 3 "$fresh/download.log" >&2; rm -rf "$fresh"; unable "$package could not be downloaded"; }
  dpkg-deb -x "$fresh"/*.deb "$fresh" && rm -f "$fresh"/*.deb
  depmod -b "$fresh" "$release"
  touch "$fresh/ready"
  mv -T "$fresh" "$kernel" 2>/dev/null || rm -rf "$fresh"  # somebody else was quicker
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
image=$work/image
mkdir -p "$image"/{bin,modules,proc,sys,dev}
cp "$(command -v busybox)" "$image/bin/busybox"
cp "$here/guest_init.sh" "$image/init"
chmod +x "$image/init"
# rxe asks for crc32 by name, so no dependency brings it.
for module in virtio_pci 9pnet_virtio 9p overlay crc32_generic ib_uverbs rdma_rxe veth; do
  modprobe -d "$kernel" -S "$release" --show-depends "$module" | sed -n 's/^insmod //p'
done | awk '!seen[$1]++ { print $1 }' | while read -r file; do
  cp "$file" "$image/modules/"
  echo "/modules/${file##*/}"
done >"$image/modules/order"
(cd "$image" && find . | cpio -o -H newc --quiet | gzip -1) >"$work/initrd"

share=$work/out
mkdir "$share"
{
  printf 'cd %q || exit 125\n' "$PWD"
  printf '%q ' "$@"
  printf '\n'
} >"$share/job"

# KVM is not tried by itself: where it is offered inside another virtual machine it may hang instead of failing.
accelerator=${MK_VM_ACCELERATOR:-tcg,thread=multi}
echo "run_vm: booting Linux $release (accelerator $accelerator, $cpus CPUs, $memory MiB)" >&2
status=0
timeout --foreground "$timeout" qemu-system-x86_64 -accel "$accelerator" -cpu max -smp "$cpus" -m "$memory" -nodefaults \
  -no-reboot -display none -serial file:"$work/console" -kernel "$kernel/boot/vmlinuz-$release" -initrd "$work/initrd" \
  -append "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check" \
  -virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap \
  -virtfs local,path="$share",mount_tag=out,security_model=none </dev/null >"$work/qemu.log" 2>&1 &
qemu=$!
tail --pid="$qemu" -n +1 -F "$work/console" 2>/dev/null | stdbuf -oL tr -d '\r' &
wait "$qemu" || status=$?
wait
if [ -n "$out" ]; then
  rm -f "$share/job"
  mkdir -p "$out"
  cp -r "$share/." "$out/"
fi
if [ "$status" = 124 ]; then
  echo "run_vm: ended after $timeout s" >&2
  exit 124
fi
result=$(tr -d '\r' <"$work/console" | sed -n 's/^guest: exit //p' | tail -n 1)
if [ -z "$result" ]; then
  cat "$work/qemu.log" >&2
  grep -q 'guest:' "$work/console" || unable "QEMU did not boot it (status $status)"
  echo "run_vm: the machine ended without a result" >&2
  exit 1
fi
exit "$result"
