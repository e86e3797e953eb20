#!/usr/bin/env bash
# check_model.sh LIST MODEL NAME: checks one case with spin. The case is the line of LIST (a models.txt) that begins with "MODEL.pml
# NAME"; the model stands beside the list. The case passes when the verifier's verdict is what the line expects.
#
# "safety": assertions, and no end but the allowed ones. "progress": also no infinite run without progress, whatever is scheduled. A
# case is bounded in memory and time (MK_MODEL_MEMORY_MIB, default 2048; MK_MODEL_TIMEOUT_S, default 120): a search that a bound
# cuts short is a failure. To see how a case fails: the last line names the folder with its files; `spin -t -p model.pml` there prints
# the steps. Exit status 77 when spin or a C compiler is missing.
set -u
list=$1 model=$2.pml name=$3
memory_mib=${MK_MODEL_MEMORY_MIB:-2048}
timeout_s=${MK_MODEL_TIMEOUT_S:-120}
for tool in spin cc; do
  command -v $tool >/dev/null || { echo "no $tool: models are not checked (bash deploy/install-deps.sh --test)"; exit 77; }
done
read -r _ _ line < <(grep -E "^$model +$name " "$list") || { echo "$list has no case '$model $name'" >&2; exit 1; }
expected=$(sed 's/ *:.*//' <<<"$line")
read -r kind defines <<<"${line#*:}"
work=$(mktemp -d "${TMPDIR:-/tmp}/mk-model.XXXXXX")
cp "$(dirname "$list")/$model" "$work/model.pml"
cd "$work" || exit 1

# The verifier's verdict: "pass" or its first error.
verdict() {
  # Unreached code is not reported (-n): mutants have it. A mutant fails soon: compiling its verifier takes longer than running it.
  local search=-DSAFETY arguments=(-n -m1000000 -w20) optimise=-O0 code error
  [ "$kind" = safety ] || { search=-DNP; arguments+=(-l); }
  [ "$expected" != pass ] || optimise=-O1
  # shellcheck disable=SC2086
  spin -a $defines model.pml >spin.log 2>&1 || { echo "spin: $(tail -n 1 spin.log)"; return; }
  cc $optimise -w $search -DMEMLIM="$memory_mib" -o pan pan.c >cc.log 2>&1 || { echo "cc: $(tail -n 1 cc.log)"; return; }
  timeout "$timeout_s" ./pan "${arguments[@]}" >pan.log 2>&1
  code=$?
  error=$(sed -n 's/^pan:1: //p' pan.log)
  if [ $code = 124 ]; then
    echo "not done after $timeout_s s"
  elif [ -n "$error" ]; then
    echo "$error"
  elif grep -q -E 'Search not completed|max search depth too small|out of memory|reached -DMEMLIM' pan.log; then
    echo "the search was cut short: $(grep -E -m1 'depth too small|memory|MEMLIM' pan.log)"
  elif grep -q 'errors: 0' pan.log; then
    echo pass
  else
    echo "no verdict: $(tail -n 1 pan.log)"
  fi
}

case $kind in
  safety | progress) got=$(verdict) ;;
  *) got="no such check: $kind" ;;
esac
if [ "$got" = "$expected" ] || { [ "$expected" != pass ] && [[ $got == "$expected"* ]]; }; then
  echo "passed  $model $name ($(sed -n 's/^ *\([0-9]*\) states, stored.*/\1/p' pan.log) states, $SECONDS s)"
  rm -rf "$work"
else
  echo "FAILED  $model $name: expected '$expected', got '$got' ($work)"
  exit 1
fi
