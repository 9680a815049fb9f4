#!/bin/bash
# Train on several machines without a cluster: run this on each of them.
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node-a ./launch_multi_node.sh [training flags]      on node-a
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=node-a ./launch_multi_node.sh [training flags]      on node-b
# MASTER_PORT (default 29500) must be free on node-a and open to the others. The run folder must be on a file system that
# all machines share. Other variables: see launch_single_node.sh.
set -euo pipefail

case " $* " in *" -h "* | *" --help "*) exec "$(dirname "${BASH_SOURCE[0]}")/launch_single_node.sh" --help ;; esac
for name in NNODES NODE_RANK MASTER_ADDR; do
  [ -n "${!name:-}" ] || { echo "error: set $name; for example: NNODES=2 NODE_RANK=0 MASTER_ADDR=$(hostname) $0" >&2; exit 2; }
done
export NNODES NODE_RANK MASTER_ADDR
exec "$(dirname "${BASH_SOURCE[0]}")/launch_single_node.sh" "$@"
