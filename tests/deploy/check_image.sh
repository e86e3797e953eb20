#!/usr/bin/env bash
# check_image.sh <build folder of the preset `package`>: deploy/container/Containerfile built by buildah, a standard builder. The base
# image comes from debootstrap, since no registry may be at hand; the first stage, which compiles everything, is built whole
# only when MK_IMAGE_FULL=1, and otherwise stands for the packages that were built just before. Of a checkout, builders take
# neither builds nor history. In the image: the right files and user, a daemon that starts by the entry point, serves, and ends. Exit status 77 where no image can be built.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source_root=$(cd "$here/../.." && pwd)
build=$(cd "$1" && pwd)
cache=$build/container
. "$here/container.sh"
command -v buildah >/dev/null || { echo "buildah is missing"; exit 77; }
reason=$(container_possible) || { echo "$reason"; exit 77; }

work=$(mktemp -d "$build/image-test.XXXXXX")
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
mkdir "$work/tmp"
export TMPDIR=$work/tmp
buildah() { command buildah --root "$work/storage" --runroot "$work/run" "$@"; }
finish() {
  buildah rm --all >/dev/null 2>&1 || true
  buildah unshare true >/dev/null 2>&1 || true
  rm -rf --one-file-system "$work"
}
trap finish EXIT
step() { echo "-- $*"; }

step "what a builder takes of the checkout"
# docker reads .dockerignore alone; buildah and podman would prefer a .containerignore to it.
[ ! -e "$source_root/.containerignore" ]
mkdir -p "$work/whole"/{.git,build/package,build-asan,deploy}
cp "$source_root/.dockerignore" "$work/whole/"
touch "$work/whole"/{.git/HEAD,build/package/CMakeCache.txt,build-asan/x,deploy/build.sh,CMakeLists.txt}
printf 'FROM scratch\nCOPY . /src\n' >"$work/Containerfile"
buildah build -q -f "$work/Containerfile" -t whole "$work/whole" >"$work/build.log" 2>&1 || { tail -n 30 "$work/build.log"; exit 1; }
container=$(buildah from --pull-never whole)
taken=$(cd "$(buildah mount "$container")/src" && find . -type f ! -name .dockerignore | LC_ALL=C sort | paste -sd ' ')
[ "$taken" = "./CMakeLists.txt ./deploy/build.sh" ] || { echo "it takes $taken"; exit 1; }
buildah rm "$container" >/dev/null

step "a base image by debootstrap"
mkdir -p "$cache"
container_base "$cache" systemd systemd-sysv dbus >"$cache/base.log" 2>&1 || { tail "$cache/base.log"; exit 1; }
mkdir "$work/base"
tar -C "$work/base" -xf "$cache/base.tar"
cp /etc/apt/apt.conf.d/*proxy* "$work/base/base/etc/apt/apt.conf.d/" 2>/dev/null || true
first=$(buildah from scratch)
buildah add -q "$first" "$work/base/base" / >/dev/null
buildah config --cmd /bin/bash "$first"
buildah commit -q "$first" localhost/debian:bookworm >/dev/null
buildah rm "$first" >/dev/null
rm -rf "$work/base"

step "the image"
context=$source_root
file=$source_root/deploy/container/Containerfile
if [ "${MK_IMAGE_FULL:-}" != 1 ]; then
  # The first stage replaced by what it would have made; the second is the committed one, word by word.
  context=$work/context
  mkdir -p "$context/deploy/container" "$context/packages"
  cp "$build"/packages/mkerneld_*.deb "$context/packages/"
  cp "$source_root/deploy/container/entrypoint.sh" "$context/deploy/container/"
  {
    echo 'ARG DEBIAN'
    echo 'FROM ${DEBIAN} AS build'
    echo 'COPY packages/ /packages/'
    awk '/^FROM/ { stages++ } stages == 2' "$file"
  } >"$work/Containerfile"
  file=$work/Containerfile
fi
buildah build -q --layers=false --pull-never --network host --build-arg DEBIAN=localhost/debian:bookworm -f "$file" -t mkerneld "$context" >"$work/build.log" 2>&1 ||
  { tail -n 30 "$work/build.log"; exit 1; }

step "what is in it"
container=$(buildah from --pull-never mkerneld)
inspect() { buildah inspect --format "$1" mkerneld; }
[ "$(inspect '{{.OCIv1.Config.User}}')" = mkernel ]
[ "$(inspect '{{.OCIv1.Config.Entrypoint}}')" = "[/bin/sh /usr/lib/mkernel/entrypoint.sh]" ]
root=$(buildah mount "$container")
grep -q '^mkernel:' "$root/etc/passwd"
[ ! -e "$root/tmp/packages" ]
for program in cc cmake; do [ ! -e "$root/usr/bin/$program" ]; done

step "a daemon in it"
buildah run "$container" -- sh -c '
  NODE_NAME=gpu-017 /bin/sh /usr/lib/mkernel/entrypoint.sh --listen unix:/tmp/peer --socket /tmp/client.sock --ready-file /tmp/ready &
  daemon=$!
  for _ in $(seq 300); do [ -e /tmp/ready ] && break; sleep 0.1; done
  id -un
  mkctl --address unix:/tmp/peer status
  kill $daemon
  wait $daemon
  echo "ended with $?"' >"$work/run.log" 2>&1 || { cat "$work/run.log"; exit 1; }
grep -qx mkernel "$work/run.log"
grep -q '^node 17: ok' "$work/run.log"
grep -qx 'ended with 0' "$work/run.log"
echo "image: all well"
