#!/usr/bin/env bash
# check_completion.sh <mkctl>: mkctl's completion in fish and zsh, as the package installs it: what a person gets for TAB. (bash's is
# in mkctl_test.)
set -euo pipefail
mkctl=$1
for shell in fish zsh; do command -v $shell >/dev/null || { echo "$shell is missing (Debian: $shell)"; exit 77; }; done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HOME=$work XDG_CONFIG_HOME=$work/config TERM=vt100
PATH=$(dirname "$mkctl"):$PATH
mkdir -p "$work/completions"
"$mkctl" completion fish >"$work/mkctl.fish"
"$mkctl" completion zsh >"$work/completions/_mkctl"

fish_offers() { fish -c "source '$work/mkctl.fish'; complete -C '$1'"; }
diff <(fish_offers 'mkctl link ') <(printf "list\tList all links\nshow\tA link's state and since when, and its peer's\n")
diff <(fish_offers 'mkctl --json config d') <(printf 'diff\tShow what the daemon'"'"'s file, or another, would change\n')
[ -z "$(fish_offers 'mkctl link list ')" ]
fish_offers 'mkctl drain --' | grep '^--timeout' >/dev/null
fish_offers 'mkctl who' | grep '^who-is-slow' >/dev/null

# zsh needs a terminal to complete anything; each line is its own first or later TAB.
cat >"$work/session.zsh" <<'END'
zmodload zsh/zpty
zpty shell 'zsh -f -i'
zpty -w shell "PS1='READY> '; fpath=(\$COMPLETIONS \$fpath); autoload -Uz compinit; compinit -u -D; print LOADED | tr A-Z a-z"
zpty -r shell seen '*loaded*READY> *'
expect() {  # <typed> <line that TAB makes of it>
  zpty -n -w shell "$1"$'\t'
  zpty -r shell seen "*$2*"
  zpty -n -w shell $'\x15'
  print -r -- "$1 -> $2"
}
expect 'mkctl who' 'who-is-slow'
expect 'mkctl link sh' 'link show'
expect 'mkctl --json config d' 'config diff'
expect 'mkctl --js' '--json'
zpty -d shell
END
COMPLETIONS=$work/completions timeout 60 zsh -f "$work/session.zsh" || { echo "zsh does not complete so"; exit 1; }
echo "fish and zsh complete"
