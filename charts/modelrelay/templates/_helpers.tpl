{{- define "modelrelay.chart" -}}
{{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- /* Truncated so that the longest name derived from it, <fullname>-operator-defaults, has at most the 63 characters of a Service's name. */ -}}
{{- define "modelrelay.fullname" -}}
{{- $chart := .Values.nameOverride | default .Chart.Name -}}
{{- $name := .Values.fullnameOverride | default (contains $chart .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $chart)) -}}
{{ $name | trunc 45 | trimSuffix "-" }}
{{- end }}

{{- define "modelrelay.operator" -}}
{{ include "modelrelay.fullname" . }}-operator
{{- end }}

{{- /* For cluster-wide objects: releases with the same name in two namespaces must not conflict. */ -}}
{{- define "modelrelay.clusterName" -}}
{{ include "modelrelay.fullname" . }}-operator.{{ .Release.Namespace }}
{{- end }}

{{- define "modelrelay.selector" -}}
app.kubernetes.io/name: modelrelay
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- /* IP versions of the operator's Services; empty with the cluster's defaults. */ -}}
{{- define "modelrelay.ipFamilies" -}}
{{- with .Values.service.ipFamilyPolicy }}
ipFamilyPolicy: {{ . }}
{{- end }}
{{- with .Values.service.ipFamilies }}
ipFamilies: {{ toJson . }}
{{- end }}
{{- end }}

{{- define "modelrelay.commonLabels" -}}
app.kubernetes.io/name: modelrelay
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: modelrelay
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ include "modelrelay.chart" . }}
{{- include "modelrelay.extraLabels" . }}
{{- end }}

{{- /* The user's labels, each after a line break, without those that the chart sets. */ -}}
{{- define "modelrelay.extraLabels" -}}
{{- range $key, $value := .Values.commonLabels }}
{{- if not (or (hasPrefix "app.kubernetes.io/" $key) (hasPrefix "helm.sh/" $key)) }}
{{ $key }}: {{ $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "modelrelay.labels" -}}
{{ include "modelrelay.commonLabels" . }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "modelrelay.demo.labels" -}}
{{ include "modelrelay.commonLabels" . }}
app.kubernetes.io/component: demo
{{- end }}

{{- /* include "modelrelay.image" (list . "relay"): the program's own image, or the one derived from `image`. */ -}}
{{- define "modelrelay.image" -}}
{{- $root := index . 0 -}}
{{- $program := index . 1 -}}
{{- $image := $root.Values.image -}}
{{- $digest := ternary "" (get (default dict $image.digests) $program) (ne $image.tag "") -}}
{{ (index $root.Values $program).image | default (printf "%s/modelrelay-%s:%s%s" (trimSuffix "/" $image.registry) $program ($image.tag | default $root.Chart.AppVersion) (ternary (print "@" $digest) "" (ne $digest ""))) }}
{{- end }}

{{- define "modelrelay.certificateSecret" -}}
{{ .Values.webhook.existingSecret | default (printf "%s-webhook-certificate" (include "modelrelay.fullname" .)) }}
{{- end }}

{{- /* "true" if the webhook's certificate is managed externally. */ -}}
{{- define "modelrelay.externalCertificates" -}}
{{ if or .Values.webhook.certManager.enabled .Values.webhook.existingSecret }}true{{ end }}
{{- end }}

{{- /* The requirements of the `restricted` Pod security level for Pods and containers, and more. */ -}}
{{- define "modelrelay.podSecurityContext" -}}
runAsNonRoot: true
{{- if not (include "modelrelay.openshift" .) }}
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- /* "true" if the cluster is OpenShift, which assigns user and group ids, and rejects Pods that request others. */ -}}
{{- define "modelrelay.openshift" -}}
{{- $enabled := toString .Values.openshift.enabled -}}
{{ if or (eq $enabled "true") (and (eq $enabled "auto") (.Capabilities.APIVersions.Has "security.openshift.io/v1")) }}true{{ end }}
{{- end }}

