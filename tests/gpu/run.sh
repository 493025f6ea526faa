#!/bin/bash
# SPDX-License-Identifier: GPL-3.0-or-later
# What `make gpu-test` runs: the tests on a real GPU, on a machine that may reach nothing.
#
# Python: .venv if `make setup` made one, else a python3 that has ansible-core and pytest already, else
# python3 with the wheels that lie in $GPU_TEST_WHEELS (default .whl/, which `make gpu-wheels` fills),
# unpacked into a temporary folder. No Debian package is needed; what is, and what becomes of a test
# where something lacks, is in README.md beside this file.
# Where there is no GPU it says so, runs nothing and exits 0.
set -euo pipefail
cd "$(dirname "$0")/../.."

if [ ! -e /dev/nvidia0 ] || ! command -v nvidia-smi >/dev/null; then
  echo "gpu-test: NOT RUN: there is no NVIDIA GPU here (/dev/nvidia0 or nvidia-smi is missing)"
  exit 0
fi
if [ "$(id -u)" != 0 ]; then
  echo "gpu-test: NOT RUN: needs root, for signals and namespaces" >&2
  exit 1
fi

complete() { "$1" -c 'import ansible, pytest, pytest_timeout, yaml' 2>/dev/null; }

python=.venv/bin/python
complete "$python" || python=$(command -v python3)
if ! complete "$python"; then
  wheels=${GPU_TEST_WHEELS:-.whl}
  if ! ls "$wheels"/*.whl >/dev/null 2>&1; then
    echo "gpu-test: NOT RUN: $python lacks ansible-core or pytest; run make setup, or elsewhere make gpu-wheels" \
      "and bring $wheels/ along" >&2
    exit 1
  fi
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  # Not pip, which Debian's python3 comes without.
  for wheel in "$wheels"/*.whl; do "$python" -m zipfile -e "$wheel" "$site"; done
  export PYTHONPATH=$site
  if ! complete "$python"; then
    echo "gpu-test: NOT RUN: the wheels in $wheels/ are not for $("$python" --version) on $(uname -m);" \
      "see make gpu-wheels in tests/gpu/README.md" >&2
    exit 1
  fi
fi

# A run of only some tests must not replace the record of a whole one.
if [ $# = 0 ]; then
  export GPU_TEST_DOC=${GPU_TEST_DOC:-docs/real-gpu.md} GPU_TEST_TWO_DOC=${GPU_TEST_TWO_DOC:-docs/real-two-gpus.md}
fi
"$python" -m pytest -p no:cacheprovider --timeout=120 --tb=short -q -rA --show-capture=no tests/gpu "$@"
