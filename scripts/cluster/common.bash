# Shared by the scripts of this folder: paths, starting and stopping processes, failing. Sourced, never run.

set -u -o pipefail

KUBERNETES=1.36.3
CANNOT_RUN=77 # means "this machine cannot run it" to scripts/test, not a failure

# Our cluster must not collide with anything else on the machine: no customary name or address range is used here.
NODE_NAME=modelrelay
NODE_LINK=mr-node       # a link without a wire, so that no part of the cluster listens on a real network
POD_BRIDGE=mr-pods
NETWORK=modelrelay      # the name under which CNI stores its leases
NODE_IP=10.212.255.1
POD_RANGE=10.212.0.0/24
SERVICE_RANGE=10.213.0.0/16
API_SERVICE_IP=10.213.0.1
DNS_SERVICE_IP=10.213.0.10
NODE_MARK=/run/modelrelay-cluster # names the folder of the only cluster that has a node on this machine
SECOND_MARK=$NODE_MARK-second     # names the folder of the cluster that has the second node of this machine
SECOND_NAME=$NODE_NAME-2
SECOND_IP=10.212.255.2
SUFFIX=""  # of the names of a node's processes and certificates
cgroup=""  # the control group in which a kubelet creates those of its Pods; by default, the root

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
node_dir=$run
containerd_socket=$node_dir/containerd/containerd.sock

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

# Starts `command...` in the background as NAME, detached from this terminal: Ctrl-C is meant for the script, not for
# the cluster.
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

# Kills NAME: a throw-away cluster needs no clean shutdown, for which an API server would need ten seconds.
stop() {
  local pid
  if is_alive "$1"; then
    read -r pid _ < "$run/pids/$1"
    kill -KILL "$pid" 2> /dev/null
    while is_alive "$1"; do sleep 0.05; done
  fi
  rm -f "$run/pids/$1"
}

# Prints the start time of a process in the kernel's ticks, which differs for a later process with the same id. Prints
# nothing for a process that has ended, even if its parent has not noticed yet.
birth_of() {
  local stat
  read -r stat 2> /dev/null < "/proc/$1/stat" || return 0
  set -- ${stat##*) }
  case $1 in Z | X) ;; *) echo "${20}" ;; esac
}

# Retries `command...` until it succeeds. After SECONDS the script fails, and prints what it waited for and the end of
# NAME's log.
await() {
  local what=$1 name=$2 seconds=$3 end
  shift 3
  end=$((SECONDS + seconds))
  until "$@" > /dev/null 2>&1; do
    is_alive "$name" || give_up "$name exited unexpectedly" "$name"
    [ $SECONDS -lt $end ] || give_up "timed out after $seconds s waiting for $what" "$name"
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
