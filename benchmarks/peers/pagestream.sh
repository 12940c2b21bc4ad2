#!/usr/bin/env bash
# This project on one machine: pagestream.sh MODEL PORT [options of scripts/serve]
set -euo pipefail
model=$1 port=$2
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
state=$(mktemp -d)
# Compiled code is kept from one start to the next, as where nobody names a folder.
export NUMBA_CACHE_DIR=${NUMBA_CACHE_DIR:-$root/.pagestream/numba}
exec "$root/scripts/serve" --model "$model" --port "$port" --state-dir "$state" \
  --kv-memory-bytes 2GiB --host-kv-memory-bytes 0 "${@:3}"
