# Sourced: a Debian system in a folder, entered with its own processes, mounts and network, and booted with systemd.
#
# Needs root and the right to mount; `container_possible` says why not.

container_cgroup=mkernel-test-$$
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
  container_hierarchies=(/sys/fs/cgroup)
else
  container_hierarchies=(/sys/fs/cgroup/unified /sys/fs/cgroup/systemd)
fi

# container_base <folder> <package>...: the system, made by debootstrap once and kept as <folder>/base.tar.
container_base() {
  local folder=$1 mirror
  shift
  [ -e "$folder/base.tar" ] && return
  mirror=$(sed -n 's/^URIs: *\([^ ]*\)$/\1/p; s/^deb \([^ ]*\) bookworm main.*/\1/p' \
    /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2>/dev/null | head -n 1)
  rm -rf "$folder/base"
  local packages=$*
  debootstrap --variant=minbase --include="${packages// /,}" bookworm "$folder/base" ${mirror:+"$mirror"}
  cp /etc/apt/sources.list.d/debian.sources "$folder/base/etc/apt/sources.list.d/" 2>/dev/null || true
  tar -C "$folder" --one-file-system -cf "$folder/base.part" base
  mv "$folder/base.part" "$folder/base.tar"
  rm -rf "$folder/base"
}

container_possible() {
  [ "$(id -u)" = 0 ] || { echo "not root"; return 1; }
  command -v debootstrap >/dev/null || { echo "debootstrap is missing"; return 1; }
  unshare --mount --pid --net --fork true 2>/dev/null || { echo "no namespaces may be made here"; return 1; }
}

# container_boot <root> <log>: boots systemd there; sets container_pid. Only a loopback interface, and no device but the
# harmless ones.
container_boot() {
  local root=$1 log=$2
  (
    # A cgroup of its own in each hierarchy that systemd uses, so that it leaves nothing in ours.
    for hierarchy in "${container_hierarchies[@]}"; do
      [ -d "$hierarchy" ] || continue
      mkdir -p "$hierarchy/$container_cgroup"
      echo "$BASHPID" >"$hierarchy/$container_cgroup/cgroup.procs"
    done
    exec unshare --mount --uts --ipc --pid --cgroup --net --fork --kill-child bash -c '
    set -e
    root=$0
    ip link set lo up 2>/dev/null || true
    mount --bind "$root" "$root"
    mount -t proc proc "$root/proc"
    mount -t sysfs -o ro sysfs "$root/sys"
    for folder in run tmp dev; do mount -t tmpfs tmpfs "$root/$folder"; done
    for device in null zero full random urandom tty; do
      touch "$root/dev/$device"
      mount --bind "/dev/$device" "$root/dev/$device"
    done
    mkdir -p "$root/dev/pts" "$root/dev/shm"
    mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
    ln -s pts/ptmx "$root/dev/ptmx"
    mount -t tmpfs tmpfs "$root/dev/shm"
    if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
      mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
    else
      mount -t tmpfs tmpfs "$root/sys/fs/cgroup"
      mkdir "$root/sys/fs/cgroup/unified" "$root/sys/fs/cgroup/systemd"
      mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup/unified"
      mount -t cgroup -o none,name=systemd,xattr systemd "$root/sys/fs/cgroup/systemd"
    fi
    export container=mkernel-test
    exec chroot "$root" /lib/systemd/systemd --log-target=console --show-status=0
    ' "$root"
  ) >"$log" 2>&1 &
  container_shell=$!
  container_root=$root
  for _ in $(seq 200); do
    container_pid=$(pgrep -P "$container_shell" 2>/dev/null | head -n 1) || true
    if [ -n "$container_pid" ]; then
      case $(container_run systemctl is-system-running 2>/dev/null) in running | degraded) return 0 ;; esac
    fi
    kill -0 "$container_shell" 2>/dev/null || break
    sleep 0.3
  done
  echo "systemd does not boot in a container here:"
  tail -n 20 "$log"
  return 1
}

container_run() { nsenter -t "$container_pid" -m -u -i -p -n -C chroot "$container_root" "$@"; }

container_stop() {
  [ -z "${container_shell:-}" ] || kill -KILL "$container_shell" 2>/dev/null || true
  [ -z "${container_shell:-}" ] || wait "$container_shell" 2>/dev/null || true
  local hierarchy
  for hierarchy in "${container_hierarchies[@]}"; do
    for _ in $(seq 50); do  # its processes take a moment to go
      [ -d "$hierarchy/$container_cgroup" ] || break
      find "$hierarchy/$container_cgroup" -depth -type d -exec rmdir {} \; 2>/dev/null || true
      sleep 0.1
    done
  done
  container_shell=
}
