{{- /* The operator's rights in the namespaces of its Providers and WorkerPools, for both the ClusterRole and the Roles. */ -}}
{{- define "modelrelay.rules" -}}
{{- /* Required for setting owner references, and used for nothing else. */ -}}
{{- $delete := ternary ", delete" "" (or .Values.rbac.ownerReferences (eq (include "modelrelay.openshift" .) "true")) -}}
# The resources that users write: reads them, and annotates them when they have been handled.
- apiGroups: [modelrelay.io]
  resources: [providers, workerpools]
  verbs: [get, list, watch, patch]
# The status of these resources.
- apiGroups: [modelrelay.io]
  resources: [providers/status, workerpools/status]
  verbs: [get, patch, update]
# spec.scaling: sets replicas by queue and load.
- apiGroups: [modelrelay.io]
  resources: [workerpools/scale]
  verbs: [get, patch]
# Configuration and secrets of relays and workers, and users' Secrets that a Provider names. `update` only because the
# operator grants it to a relay for its API-key Secret.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, list, watch, create, patch, update{{ $delete }}]
# worker.yaml of each pool; Services and ServiceAccounts of relays and workers.
- apiGroups: [""]
  resources: [configmaps, services, serviceaccounts]
  verbs: [get, list, watch, create, patch{{ $delete }}]
{{- if .Values.rbac.scaleDeployments }}
# scaling.targetRef: sets the replicas of workloads of other owners. Those of Deployments are also granted to workers whose pool names
# Deployments, and the operator itself scales Deployments to 0 that such a pool no longer names. Workers also get the rights to list and
# watch Pods, below.
- apiGroups: [apps]
  resources: [deployments/scale, statefulsets/scale]
  verbs: [get, patch]
{{- end }}
# Reads whether the cluster assigns user ids to the Pods of a namespace (OpenShift).
- apiGroups: [""]
  resources: [namespaces]
  verbs: [get]
# Counts Pods, annotates them so that the kubelet updates configuration at once and the idlest Pod is deleted first, and deletes
# gated Pods.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, patch, delete]
# Publishes Events.
- apiGroups: ["", events.k8s.io]
  resources: [events]
  verbs: [create, patch]
# Workloads of relays, pools with a template, and standalone workers.
- apiGroups: [apps]
  resources: [deployments, daemonsets]
  verbs: [get, list, watch, create, patch{{ $delete }}]
# Limits node drains to one relay at a time.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch{{ $delete }}]
# Restricts access to the relays' worker and admin ports. Deleted if a Provider disables its NetworkPolicy.
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
# Grants a relay access to its API-key Secret; deleted if the Provider requires no keys. The operator cannot grant rights that it
# does not have, so this extends no further than the rules above.
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
