{{- define "operator.name" -}}
{{- ternary .Release.Name (printf "%s-pdproxy-operator" .Release.Name) (contains "pdproxy-operator" .Release.Name) | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- /* The name of what is the whole cluster's: releases of two namespaces may have one name. */ -}}
{{- define "operator.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "operator.name" .) }}
{{- end }}

{{- define "operator.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (ternary (include "operator.name" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{- define "operator.selector" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "operator.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/name: pdproxy-operator
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* What the operator does in the namespaces that it works on, and no more. Each part has the reason. */ -}}
{{- define "operator.rules" -}}
# What users ask for; replicas by autoscaling; what is said of it.
- apiGroups: [pdproxy.dev]
  resources: [pdruntimes, pdproxies]
  verbs: [list, watch]
- apiGroups: [pdproxy.dev]
  resources: [pdruntimes/scale, pdruntimes/status, pdproxies/status]
  verbs: [patch]
# Pods are made by others. The patch says which of them goes first. The proxies' roles have list and watch, and
# nobody may give what he has not.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch]
# Objects of the runtimes and proxies. Server-side apply is create and patch; before that the operator gets the
# object, since it may be somebody else's.
- apiGroups: [""]
  resources: [configmaps, services, serviceaccounts]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [apps]
  resources: [deployments/scale]
  verbs: [patch]
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets/scale]
  verbs: [patch]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [rolebindings, roles]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end }}
