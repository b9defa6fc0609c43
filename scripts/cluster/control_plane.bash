# The control plane: etcd, API server, controller manager, scheduler. Sourced by `up`.

CONTROL_PLANE_PROGRAMS="kube-apiserver kube-controller-manager kube-scheduler kubectl"

# ADDRESS: where the API server listens. No part of a throw-away cluster belongs on a real network.
prepare_control_plane() {
  has etcd || apt_install etcd-server
  has etcd || cannot "etcd is missing: on Debian, apt-get install etcd-server"
  local taken
  for taken in "$port" "$etcd_port" "$etcd_peer_port" "$controllers_port" "$scheduler_port"; do
    ! port_is_taken "$taken" && ! port_is_taken "$taken" "$1" || die "port $taken is in use, possibly by another cluster; MODELRELAY_CLUSTER_PORT selects other ports ($port to $((port + 4)))"
  done
  "$here/pki" "$1" || exit
}

# ADDRESS as above.
start_control_plane() {
  local client=http://127.0.0.1:$etcd_port peer=http://127.0.0.1:$etcd_peer_port
  # Nothing here outlives the machine, so nothing has to be synced to disk.
  start etcd etcd --data-dir "$run/etcd" --unsafe-no-fsync \
    --listen-client-urls "$client" --advertise-client-urls "$client" \
    --listen-peer-urls "$peer" --initial-advertise-peer-urls "$peer" --initial-cluster "default=$peer"
  start_api_server "$1"
  await "the API server to be ready" apiserver 120 kube get --raw /readyz
  start controllers "$bin/kube-controller-manager" --kubeconfig "$run/pki/controllers.kubeconfig" \
    --secure-port "$controllers_port" --bind-address 127.0.0.1 --leader-elect=false \
    --service-account-private-key-file "$run/pki/service-accounts.key" --root-ca-file "$run/pki/ca.crt" \
    --use-service-account-credentials --horizontal-pod-autoscaler-sync-period 3s
  start scheduler "$bin/kube-scheduler" --kubeconfig "$run/pki/scheduler.kubeconfig" \
    --secure-port "$scheduler_port" --bind-address 127.0.0.1 --leader-elect=false
}

start_api_server() {
  local pki=$run/pki publish=(--advertise-address "$1")
  # Pods cannot reach it here, and it requires an address other than the loopback one.
  [ "$1" != 127.0.0.1 ] || publish=(--advertise-address "$NODE_IP" --endpoint-reconciler-type none)
  cat > "$run/audit.yaml" << END
# Who among the Pods asked for what, and whether it was allowed: tests look for refusals.
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: Metadata, userGroups: ["system:serviceaccounts"]}
- {level: None}
END
  start apiserver "$bin/kube-apiserver" --bind-address "$1" "${publish[@]}" \
    --secure-port "$port" --etcd-servers "http://127.0.0.1:$etcd_port" \
    --tls-cert-file "$pki/apiserver.crt" --tls-private-key-file "$pki/apiserver.key" --client-ca-file "$pki/ca.crt" \
    --service-cluster-ip-range "$SERVICE_RANGE" --authorization-mode Node,RBAC --enable-admission-plugins NodeRestriction \
    --allow-privileged --audit-policy-file "$run/audit.yaml" --audit-log-path "$run/logs/audit.log" \
    --service-account-issuer https://kubernetes.default.svc --service-account-key-file "$pki/service-accounts.pub" \
    --service-account-signing-key-file "$pki/service-accounts.key" \
    --kubelet-client-certificate "$pki/admin.crt" --kubelet-client-key "$pki/admin.key" \
    --kubelet-certificate-authority "$pki/ca.crt" --kubelet-preferred-address-types InternalIP \
    --requestheader-client-ca-file "$pki/front-proxy-ca.crt" --requestheader-allowed-names front-proxy-client \
    --requestheader-extra-headers-prefix X-Remote-Extra- --requestheader-group-headers X-Remote-Group \
    --requestheader-username-headers X-Remote-User \
    --proxy-client-cert-file "$pki/front-proxy-client.crt" --proxy-client-key-file "$pki/front-proxy-client.key"
}
