#!/usr/bin/env bash
# Installs the Debian 12 packages mkernel needs. Idempotent; asks apt only when something is missing.
#
#   bash deploy/install-deps.sh [--build] [--test] [--rdma] [--ops] [--docs] [--list]
#
# --build  compiler, tools to build and to package, libraries       --test  test libraries, formatter, linter
# --rdma   a virtual machine with a software RDMA NIC (tests/rdma)
# --ops    what only tests of the daemon's surroundings need: promtool, dnsmasq, etcd, Slurm, Open MPI, torch, lintian, ...;
#          their services are not started
# --docs   what builds the site of deploy/docs
# --list   print the packages and stop            without a group: --build and --test
#
# Runs as root, or with sudo. CUDA is not installed here: it is used when nvcc is there already.
set -euo pipefail

build_packages=(
  build-essential cmake ninja-build pkg-config ccache mold
  protobuf-compiler protobuf-compiler-grpc libprotobuf-dev libgrpc++-dev
  libfmt-dev libexpected-dev libboost-dev nlohmann-json3-dev libtomlplusplus-dev libcli11-dev
  libdnnl-dev libfabric-dev libibverbs-dev libhwloc-dev libsystemd-dev libssl-dev
  prometheus-cpp-dev scdoc python3-pip python3-venv file
)
test_packages=(
  libgtest-dev libgmock-dev libbenchmark-dev clang-format-14 clang-tidy-14 python3 systemd
  spin clang-14 libclang-rt-14-dev llvm-14 tmux
)
ops_packages=(
  prometheus debootstrap lintian dnsmasq-base etcd-server openssl
  slurmctld slurmd slurm-client munge openmpi-bin python3-torch python3-venv buildah
  fish zsh python3-numpy python3-pytest
)
docs_packages=(python3-sphinx python3-myst-parser furo doxygen python3-breathe)
rdma_packages=(
  qemu-system-x86 busybox-static cpio kmod iproute2 ibverbs-providers perftest
)

packages=()
list=0
quiet_services=
for argument in "$@"; do
  case $argument in
    --build) packages+=("${build_packages[@]}") ;;
    --test) packages+=("${test_packages[@]}") ;;
    --rdma) packages+=("${rdma_packages[@]}") ;;
    --ops) packages+=("${ops_packages[@]}") quiet_services=1 ;;
    --docs) packages+=("${docs_packages[@]}") ;;
    --list) list=1 ;;
    -h | --help) sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "install-deps: unknown argument '$argument' (--build, --test, --rdma, --ops, --docs, --list)" >&2; exit 2 ;;
  esac
done
[ ${#packages[@]} -gt 0 ] || packages=("${build_packages[@]}" "${test_packages[@]}")
if [ $list = 1 ]; then
  printf '%s\n' "${packages[@]}"
  exit 0
fi

if ! command -v apt-get >/dev/null; then
  echo "install-deps: no apt-get here. mkernel is built on Debian 12; elsewhere install what matches:" >&2
  printf '  %s\n' "${packages[@]}" >&2
  exit 1
fi

missing=()
for package in "${packages[@]}"; do
  state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$state" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} = 0 ]; then
  echo "install-deps: all ${#packages[@]} packages are there"
  exit 0
fi

as_root=()
if [ "$(id -u)" != 0 ]; then
  if ! command -v sudo >/dev/null; then
    echo "install-deps: not root, and no sudo. As root: apt-get install ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi

log=$(mktemp)
policy=/usr/sbin/policy-rc.d
finish() {
  rm -f "$log"
  [ -z "${policy_is_ours:-}" ] || "${as_root[@]}" rm -f "$policy"
}
trap finish EXIT
# Servers that only tests start themselves: apt is not to start them.
if [ -n "$quiet_services" ] && [ ! -e "$policy" ]; then
  policy_is_ours=1
  printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" >/dev/null
  "${as_root[@]}" chmod 755 "$policy"
fi
apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 "$@" >>"$log" 2>&1; }
echo "install-deps: installing ${#missing[@]} packages: ${missing[*]}"
# An update that fails half-way (one dead mirror among several) still leaves lists to install from.
updated=1
apt update || updated=0
if ! apt install -y --no-install-recommends "${missing[@]}"; then
  cat "$log" >&2
  [ $updated = 1 ] || echo "install-deps: 'apt-get update' had failed before that" >&2
  echo "install-deps: apt-get could not install: ${missing[*]}" >&2
  exit 1
fi
echo "install-deps: done"
