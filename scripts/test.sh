#!/usr/bin/env bash
# Sets up (as root on Debian or Ubuntu also what the cluster tests need), then lint, format, types and all tests.
# Arguments go to pytest: scripts/test.sh tests/unit -k cache
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${HVDTRAIN_VENV:-$root/.venv}

"$root/scripts/setup.sh" --with test
"$root/scripts/cluster_packages.sh"
cd "$root"
export PATH=$venv/bin:$PATH
ruff check .
ruff format --check .
mypy hvdtrain
exec python -m pytest "$@"
