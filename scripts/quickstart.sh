#!/usr/bin/env bash
# Sets up, then trains a network on handwritten digits with two workers. Arguments are passed to the script.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${HVDTRAIN_VENV:-$root/.venv}

"$root/scripts/setup.sh"
exec "$venv/bin/hvdtrain" run -np 2 "$root/scripts/train_mnist.py" "$@"
