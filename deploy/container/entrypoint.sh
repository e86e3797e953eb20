#!/bin/sh
# Starts mkerneld with a node id of its own: MKERNEL_NODE_ID, or the line "<name> <id>" of /etc/mkernel/nodes for NODE_NAME, or the
# number at the end of NODE_NAME (gpu-017 is 17). Arguments go to mkerneld.
set -eu
: "${MKERNEL_NODES:=/etc/mkernel/nodes}"
id=${MKERNEL_NODE_ID:-}
if [ -z "$id" ] && [ -n "${NODE_NAME:-}" ]; then
  if [ -r "$MKERNEL_NODES" ]; then
    id=$(awk -v name="$NODE_NAME" '$1 == name { print $2; exit }' "$MKERNEL_NODES")
  fi
  if [ -z "$id" ]; then
    id=$(printf '%s\n' "${NODE_NAME%%.*}" | sed -n 's/.*[^0-9]0*\([0-9][0-9]*\)$/\1/p')
  fi
fi
if [ -z "$id" ]; then
  echo "entrypoint: no node id: set MKERNEL_NODE_ID, or give '${NODE_NAME:-NODE_NAME}' one in $MKERNEL_NODES" >&2
  exit 2
fi
exec mkerneld --node-id "$id" "$@"
