# A node: containerd, kubelet, kube-proxy, and the links between them. Sourced by `up`, and by `second`, which replaces
# the names and ranges of common.bash.

NODE_PACKAGES="containerd runc containernetworking-plugins iptables nftables iproute2"

prepare_node() {
  local command
  for command in containerd runc iptables nft ip; do
    has "$command" || { apt_install $NODE_PACKAGES; break; }
  done
  for command in containerd ctr runc iptables nft ip; do
    has "$command" || cannot "$command is missing: on Debian, apt-get install $NODE_PACKAGES"
  done
  cni=$(cni_folder) || { apt_install containernetworking-plugins && cni=$(cni_folder); } ||
    cannot "the CNI plugins are missing: on Debian, apt-get install containernetworking-plugins"
  modprobe -a overlay br_netfilter veth bridge 2> /dev/null
  grep -qw overlay /proc/filesystems || cannot "this kernel has no overlay filesystem"
  [ -e /proc/sys/net/bridge/bridge-nf-call-iptables ] || cannot "this kernel has no br_netfilter"
  nft list tables > /dev/null 2>&1 || cannot "this kernel has no nf_tables, or these are not root's full rights"
  ! port_is_taken 10250 || die "another kubelet is running on this machine (port 10250)"
  share_network_namespaces
}

# `ip netns add` does this at its first use. While Pods run, that would mount their namespaces a second time, and
# containerd could never remove them: their Pods would stay Terminating.
share_network_namespaces() {
  mkdir -p /run/netns
  mountpoint -q /run/netns || mount --bind /run/netns /run/netns
  mount --make-shared /run/netns
}

cni_folder() {
  local folder
  for folder in /usr/lib/cni /opt/cni/bin /usr/libexec/cni; do
    [ ! -x "$folder/bridge" ] || { echo "$folder"; return; }
  done
  return 1
}

start_containerd() {
  run_containerd
  local image
  for image in pause coredns; do
    [ "$run/$image.tar" -nt "$bin/$image" ] ||
      "$here/image" "$run/$image.tar" "localhost/$image:dev" "/$image" "$bin/$image=/$image" > /dev/null || die "cannot pack $image"
    "$here/load" "$run/$image.tar" || exit
  done
}

run_containerd() {
  mkdir -p "$node_dir/containerd" "$node_dir/cni"
  write_containerd_config > "$node_dir/containerd/config.toml"
  write_network_config > "$node_dir/cni/10-pods.conflist"
  start "containerd$SUFFIX" containerd --config "$node_dir/containerd/config.toml"
  await "containerd to answer" "containerd$SUFFIX" 30 containerd_ctl version
}

# ARGUMENTS: more of them, for the kubelet.
start_kubelet() {
  write_kubelet_config > "$node_dir/kubelet.yaml"
  start "kubelet$SUFFIX" "$bin/kubelet" --config "$node_dir/kubelet.yaml" --kubeconfig "$run/pki/node$SUFFIX.kubeconfig" \
    --hostname-override "$NODE_NAME" --node-ip "$NODE_IP" --root-dir "$node_dir/kubelet" --cert-dir "$node_dir/kubelet/pki" "$@"
}

start_node() {
  start_kubelet
  start proxy "$bin/kube-proxy" --kubeconfig "$run/pki/proxy.kubeconfig" --hostname-override "$NODE_NAME" \
    --proxy-mode nftables --cluster-cidr "$POD_RANGE" --conntrack-max-per-core 0 --healthz-bind-address 127.0.0.1:10256
}

# Adds the node's address, and a route for Pods through a machine that forwards nothing by default, as after Docker's
# setup.
link_node() {
  ip link add "$NODE_LINK" type bridge && ip address add "$NODE_IP/32" dev "$NODE_LINK" && ip link set "$NODE_LINK" up ||
    die "cannot create the link $NODE_LINK"
  echo 1 > /proc/sys/net/ipv4/ip_forward
  echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables
  accept_forwarded
}

accept_forwarded() {
  iptables -w -I FORWARD -i "$POD_BRIDGE" -j ACCEPT
  iptables -w -I FORWARD -o "$POD_BRIDGE" -j ACCEPT
}

# CAP_SYS_RESOURCE, which lowering oom_score_adj would need, may be missing.
write_containerd_config() {
  cat << END
version = 2
root = "$node_dir/containerd/root"
state = "$node_dir/containerd/state"
[grpc]
  address = "$containerd_socket"
[plugins."io.containerd.internal.v1.opt"]
  path = "$node_dir/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:dev"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "$cni"
    conf_dir = "$node_dir/cni"
END
}

write_network_config() {
  cat << END
{"cniVersion": "0.4.0", "name": "$NETWORK", "plugins": [
  {"type": "bridge", "bridge": "$POD_BRIDGE", "isGateway": true, "ipMasq": true, "hairpinMode": true,
   "ipam": {"type": "host-local", "dataDir": "$node_dir/cni/leases", "ranges": [[{"subnet": "$POD_RANGE"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}
]}
END
}

# Accepts control groups of version 1, swap, and full disks. Pods are short-lived, so images are not removed.
write_kubelet_config() {
  cat << END
kind: KubeletConfiguration
apiVersion: kubelet.config.k8s.io/v1beta1
address: $NODE_IP
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $run/pki/ca.crt}}
authorization: {mode: Webhook}
tlsCertFile: $run/pki/node$SUFFIX.crt
tlsPrivateKeyFile: $run/pki/node$SUFFIX.key
containerRuntimeEndpoint: unix://$containerd_socket
podLogsDir: $node_dir/logs/pods
volumePluginDir: $node_dir/kubelet/plugins
clusterDNS: [$DNS_SERVICE_IP]
clusterDomain: cluster.local
resolvConf: ""
serializeImagePulls: false
imageGCHighThresholdPercent: 100
evictionHard: {}
cgroupDriver: cgroupfs
cgroupRoot: ${cgroup:-/}
healthzBindAddress: $NODE_IP
failCgroupV1: false
failSwapOn: false
enforceNodeAllocatable: []
oomScoreAdj: 0
END
}
