#!/usr/bin/env bash
# Sets up .venv, then trains a network on handwritten digits with two workers. Options are those of
# scripts/train_mnist.py, such as --epochs 5.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${HVDTRAIN_VENV:-$root/.venv}

case ${1:-} in -h | --help)
    sed -n '2,3s/^# //p' "${BASH_SOURCE[0]}"
    exit
    ;;
esac
"$root/scripts/setup.sh"
exec "$venv/bin/hvdtrain" run -np 2 "$root/scripts/train_mnist.py" "$@"
