#!/bin/bash
# Entry point of hvdtrain's images. Works for any user of the container.
#
#   COMMAND...   run the command
#   sshd         run an ssh server for this user, on port $HVDTRAIN_SSH_PORT (2222), for the job's first host
#   keys         create the ssh keys of a job in $HVDTRAIN_SSH_KEYS, unless they exist
#   health       health check: fails if there is an ssh server that does not answer
#
# $HVDTRAIN_SSH_KEYS (/run/hvdtrain/ssh) is a volume with the files that ssh expects in ~/.ssh: id_ed25519,
# authorized_keys and known_hosts. It may also hold ssh_host_ed25519_key; without it the server creates a host key.
set -euo pipefail

readonly keys=${HVDTRAIN_SSH_KEYS:-/run/hvdtrain/ssh}
readonly port=${HVDTRAIN_SSH_PORT:-2222}
readonly server=/tmp/.hvdtrain-sshd # the server's own files

fail() { echo "hvdtrain-entrypoint: $1" >&2; exit 1; }

# ssh and other programs refuse a user without a name, such as one from `docker run --user`. Podman gives such a user a
# name, but the working folder as home, where ssh would leave its files.
give_user_a_name() {
    local id folder podmans=':container user:'
    id=$(id -u)
    if getent passwd "$id" | grep -qv "$podmans"; then return 0; fi
    export HOME=/tmp/home-$id
    mkdir -p "$HOME"
    folder=$(mktemp -d /tmp/.hvdtrain-user.XXXXXX)
    { grep -v "$podmans" /etc/passwd; echo "user$id:x:$id:$(id -g)::$HOME:/bin/bash"; } >"$folder/passwd"
    cp /etc/group "$folder/group"
    export USER=user$id LD_PRELOAD=libnss_wrapper.so
    export NSS_WRAPPER_PASSWD=$folder/passwd NSS_WRAPPER_GROUP=$folder/group
}

make_keys() {
    local new
    [ ! -e "$keys/id_ed25519" ] || return 0
    [ -w "$keys" ] || fail "$keys is not writable for user $(id -u): mount a folder or a volume that is"
    umask 077
    # The keys are complete or absent: the private key, which marks them as complete, is moved last.
    new=$(mktemp -d "$keys/.new.XXXXXX")
    ssh-keygen -q -t ed25519 -N '' -C hvdtrain -f "$new/id_ed25519"
    ssh-keygen -q -t ed25519 -N '' -C hvdtrain -f "$new/ssh_host_ed25519_key"
    cp "$new/id_ed25519.pub" "$new/authorized_keys"
    # One host key for all containers of the job, under any name and port.
    echo "* $(cut -d ' ' -f 1,2 "$new/ssh_host_ed25519_key.pub")" >"$new/known_hosts"
    mv "$new"/ssh_host_* "$new/authorized_keys" "$new/known_hosts" "$new/id_ed25519.pub" "$keys/"
    mv "$new/id_ed25519" "$keys/"
    rmdir "$new"
}

run_sshd() {
    umask 077
    mkdir -p "$server"
    if [ -r "$keys/authorized_keys" ]; then
        cp "$keys/authorized_keys" "$server/authorized_keys"
    elif [ -r "$keys/id_ed25519.pub" ]; then
        cp "$keys/id_ed25519.pub" "$server/authorized_keys"
    else
        fail "no key may log in: user $(id -u) finds no readable authorized_keys or id_ed25519.pub in $keys; mount the folder of the job's keys there"
    fi
    # Copies: sshd accepts only key files that its user owns and nobody else can read.
    rm -f "$server/host_key"
    if [ -r "$keys/ssh_host_ed25519_key" ]; then
        cp "$keys/ssh_host_ed25519_key" "$server/host_key"
    else
        ssh-keygen -q -t ed25519 -N '' -C hvdtrain -f "$server/host_key"
    fi
    # A login starts with an empty environment. It gets the variables that programs need to start, and no secrets.
    local setting=PATH=$PATH name
    for name in LD_LIBRARY_PATH LD_PRELOAD NSS_WRAPPER_PASSWD NSS_WRAPPER_GROUP; do
        [ -z "${!name:-}" ] || setting+=" $name=${!name}"
    done
    cat >"$server/config" <<END
Port $port
HostKey $server/host_key
PidFile $server/pid
AuthorizedKeysFile $server/authorized_keys
StrictModes no
PubkeyAuthentication yes
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
AllowUsers $(id -un)
UsePAM no
AllowTcpForwarding no
AllowAgentForwarding no
X11Forwarding no
PrintMotd no
MaxStartups 200
MaxSessions 200
ClientAliveInterval 10
ClientAliveCountMax 3
SetEnv $setting
END
    [ "$(id -u)" != 0 ] || mkdir -p /run/sshd
    start /usr/sbin/sshd -D -e -f "$server/config"
}

check_health() {
    local banner
    [ -e "$server/config" ] || return 0 # no server was asked for
    exec 3<>"/dev/tcp/127.0.0.1/$port" || return 1
    read -r -t 3 banner <&3
    [[ $banner = SSH-* ]]
}

# As the container's first process, run under tini, which forwards signals and reaps orphans.
start() {
    if [ $$ = 1 ]; then
        exec tini -- "$@"
    else
        exec "$@"
    fi
}

case ${1:-} in
    health) check_health ;;
    keys) give_user_a_name; make_keys ;;
    sshd) give_user_a_name; run_sshd ;;
    '') fail 'no command' ;;
    *) give_user_a_name; start "$@" ;;
esac
