# Sourced by the other scripts: finds a Python, and keeps .venv equal to the lock files.
#
#   PYTHON                which Python to use (3.11 or newer); by default the first good one on PATH
#   PIP_EXTRA_INDEX_URL   pip's own: an index that has CPU builds of torch spares a machine without
#                         a GPU several GB, because the default index has torch with CUDA

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv

fail() {
  echo "error: $*" >&2
  exit 1
}

# Prints the path of a Python that is new enough.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} "$venv/bin/python" python3 python3.{14,13,12,11} python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
    [ "$candidate" != "${PYTHON:-}" ] || fail "PYTHON=$PYTHON is not Python 3.11 or newer"
  done
  fail "no Python 3.11 or newer found (python3 is $(python3 -V 2>&1 || echo missing));" \
    "install one, or name it: PYTHON=/path/to/python3 $0"
}

# Shows pip's output as one line that changes; without a terminal, as a line now and then.
show_progress() {
  local line count=0 last=0
  while IFS= read -r line; do
    case $line in
      Collecting* | Processing*) count=$((count + 1)) ;;
      *"Installing collected packages"*) line='unpacking, which takes a minute' ;;
      *Downloading* | *"Using cached"*) ;;
      *) continue ;;
    esac
    line=${line#"${line%%[![:space:]]*}"} # without its indent
    line=${line%% (from*}
    if [ -t 1 ]; then
      printf '\r\033[K[%3d/%d] %.60s' "$count" "$1" "$line"
    elif [ $((SECONDS - last)) -ge 10 ] || [[ $line == unpacking* ]]; then
      last=$SECONDS
      printf '[%3d/%d] %.60s\n' "$count" "$1" "$line"
    fi
  done
  [ ! -t 1 ] || printf '\r\033[K'
}

# Whether .venv holds what these lock files say.
is_installed() {
  local lock
  "$venv/bin/python" -c '' 2>/dev/null || return 1
  for lock in "$@"; do
    [ "$(cat "$venv/.installed-$(basename "$lock")" 2>/dev/null)" = "$(cksum <"$root/$lock")" ] || return 1
  done
}

# Makes .venv hold what a lock file says, if it does not already; the lock's checksum is kept.
# usage: ensure_venv LOCK-FILE...
ensure_venv() {
  local lock stamp sum log python requirements=() stamps=()
  if ! "$venv/bin/python" -c '' 2>/dev/null; then
    python=$(find_python)
    echo "creating $venv with $("$python" -V)"
    rm -rf "$venv"
    "$python" -m venv "$venv" \
      || fail "$python cannot create virtual environments; on Debian and Ubuntu: apt install python3-venv"
  fi
  for lock in "$@"; do
    stamp=$venv/.installed-$(basename "$lock")
    sum=$(cksum <"$root/$lock")
    if [ "$(cat "$stamp" 2>/dev/null)" != "$sum" ]; then
      requirements+=(-r "$root/$lock")
      stamps+=("$stamp" "$sum")
    fi
  done
  [ ${#requirements[@]} -gt 0 ] || return 0

  log=$venv/install.log
  echo "installing ${*} (once; details in $log)"
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off \
    "${requirements[@]}" 2>&1 | tee "$log" | show_progress "$(cat "${@/#/$root/}" | grep -c ==)" || {
    grep -E '^(ERROR|WARNING: Retrying)|No space|No matching' "$log" | tail -n 5 >&2
    tail -n 15 "$log" >&2
    fail "pip could not install the packages; the whole output is in $log"
  }
  set -- "${stamps[@]}"
  while [ $# -gt 0 ]; do
    echo "$2" >"$1"
    shift 2
  done
}
