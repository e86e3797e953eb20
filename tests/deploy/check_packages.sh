#!/usr/bin/env bash
# check_packages.sh <build folder of the preset `package`>: the Debian packages as an administrator meets them.
#
# lintian finds no errors; the library's symbols are the committed ones; a program builds against the installed headers
# alone. Then, in a Debian of their own that systemd boots: install, an older version first and upgraded while a job runs; the
# service under its sandbox (in_container.sh); remove, purge, nothing left. Exit status 77 where no such system can be had.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source_root=$(cd "$here/../.." && pwd)
build=$(cd "$1" && pwd)
packages=$build/packages
cache=$build/container
. "$here/container.sh"

step() { echo "-- $*"; }
mapfile -t debs < <(ls "$packages"/*.deb)
[ ${#debs[@]} = 4 ] || { echo "four packages are expected in $packages, there are ${#debs[@]}"; exit 1; }

step lintian
# The maintainer's address is a placeholder until somebody publishes packages; ldconfig is CPack's.
lintian --allow-root --fail-on error "${debs[@]}" --suppress-tags \
  bogus-mail-host,bogus-mail-host-in-debian-changelog,initial-upload-closes-no-bugs,maintscript-calls-ldconfig

work=$(mktemp -d "$build/packages-test.XXXXXX")
finish() {
  container_stop
  rm -rf --one-file-system "$work"
}
trap finish EXIT

step symbols
for deb in "${debs[@]}"; do
  case $deb in */libmkclient*) dpkg-deb -x "$deb" "$work/client" ;; esac
done
library=$(find "$work/client" -name 'libmkclient.so.*' -type f)
bash "$here/check_symbols.sh" "$library" "$source_root/deploy/debian/libmkclient1.symbols"
bash "$source_root/tests/check_client_library.sh" "$library"

step "a program against the installed tree"
mkdir "$work/program"
cp "$here/installed_client.cc" "$work/program/main.cc"
export PKG_CONFIG_PATH=$work/client/usr/lib/$(uname -m)-linux-gnu/pkgconfig
flags=$(pkg-config --cflags --libs mkclient)
(cd "$work/program" && c++ -std=c++20 -Wall -Wextra -Werror main.cc -o with-pkg-config $flags)
cat >"$work/program/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.25)
project(program LANGUAGES CXX)
find_package(mkernel 0.1 REQUIRED)
add_executable(with-cmake main.cc)
target_link_libraries(with-cmake PRIVATE mkernel::client)
END
cmake -S "$work/program" -B "$work/program/build" -DCMAKE_PREFIX_PATH="$work/client/usr" >/dev/null
cmake --build "$work/program/build" >/dev/null
for program in with-pkg-config build/with-cmake; do
  LD_LIBRARY_PATH=$(dirname "$library") "$work/program/$program"
done
# In C, too.
printf '#include <mkernel/mkernel_c.h>\nint main(void) { return mk_version() == 0; }\n' >"$work/program/c.c"
cc -std=c11 -Wall -Wextra -Werror "$work/program/c.c" -o "$work/program/in-c" $flags

if ! reason=$(container_possible); then
  echo "the installation is not tested: $reason"
  exit 77
fi
step "a Debian system"
mkdir -p "$cache"
container_base "$cache" systemd systemd-sysv dbus >"$cache/base.log" 2>&1 || { tail "$cache/base.log"; exit 1; }
depends=$(for deb in "${debs[@]}"; do dpkg-deb -f "$deb" Depends; done | tr ',' '\n' |
  sed 's/|.*//; s/(.*//; s/ //g' | grep -vE '^(mkerneld|libmkclient1|mkernel-tools|libmkclient-dev|)$' | sort -u | paste -sd ' ')
root=$work/base
# With the packages' dependencies from the archive, since in the booted system there is no network; kept as a file, too.
ready=$cache/ready-$(sha256sum <<<"$depends" | cut -c1-12).tar
if [ ! -e "$ready" ]; then
  tar -C "$work" -xf "$cache/base.tar"
  cp /etc/resolv.conf "$root/etc/resolv.conf" 2>/dev/null || true
  cp /etc/apt/apt.conf.d/*proxy* "$root/etc/apt/apt.conf.d/" 2>/dev/null || true
  unshare --mount --fork bash -c '
    set -e
    mount -t proc proc "$0/proc"
    mount --bind /dev "$0/dev"
    export DEBIAN_FRONTEND=noninteractive LC_ALL=C PATH=/usr/sbin:/usr/bin:/sbin:/bin
    chroot "$0" apt-get -q update
    chroot "$0" apt-get -q install -y --no-install-recommends "$@" procps
    chroot "$0" apt-get -q clean' "$root" $depends >"$work/apt.log" 2>&1 || { tail -n 20 "$work/apt.log"; exit 1; }
  tar -C "$work" --one-file-system -cf "$cache/ready.part" base
  mv "$cache/ready.part" "$ready"
else
  tar -C "$work" -xf "$ready"
fi

# An older version to upgrade from: the same files under a lower number, or as an earlier commit of the same.
version=$(dpkg-deb -f "${debs[0]}" Version)
case $version in *+*) older=${version%%+*}+20200101000000.g0123456789ab-1 ;; *) older=0.0.9-1 ;; esac
mkdir -p "$root/root/new" "$root/root/old"
cp "${debs[@]}" "$root/root/new/"
for deb in "${debs[@]}"; do
  dpkg-deb -R "$deb" "$work/older"
  sed -i "s/^Version: .*/Version: $older/; s/(= [^)]*)/(= $older)/g" "$work/older/DEBIAN/control"
  dpkg-deb -Znone -b "$work/older" "$root/root/old/$(basename "$deb")" >/dev/null
  rm -r "$work/older"
done

listing() { (cd "$root" && find etc usr var run lib opt srv root home -xdev \( -path var/lib/dpkg -o -path var/cache -o -path var/log -o -path var/tmp -o -path "etc/sub[ug]id*" -o -path root -o -path var/lib/systemd \) -prune -o -print | LC_ALL=C sort); }
listing >"$work/before"
cp "$root/etc/passwd" "$work/passwd"
cp "$root/etc/group" "$work/group"
cp "$here/in_container.sh" "$root/root/"

step "the service"
container_boot "$root" "$work/boot.log"
container_run bash /root/in_container.sh

step "nothing is left"
container_stop
listing >"$work/after"
diff "$work/before" "$work/after"
diff "$work/passwd" "$root/etc/passwd"
diff "$work/group" "$root/etc/group"
echo "packages: all well"
