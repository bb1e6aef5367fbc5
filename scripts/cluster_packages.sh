#!/usr/bin/env bash
# Installs the distribution's packages that tests/cluster needs for ssh hosts in network namespaces, Slurm and
# containers. Only as root on Debian or Ubuntu; elsewhere those tests are skipped and name what to install.
# Starts no service. Run it again at any time: with everything installed it takes less than a second.
set -euo pipefail

packages=(
    iproute2 openssh-server openssh-client       # hosts in network namespaces
    slurm-wlm slurm-client munge libpmix-dev     # Slurm, which loads PMIx under the name that -dev has
    podman buildah runc debootstrap              # containers
    netavark aardvark-dns iptables               # containers in a network of their own
)

[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && command -v dpkg-query >/dev/null || exit 0
id=$(. /etc/os-release && echo " $ID ${ID_LIKE:-} ")
case $id in *" debian "* | *" ubuntu "*) ;; *) exit 0 ;; esac

missing=()
for package in "${packages[@]}"; do
    status=$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null || true)
    [ "$status" = 'install ok installed' ] || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

log=$(mktemp)
policy=/usr/sbin/policy-rc.d
cleanup() { rm -f "$log"; [ -z "${made_policy:-}" ] || rm -f "$policy"; }
trap cleanup EXIT
if [ ! -e "$policy" ]; then # Debian starts a service when its package is installed, unless this says no.
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    made_policy=1
fi

export DEBIAN_FRONTEND=noninteractive
install() { apt-get install --yes --quiet --no-install-recommends "${missing[@]}" >"$log" 2>&1 </dev/null; }

echo "cluster_packages.sh: installing ${missing[*]}" >&2
# The package lists may be missing or too old: they are fetched only then, for it takes a while.
if ! install; then
    apt-get update --quiet >>"$log" 2>&1 </dev/null || true
    if ! install; then
        tail -n 20 "$log" >&2
        echo "cluster_packages.sh: could not install them: the tests that need them will be skipped" >&2
    fi
fi
