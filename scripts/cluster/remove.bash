# Removes what a node leaves on the machine. Sourced by `down` and `second`.

# Kills all processes in the kubelet's control groups, and the shims that supervise them.
remove_pods() {
  local shims group
  # Two rounds: a shim starts a process to clean up after its container.
  for _ in 1 2; do
    for group in "/sys/fs/cgroup$cgroup/kubepods" /sys/fs/cgroup/*"$cgroup/kubepods"; do
      [ -d "$group" ] || continue
      find "$group" -name cgroup.procs -exec cat {} + 2> /dev/null | sort -u | xargs -r kill -KILL 2> /dev/null
    done
    shims=$(shims_of "$containerd_socket")
    [ -z "$shims" ] || kill -KILL $shims 2> /dev/null
    sleep 0.2
  done
}

shims_of() {
  local process
  for process in /proc/[0-9]*; do
    tr '\0' ' ' 2> /dev/null < "$process/cmdline" | grep -q "containerd-shim.* -address $1 " && echo "${process#/proc/}"
  done
}

# Deletes the network namespaces of this node's Pods, with their links: those with an address in its range; and its
# bridge.
remove_links() {
  local name
  for name in $(ip netns list 2> /dev/null | awk '/^cni-/ { print $1 }'); do
    ip -n "$name" -4 address show 2> /dev/null | grep -qF " ${POD_RANGE%.*}." && ip netns delete "$name"
  done
  ip link delete "$POD_BRIDGE" 2> /dev/null
}

# Undoes accept_forwarded.
forget_forwarded() {
  iptables -w -D FORWARD -i "$POD_BRIDGE" -j ACCEPT 2> /dev/null
  iptables -w -D FORWARD -o "$POD_BRIDGE" -j ACCEPT 2> /dev/null
}

remove_files() {
  local name mount
  forget_containers
  find /var/log/containers -maxdepth 1 -lname "$node_dir/*" -delete 2> /dev/null
  # The innermost first.
  for mount in $(awk -v dir="$node_dir/" 'index($2, dir) == 1 { print $2 }' /proc/self/mounts | sort -r); do
    umount "$mount" 2> /dev/null || umount -l "$mount"
  done
  for name in "/sys/fs/cgroup${cgroup:-/kubepods}" /sys/fs/cgroup/*"${cgroup:-/kubepods}"; do
    [ ! -d "$name" ] || find "$name" -depth -type d -exec rmdir {} + 2> /dev/null
  done
  return 0
}

# Removes what containerd and the CNI library write outside the folders that they were given.
forget_containers() {
  local file id
  for file in "$node_dir"/containerd/state/io.containerd.runtime.v2.task/k8s.io/*/address; do
    [ -f "$file" ] || continue
    id=$(basename "$(dirname "$file")")
    rm -rf "$(sed 's#^unix://##' "$file")" "/run/containerd/runc/k8s.io/$id"
  done
  for file in "/var/lib/cni/results/$NETWORK-"*-eth0; do
    [ -f "$file" ] || continue
    id=${file##*/$NETWORK-}
    rm -f "$file" "/var/lib/cni/results/cni-loopback-${id%-eth0}-lo"
  done
}
