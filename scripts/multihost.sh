#!/usr/bin/env bash
# Run a command on each of N hosts that this one Linux machine plays: network namespaces with names and addresses of
# their own (host0 is 10.77.0.1, ...), each with one link, eth0, to a switch. Needs root.
#
#   scripts/multihost.sh --hosts 4 --rate 200mbit recipes/launch/torchrun.sh recipes/pretrain.py --training.device cpu
#
#   --hosts N          how many (2)
#   --rate RATE        what each link carries each way, as tc writes it: 200mbit; without it nothing limits them.
#                      Up to about 1gbit, because the bucket of the limit holds 256 KiB.
#   --timeout SECONDS  when to give up, with status 124 (600)
#
# The command finds NODE_RANK in its environment, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, and, where they are not set
# already, what recipes/launch/torchrun.sh takes. The first host that fails ends the others, and its status is this
# script's. Nothing stays behind, whatever happens, and what crossed every interface is told at the end.
set -euo pipefail

fail() { echo "multihost.sh: $*" >&2; exit 2; }
of_option() { [ $# -ge 2 ] || fail "$1 needs a value"; echo "$2"; }

hosts=2 rate='' limit=600
while [ $# -gt 0 ]; do
    case $1 in
    --hosts) hosts=$(of_option "$@"); shift 2 ;;
    --rate) rate=$(of_option "$@"); shift 2 ;;
    --timeout) limit=$(of_option "$@"); shift 2 ;;
    --) shift; break ;;
    -*) fail "unknown option $1; it takes --hosts N, --rate RATE and --timeout SECONDS, then a command" ;;
    *) break ;;
    esac
done
[ $# -gt 0 ] || fail "no command to run on the hosts"
[[ $hosts =~ ^[0-9]+$ ]] && [ "$hosts" -ge 1 ] && [ "$hosts" -le 200 ] || fail "--hosts $hosts: from 1 to 200"
[[ $limit =~ ^[0-9]+$ ]] || fail "--timeout $limit: whole seconds"
[ "$(id -u)" = 0 ] || fail "network namespaces need root: run it with sudo -E"
for tool in ip tc unshare; do
    command -v $tool >/dev/null || fail "$tool is not there. On Debian and Ubuntu: apt install iproute2 util-linux"
done

run=f8sub-$$
switch=$run-switch
made=() running=() watchdog=''
folder=$(mktemp -d)

host() { echo "$run-host$1"; }

pids_of_hosts() {
    local name
    for name in "${made[@]}"; do ip netns pids "$name"; done
}

# SIGTERM, once, to every process in the namespaces of this run, and SIGKILL to what is there 10 seconds later.
stop_hosts() {
    local begun=$SECONDS pid pids
    local -A told=()
    while pids=$(pids_of_hosts) && [ -n "$pids" ] && [ $((SECONDS - begun)) -lt 20 ]; do
        for pid in $pids; do
            # One that has ended meanwhile is no error.
            if [ $((SECONDS - begun)) -ge 10 ]; then
                kill -KILL "$pid" 2>/dev/null || true
            elif [ -z "${told[$pid]:-}" ]; then
                told[$pid]=yes
                kill -TERM "$pid" 2>/dev/null || true
            fi
        done
        sleep 0.1
    done
    [ -z "$pids" ]
}

tear_down() {
    trap '' INT TERM
    if stop_hosts; then
        wait "${running[@]}" 2>/dev/null || true  # for the last of their output
    fi
    if [ -n "$watchdog" ]; then kill "$watchdog" 2>/dev/null || true; fi
    # With a namespace go its ends of the links, and with one end the other.
    for name in "${made[@]}"; do ip netns delete "$name"; done
    rm -rf "$folder"
}
trap tear_down EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

add_namespace() {
    [ ! -e "/run/netns/$1" ] || fail "the namespace $1 exists already and is not of this run"
    made+=("$1")
    ip netns add "$1" || { unset 'made[-1]'; fail "this machine allows no network namespaces (ip netns add failed)"; }
    ip -n "$1" link set lo up
}

limit_link() {  # namespace, interface
    [ -z "$rate" ] || tc -n "$1" qdisc add dev "$2" root tbf rate "$rate" burst 256kb latency 400ms
}

connect() {  # host index
    local name
    name=$(host "$1")
    add_namespace "$name"
    ip -n "$switch" link add "port$1" type veth peer name eth0 netns "$name"
    ip -n "$switch" link set "port$1" master bridge up
    ip -n "$name" address add "10.77.0.$(($1 + 1))/24" dev eth0
    ip -n "$name" link set eth0 up
    limit_link "$name" eth0
    limit_link "$switch" "port$1"
    echo "10.77.0.$(($1 + 1)) host$1" >>"$folder/hosts"
}

on_host() {  # host index, command
    local index=$1
    shift
    NODE_RANK=$index NNODES=${NNODES:-$hosts} NPROC_PER_NODE=${NPROC_PER_NODE:-1} \
        RDZV_ENDPOINT=${RDZV_ENDPOINT:-host0:29500} GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0 \
        ip netns exec "$(host "$index")" unshare --uts bash -c '
            echo "host$NODE_RANK" >/proc/sys/kernel/hostname
            mount --bind "$0/hosts" /etc/hosts  # in the mount namespace that ip netns exec made
            exec "$@"' "$folder" "$@" </dev/null 2>&1 | sed -u "s/^/host$index  /"
}

tell_counters() {
    local index
    for ((index = 0; index < hosts; index++)); do
        ip netns exec "$(host "$index")" bash -c 'cd /sys/class/net/eth0/statistics
            echo "host$0  eth0 sent $(<tx_bytes) bytes, received $(<rx_bytes) bytes" >&2' "$index"
    done
}

echo "127.0.0.1 localhost" >"$folder/hosts"
add_namespace "$switch"
ip -n "$switch" link add bridge type bridge
ip -n "$switch" link set bridge up
for ((index = 0; index < hosts; index++)); do connect "$index"; done

sleep "$limit" &
watchdog=$!
declare -A index_of
for ((index = 0; index < hosts; index++)); do
    on_host "$index" "$@" 2>/dev/null &  # what the command writes goes through on_host's pipe
    running+=($!)
    index_of[$!]=$index
done
while [ ${#index_of[@]} -gt 0 ]; do
    status=0
    wait -n -p ended "${!index_of[@]}" "$watchdog" || status=$?
    if [ "$ended" = "$watchdog" ]; then
        watchdog=''
        echo "multihost.sh: gave up after $limit seconds" >&2
        exit 124
    fi
    if [ $status != 0 ]; then
        echo "multihost.sh: host${index_of[$ended]} ended with status $status" >&2
        exit $status
    fi
    unset "index_of[$ended]"
done
tell_counters
