#!/usr/bin/env bash
# llama.cpp's own server, built for this machine from the source that its Python package brings:
# llama_cpp.sh MODEL PORT
#   LLAMA_CPP_DIR     where it is or is to be built (/tmp/llama-cpp)
#   LLAMA_CPP_TYPE    of weights (bf16; f16, f32, q8_0)
#   LLAMA_CPP_SLOTS   requests at once (64)
#   LLAMA_CPP_TOKENS  that its KV cache holds (65536)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=$1 port=$2
dir=${LLAMA_CPP_DIR:-/tmp/llama-cpp} type=${LLAMA_CPP_TYPE:-bf16}
source=$dir/source/vendor/llama.cpp python=$here/../../.venv/bin/python

if [ ! -x "$dir/llama-server" ]; then
  mkdir -p "$dir/source"
  # This only fetches the source.
  "$python" -m pip download --quiet --no-deps --no-binary :all: --dest "$dir" llama-cpp-python
  tar -xzf "$dir"/llama_cpp_python-*.tar.gz -C "$dir/source" --strip-components 1
  cmake -S "$source" -B "$dir/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
    -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
    -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
  cmake --build "$dir/build" --parallel "$(nproc)" --target llama-server
  # What its converter wants beside torch and transformers.
  "$python" -m pip install --quiet --target "$dir/python" --no-deps sentencepiece
  cp "$dir/build/bin/llama-server" "$dir/"
fi

converted=$dir/$(basename "$model")-$type.gguf
if [ ! -e "$converted" ]; then
  PYTHONPATH=$dir/python "$python" "$here/to_gguf.py" "$source" "$model" "$converted.part" "$type"
  mv "$converted.part" "$converted"
fi

exec "$dir/llama-server" --model "$converted" --alias model --port "$port" \
  --parallel "${LLAMA_CPP_SLOTS:-64}" --ctx-size "${LLAMA_CPP_TOKENS:-65536}" --kv-unified \
  --threads "$(nproc)" "${@:3}"
