# What the scripts of this folder share: where things are, how processes are started and ended, how a script gives up.
# Sourced, never run.

set -u -o pipefail

KUBERNETES=1.36.3
CANNOT_RUN=77 # what scripts/test takes for "this machine cannot", rather than for a failure

# A cluster of our own must not collide with what else a machine may run: nothing here is a customary name or range.
NODE_NAME=modelrelay
NODE_LINK=mr-node       # a link without a wire, so that nothing of the cluster listens on a real network
POD_BRIDGE=mr-pods
NETWORK=modelrelay      # the name that CNI files its leases under
NODE_IP=10.212.255.1
POD_RANGE=10.212.0.0/24
SERVICE_RANGE=10.213.0.0/16
API_SERVICE_IP=10.213.0.1
DNS_SERVICE_IP=10.213.0.10
NODE_MARK=/run/modelrelay-cluster # names the folder of the one cluster with a node on this machine

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../debian.bash"
cache=${XDG_CACHE_HOME:-$HOME/.cache}/modelrelay/cluster
sources=$(cat "$here"/go/*/* | sha256sum)
bin=$cache/$KUBERNETES-${sources:0:8}/bin

run=$(realpath -m "${MODELRELAY_CLUSTER_DIR:-$cache/run}")
port=${MODELRELAY_CLUSTER_PORT:-6443}
etcd_port=$((port + 1))
etcd_peer_port=$((port + 2))
controllers_port=$((port + 3))
scheduler_port=$((port + 4))
containerd_socket=$run/containerd/containerd.sock

say() { printf 'cluster: %s\n' "$*"; }

die() {
  printf 'cluster: %s\n' "$*" >&2
  exit 1
}

# The machine lacks something that no script can change.
cannot() {
  printf 'cannot run: %s\n' "$*" >&2
  exit "$CANNOT_RUN"
}

# Starts `command...` in the background as NAME, apart from this terminal: Ctrl-C is for the script, not for the cluster.
start() {
  local name=$1
  shift
  mkdir -p "$run/pids" "$run/commands" "$run/logs"
  printf '%q ' "$@" > "$run/commands/$name"
  setsid "$@" >> "$run/logs/$name.log" 2>&1 < /dev/null &
  echo "$! $(birth_of "$!")" > "$run/pids/$name"
}

# Whether the process that was started as NAME, in the folder of this cluster or of another, still runs.
is_alive() {
  local pid birth
  read -r pid birth 2> /dev/null < "${2:-$run}/pids/$1" || return 1
  [ -n "$birth" ] && [ "$(birth_of "$pid")" = "$birth" ]
}

# Ends NAME at once: a throw-away cluster has nothing to put in order, and an API server takes ten seconds over it.
stop() {
  local pid
  if is_alive "$1"; then
    read -r pid _ < "$run/pids/$1"
    kill -KILL "$pid" 2> /dev/null
    while is_alive "$1"; do sleep 0.05; done
  fi
  rm -f "$run/pids/$1"
}

# When a process began, in the kernel's ticks: a number that a later process of the same id does not have. Nothing for one
# that has ended, though its parent may not have noticed.
birth_of() {
  local stat
  read -r stat 2> /dev/null < "/proc/$1/stat" || return 0
  set -- ${stat##*) }
  case $1 in Z | X) ;; *) echo "${20}" ;; esac
}

# Asks until `command...` succeeds; after SECONDS the script fails with what it waited for and the end of NAME's log.
await() {
  local what=$1 name=$2 seconds=$3 end
  shift 3
  end=$((SECONDS + seconds))
  until "$@" > /dev/null 2>&1; do
    is_alive "$name" || give_up "$name ended by itself" "$name"
    [ $SECONDS -lt $end ] || give_up "waited $seconds s in vain for $what" "$name"
    sleep 0.1
  done
}

give_up() {
  tail -n 20 "$run/logs/$2.log" >&2
  die "$1; above is the end of its log ($run/logs/$2.log)"
}

kube() { "$bin/kubectl" --kubeconfig "$run/admin.kubeconfig" "$@"; }

containerd_ctl() { ctr -a "$containerd_socket" -n k8s.io "$@"; }

# PORT [ADDRESS]
port_is_taken() { (exec 3<> "/dev/tcp/${2:-127.0.0.1}/$1") 2> /dev/null; }
