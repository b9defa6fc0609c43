{{- /* What the operator may do where its Providers and WorkerPools are. One list for the ClusterRole and for Roles. */ -}}
{{- define "modelrelay.rules" -}}
{{- /* Asked for where an owner reference changes, and used for nothing else. */ -}}
{{- $delete := ternary ", delete" "" .Values.rbac.ownerReferences -}}
# What people write: read, and marked as dealt with.
- apiGroups: [modelrelay.io]
  resources: [providers, workerpools]
  verbs: [get, list, watch, patch]
# What the operator says about them.
- apiGroups: [modelrelay.io]
  resources: [providers/status, workerpools/status]
  verbs: [get, patch, update]
# spec.scaling: replicas from queue and load.
- apiGroups: [modelrelay.io]
  resources: [workerpools/scale]
  verbs: [get, patch]
# Configuration and secrets of relays and workers, and users' own ones that a Provider names. `update` only because the
# operator grants it to a relay on its one API-key Secret.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, list, watch, create, patch, update{{ $delete }}]
# worker.yaml of each pool; addresses and identities of relays and workers.
- apiGroups: [""]
  resources: [configmaps, services, serviceaccounts]
  verbs: [get, list, watch, create, patch{{ $delete }}]
{{- if .Values.rbac.scaleDeployments }}
# A worker that scales Deployments has the right to scale those that its pool names; the operator scales to 0 what its pool
# drops. Listing and watching Pods, which the worker is granted too, is below.
- apiGroups: [apps]
  resources: [deployments/scale]
  verbs: [get, patch]
{{- end }}
# Counts them, annotates them so that configuration arrives at once and the idlest goes first, deletes gated ones.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, patch, delete]
# Says what it did where `kubectl describe` shows it.
- apiGroups: ["", events.k8s.io]
  resources: [events]
  verbs: [create, patch]
# Relays, pools with a template, standalone workers.
- apiGroups: [apps]
  resources: [deployments, daemonsets]
  verbs: [get, list, watch, create, patch{{ $delete }}]
# A node drain takes one relay at a time.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch{{ $delete }}]
# Who reaches a relay's ports for workers and administration. Deleted where a Provider wants none.
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
# A relay's right to its own API-key Secret, deleted where keys are not asked for. Nobody can grant what they do not have, so this reaches no further than the above.
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
