#!/usr/bin/env bash
# A Ray cluster by hand, on machines that see one folder and have the same promptfed[ray]. Ray's ports must be open
# between them, and closed to everybody else. The token in ~/.ray/auth_token must be the same on all of them.
#
#   by-hand.sh head                       on the first machine; prints the address for the others
#   by-hand.sh worker HOST:6379           on each other machine
#   by-hand.sh run /shared/run.yaml /shared/storage-1 8     on the first machine: the run file, its storage, crews
#   by-hand.sh stop                       on every machine
set -euo pipefail

case "${1:-}" in
head) exec ray start --head --port=6379 --disable-usage-stats --include-dashboard=false ;;
worker) exec ray start --address="${2:?HOST:6379 of the first machine}" --disable-usage-stats ;;
run) exec promptfed simulate "${2:?a run file}" --engine ray --address auto --storage "${3:?a folder that all machines see}" --crews "${4:-2}" ;;
stop) exec ray stop ;;
*) sed -n 's/^#  *by-hand/by-hand/p' "$0" >&2 && exit 2 ;;
esac
