# Sourced by prolog, epilog and node-health: what they ask of this node's mkerneld, and how they tell Slurm.
#
# /etc/mkernel/slurm.conf may set MKCTL (the program, with flags such as --address) and MKERNEL_TIMEOUT; and, where Slurm is
# installed elsewhere than in /usr, PATH and SLURM_CONF.
mkernel_conf=/etc/mkernel/slurm.conf
MKCTL=mkctl
MKERNEL_TIMEOUT=5s
node=${SLURMD_NODENAME:-$(hostname -s)}
# Drain reasons of ours begin with this, so that people and node-health know whose they are.
mkernel_tag='mkernel:'
if [ -r "$mkernel_conf" ]; then . "$mkernel_conf"; fi

# Whether the node's daemon takes jobs: mkctl's exit status, and nothing that it prints.
mkernel_ready() { $MKCTL --timeout "$MKERNEL_TIMEOUT" ready >/dev/null 2>&1; }

# mkernel_say <text>: to the system's log, since Slurm keeps no script's output.
mkernel_say() {
  echo "mkernel: $1" >&2
  logger -t mkernel -p daemon.err "$1" 2>/dev/null || true
}

# mkernel_slurm_failed <program> <what it said>
mkernel_slurm_failed() {
  mkernel_say "$1 failed on $node: $2 (PATH is ${PATH:-empty}; $mkernel_conf may set PATH, and export SLURM_CONF)"
}

# mkernel_reason <exit status of mkctl>
mkernel_reason() {
  case $1 in
    1) echo "$mkernel_tag mkerneld is drained or shutting down" ;;
    3) echo "$mkernel_tag mkerneld does not answer" ;;
    *) echo "$mkernel_tag mkctl ready ended with status $1" ;;
  esac
}

# mkernel_drain <reason>: best effort. Whoever calls it exits with 1, on which slurmd drains the node in any case; a node
# that is draining keeps the reason it has.
mkernel_drain() {
  said=$(scontrol update "nodename=$node" state=drain "reason=$1" 2>&1) || mkernel_slurm_failed scontrol "$said"
}

# Exits 0 when the daemon takes jobs; otherwise drains the node and exits 1.
mkernel_require() {
  mkernel_ready
  status=$?
  [ $status = 0 ] && exit 0
  mkernel_drain "$(mkernel_reason $status)"
  exit 1
}
