#!/usr/bin/env bash
# This project on one machine: pagestream.sh MODEL PORT [options of scripts/serve]
set -euo pipefail
model=$1 port=$2
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
state=$(mktemp -d)
exec "$root/scripts/serve" --model "$model" --port "$port" --state-dir "$state" \
  --kv-memory-bytes 2GiB --host-kv-memory-bytes 0 "${@:3}"
