#!/usr/bin/env bash
# check_symbols.sh <libmkclient.so> <libmkclient1.symbols> [--update]: the library exports exactly the committed symbols,
# so that none disappears, and none comes in, without somebody having meant it.
set -euo pipefail
library=$1 list=$2
exported=$(readelf --dyn-syms --wide "$library" |
  awk '$7 != "UND" && $8 ~ /@@/ && $4 != "OBJECT_VERSION" { sub("@@", "@", $8); print $8 }' | grep -v '^MKERNEL_' | LC_ALL=C sort -u)
[ -n "$exported" ] || { echo "$library exports nothing"; exit 1; }
version=$(sed -n 's/^ .* //p' "$list" | head -n 1)
if [ "${3:-}" = --update ]; then
  {
    echo "libmkclient.so.1 libmkclient1 #MINVER#"
    echo " MKERNEL_1@MKERNEL_1 ${version:-0.1.0}"
    sed "s/^/ /; s/$/ ${version:-0.1.0}/" <<<"$exported"
  } >"$list"
  exit
fi
committed=$(sed -n 's/^ \([^ ]*\) .*/\1/p' "$list" | grep -v '^MKERNEL_' | LC_ALL=C sort -u)
if ! difference=$(diff <(echo "$committed") <(echo "$exported")); then
  grep '^[<>]' <<<"$difference" | sed 's/@.*//; s/^</gone: /; s/^>/new:  /' | c++filt
  echo "symbols differ from $list; if that is meant: bash tests/deploy/check_symbols.sh $library $list --update"
  echo "(a symbol that is gone needs a new SOVERSION)"
  exit 1
fi
echo "$(wc -l <<<"$exported") symbols"
