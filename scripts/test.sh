#!/usr/bin/env bash
# Sets up, then lint, format, types and tests (tests/README.md says which test is in which tier):
#   scripts/test.sh                            the unit tests and those on real ranks that are not slow
#   scripts/test.sh --all                      the slow ones and clusters as well
#   scripts/test.sh tests/unit -k cache        pytest with these arguments
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${HVDTRAIN_VENV:-$root/.venv}

"$root/scripts/setup.sh" --with test
case "$*" in # As root on Debian or Ubuntu it installs what the cluster tests need.
    --all | *tests/cluster*) "$root/scripts/cluster_packages.sh" ;;
esac
cd "$root"
export PATH=$venv/bin:$PATH
ruff check .
ruff format --check .
mypy hvdtrain
case "$*" in
    '' | --all) exec python tests/tiers.py "$@" ;;
    *) exec python -m pytest "$@" ;;
esac
