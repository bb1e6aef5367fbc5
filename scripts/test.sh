#!/usr/bin/env bash
# Sets up, then checks lint, format and types, and runs tests (tests/README.md explains their tiers):
#   scripts/test.sh                            unit tests and tests on ranks
#   scripts/test.sh --all                      also slow tests, ssh hosts, Slurm and containers: what CI runs
#   scripts/test.sh tests/unit -k cache        pytest with these arguments
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${HVDTRAIN_VENV:-$root/.venv}

case ${1:-} in -h | --help)
    sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}"
    exit
    ;;
esac
extras=test
[ "$*" != --all ] || extras=test,mlflow,wandb
"$root/scripts/setup.sh" --with "$extras"
case "$*" in # As root on Debian or Ubuntu it installs what the cluster tests need.
    --all | *tests/cluster*) "$root/scripts/cluster_packages.sh" ;;
esac
cd "$root"
# Tests start hundreds of Pythons, each of which would compile what it imports.
unset PYTHONDONTWRITEBYTECODE
export PATH=$venv/bin:$PATH
ruff check .
ruff format --check .
mypy hvdtrain
case "$*" in
    '' | --all) exec python tests/tiers.py "$@" ;;
    *) exec python -m pytest "$@" ;;
esac
