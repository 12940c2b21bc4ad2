#!/usr/bin/env bash
# transformers' own server with continuous batching: transformers.sh MODEL PORT
#   TRANSFORMERS_VENV   where it is or is to be installed (/tmp/transformers-venv)
set -euo pipefail
model=$1 port=$2
venv=${TRANSFORMERS_VENV:-/tmp/transformers-venv}

if [ ! -e "$venv/pagestream-ready" ]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet "transformers[serving]" accelerate torch
  touch "$venv/pagestream-ready"
fi

exec "$venv/bin/transformers" serve "$model" --continuous-batching --device cpu \
  --dtype bfloat16 --host 127.0.0.1 --port "$port" "${@:3}"
