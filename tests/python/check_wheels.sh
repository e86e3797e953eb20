#!/usr/bin/env bash
# check_wheels.sh <build> <virtual environment with PyTorch>: the wheels as a user gets them. Builds them, has auditwheel name their
# platform, installs them into clean environments of Python 3.11 and 3.12 with NumPy only, and runs the tests that need no more. Then the
# operators' tests with PyTorch on the installed files.
set -euo pipefail
build=$(realpath "$1") torch=$(realpath "$2")
here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# With the PATH that login gives an ordinary user of Debian (/etc/login.defs, without its folders for games).
env PATH=/usr/local/bin:/usr/bin:/bin bash "$root/deploy/wheels.sh" --build "$build" --out "$work/wheels"
version=$(cat "$build/deploy/version/version.txt")

for wheel in "$work"/wheels/*.whl; do
  "$root/build/wheel-tools/bin/auditwheel" show "$wheel" >"$work/shown"
  platform=$(basename "$wheel" .whl | sed 's/.*-none-//')
  grep -q "\"$platform\"" "$work/shown" || { cat "$work/shown"; exit 1; }
done
[ -e "$work"/wheels/mkernel-*-py3-none-manylinux_2_34_x86_64.whl ]

# Nothing of the checkout or its build may help.
mkdir -p "$work/tests" "$work/client/python"
cp -r "$here" "$work/tests/python"
cp -r "$root/client/include" "$work/client/"
cp -r "$root/client/python/examples" "$work/client/python/"
mkdir -p "$work/deploy/docs/api"
cp "$root/deploy/docs/api/python.md" "$work/deploy/docs/api/"
unset MKERNEL_LIBRARY MKERNEL_BIN PYTHONPATH
export MKERNEL_INSTALLED=1 OMP_NUM_THREADS=1
ran=0
for python in /usr/bin/python3.11 "$(command -v /usr/bin/python3.12 || ls "$HOME"/.pyenv/versions/3.12*/bin/python3.12 2>/dev/null | tail -1)"; do
  [ -x "$python" ] || continue
  clean=$work/venv-$ran
  "$python" -m venv "$clean"
  "$clean/bin/pip" install --quiet --disable-pip-version-check "$work"/wheels/*.whl pytest==8.4.2
  "$clean/bin/python" -c "import mkernel, mkernel._c as c; assert {mkernel.__version__, c.version()} == {'$version'}"
  if "$clean/bin/python" -c 'import torch' 2>/dev/null; then echo "torch is there"; exit 1; fi
  (cd "$work" && "$clean/bin/python" -B -m pytest -q -p no:cacheprovider tests/python --ignore tests/python/pytorch)
  echo "$("$python" --version): well"
  ran=$((ran + 1))
done
[ $ran -ge 1 ]

"$torch/bin/pip" install --quiet --disable-pip-version-check --no-deps --no-index --target "$work/installed" "$work"/wheels/*.whl
(cd "$work" && PYTHONPATH=$work/installed "$torch/bin/python" -B -m pytest -q -p no:cacheprovider tests/python/pytorch/test_torch.py -k "gradients_are or wrong_tensors")
