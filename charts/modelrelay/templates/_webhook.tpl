{{- define "modelrelay.webhookClient" -}}
admissionReviewVersions: [v1]
clientConfig:
  service:
    namespace: {{ .Release.Namespace }}
    name: {{ include "modelrelay.operator" . }}
    path: /mutate-pods
    port: 443
rules:
  - apiGroups: [""]
    apiVersions: [v1]
    operations: [CREATE]
    resources: [pods]
    scope: Namespaced
{{- end }}
{{- define "modelrelay.webhookPolicy" -}}
matchConditions:
  # The mirror of a static Pod: the kubelet runs the file and ignores changes to the mirror.
  - name: not-a-mirror-pod
    expression: "!has(object.metadata.annotations) || !('kubernetes.io/config.mirror' in object.metadata.annotations)"
  # Pods of a pool with a template already contain their worker, so that they start without the operator. A container
  # with only its name is another program, and the operator refuses such a Pod.
  - name: no-worker-yet
    expression: >-
      !object.spec.containers.exists(c, c.name == 'modelrelay-worker' && has(c.env) &&
      c.env.exists(e, e.name == 'WORKER_CONFIG' && has(e.value) && e.value == '/etc/modelrelay/config/worker.yaml')) &&
      (!has(object.spec.initContainers) ||
      !object.spec.initContainers.exists(c, c.name == 'modelrelay-worker' && has(c.env) &&
      c.env.exists(e, e.name == 'WORKER_CONFIG' && has(e.value) && e.value == '/etc/modelrelay/config/worker.yaml')))
failurePolicy: {{ .Values.webhook.failurePolicy }}
matchPolicy: Equivalent
# Called again if a later webhook changed a Pod without a worker; Pods with a worker are not sent again.
reinvocationPolicy: IfNeeded
sideEffects: None
timeoutSeconds: 5
{{- end }}
