{{- /* include "modelrelay.demo.job" (list . "apply" "post-install,post-upgrade"): runs `modelrelay-operator apply`. */ -}}
{{- define "modelrelay.demo.job" -}}
{{- $root := index . 0 }}
{{- $command := index . 1 }}
{{- $demo := printf "%s-demo" (include "modelrelay.fullname" $root) -}}
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ $demo }}-{{ $command }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "modelrelay.demo.labels" $root | nindent 4 }}
  annotations:
    helm.sh/hook: {{ index . 2 }}
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
spec:
  backoffLimit: 2
  # By default, Helm waits five minutes for hooks.
  activeDeadlineSeconds: 280
  template:
    metadata:
      labels:
        {{- include "modelrelay.demo.labels" $root | nindent 8 }}
    spec:
      restartPolicy: Never
      serviceAccountName: {{ $demo }}
      automountServiceAccountToken: true
      enableServiceLinks: false
      {{- with $root.Values.imagePullSecrets }}
      imagePullSecrets:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $root.Values.operator.nodeSelector }}
      nodeSelector:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $root.Values.operator.tolerations }}
      tolerations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- include "modelrelay.podSecurityContext" $root | nindent 8 }}
      containers:
        - name: {{ $command }}
          image: {{ include "modelrelay.image" (list $root "operator") }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          args: [{{ $command }}, --file, /demo/resources.yaml, --timeout, 2m]
          resources:
            requests: {cpu: 10m, memory: 16Mi}
            limits: {memory: 128Mi}
          securityContext:
            {{- include "modelrelay.securityContext" $root | nindent 12 }}
          volumeMounts:
            - {name: resources, mountPath: /demo, readOnly: true}
      volumes:
        - name: resources
          configMap: {name: {{ $demo }}}
{{- end }}