{{- define "modelrelay.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- /* Defaults for Providers and WorkerPools; empty settings are omitted. */ -}}
{{- define "modelrelay.workerTokens" -}}
{{- if and .Values.rbac.workerTokens (or (not .Values.watchNamespaces) .Values.webhook.enabled) }}true{{ end -}}
{{- end }}

{{- define "modelrelay.defaults" -}}
{{- range $program := list "relay" "worker" }}
{{ $program }}:
  image: {{ include "modelrelay.image" (list $ $program) }}
  imagePullPolicy: {{ $.Values.image.pullPolicy }}
  {{- with $.Values.imagePullSecrets }}
  imagePullSecrets: {{ toJson . }}
  {{- end }}
  {{- range $key, $value := omit (index $.Values $program) "image" }}
  {{- if $value }}
  {{ $key }}: {{ toJson $value }}
  {{- end }}
  {{- end }}
  {{- if include "modelrelay.openshift" $ }}
  omitIds: true
  {{- end }}
  {{- if and (eq $program "relay") (include "modelrelay.workerTokens" $) }}
  tokenReviewBinding: {{ include "modelrelay.clusterName" $ }}-token-reviews
  {{- end }}
{{- end }}
{{- end }}

{{- /*
Names of existing CRDs that do not belong to this release, one per line. `kubectl replace` removes Helm's ownership, so the operator's
Deployment records which ones the release contains.
*/ -}}
{{- define "modelrelay.crds.foreign" -}}
{{- $operator := lookup "apps/v1" "Deployment" .Release.Namespace (include "modelrelay.operator" .) }}
{{- $record := index (dig "metadata" "annotations" (dict) $operator | default dict) "modelrelay.io/definitions" | default "" }}
{{- range $path, $_ := .Files.Glob "files/crds/*.yaml" }}
{{- $name := ($.Files.Get $path | fromYaml).metadata.name }}
{{- $live := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" $name }}
{{- if $live }}
{{- $owner := dig "metadata" "annotations" (dict) $live | default dict }}
{{- $release := printf "%s/%s" (index $owner "meta.helm.sh/release-namespace") (index $owner "meta.helm.sh/release-name") }}
{{- $is_replaced := and (not (index $owner "meta.helm.sh/release-name")) (has $name (splitList "," $record)) }}
{{- if not (or $is_replaced (eq $release (printf "%s/%s" $.Release.Namespace $.Release.Name))) }}
{{ $name }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Names of the CRDs that this release contains, separated by commas. */ -}}
{{- define "modelrelay.crds.own" -}}
{{- $own := list }}
{{- $foreign := splitList "\n" (include "modelrelay.crds.foreign" .) }}
{{- range $path, $_ := .Files.Glob "files/crds/*.yaml" }}
{{- $name := ($.Files.Get $path | fromYaml).metadata.name }}
{{- if and $.Values.crds.install (not (has $name $foreign)) }}
{{- $own = append $own $name }}
{{- end }}
{{- end }}
{{- join "," $own }}
{{- end }}

{{- /* Names of existing CRDs that this release leaves out and Helm would not keep, one per line. */ -}}
{{- define "modelrelay.crds.unprotected" -}}
{{- $own := splitList "," (include "modelrelay.crds.own" .) }}
{{- range $path, $_ := .Files.Glob "files/crds/*.yaml" }}
{{- $name := ($.Files.Get $path | fromYaml).metadata.name }}
{{- $live := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" $name }}
{{- $policy := index (dig "metadata" "annotations" (dict) $live | default dict) "helm.sh/resource-policy" }}
{{- if and $live (ne $policy "keep") (not (has $name $own)) }}
{{ $name }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Rejects conflicting settings at installation, which would otherwise cause Pods that never start. */ -}}
{{- define "modelrelay.validate" -}}
{{- if and .Values.webhook.certManager.enabled .Values.webhook.existingSecret }}
{{- fail "webhook.certManager.enabled and webhook.existingSecret exclude each other: with cert-manager the chart determines the Secret's name" }}
{{- end }}
{{- if and .Values.demo.enabled .Values.watchNamespaces (not (has .Release.Namespace .Values.watchNamespaces)) }}
{{- fail (printf "demo.enabled creates a Provider in namespace %s: add it to watchNamespaces" .Release.Namespace) }}
{{- end }}
{{- if and .Values.webhook.enabled (eq (int .Values.webhook.port) (int .Values.operator.port)) }}
{{- fail (printf "webhook.port and operator.port are both %d: change one of them" (int .Values.webhook.port)) }}
{{- end }}
{{- end }}
