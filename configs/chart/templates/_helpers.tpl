{{- define "pdproxy.name" -}}
{{- /* A Service's name has 63 letters at most, and one has "-replicas" behind this name. */ -}}
{{- ternary .Release.Name (printf "%s-pdproxy" .Release.Name) (contains "pdproxy" .Release.Name) | trunc 54 | trimSuffix "-" }}
{{- end }}

{{- /* The bound of a PodDisruptionBudget: minAvailable, or else maxUnavailable. */ -}}
{{- define "pdproxy.budget" -}}
{{- if kindIs "invalid" .minAvailable }}
maxUnavailable: {{ .maxUnavailable }}
{{- else }}
minAvailable: {{ .minAvailable }}
{{- end }}
{{- end }}

{{- define "pdproxy.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (ternary (include "pdproxy.name" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{- /* repository@digest, or repository:tag. Of an image of the values, and the tag in place of none. */ -}}
{{- define "pdproxy.image" -}}
{{- $image := index . 0 }}
{{- if $image.digest }}{{ $image.repository }}@{{ $image.digest }}{{ else }}{{ $image.repository }}:{{ $image.tag | default (index . 1) }}{{ end }}
{{- end }}

{{- /* What selects the pods of a component; of all engines of the release with `engine`. */ -}}
{{- define "pdproxy.selector" -}}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "pdproxy.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/name: pdproxy
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* `changes` over `base`, mappings key by key. Sprig's own merges take false, 0 and "" for nothing. */ -}}
{{- define "pdproxy.merged" -}}
{{- $merged := deepCopy (index . 0) }}
{{- range $key, $value := index . 1 }}
{{- $before := get $merged $key }}
{{- if and (kindIs "map" $before) (kindIs "map" $value) }}
{{- $value = include "pdproxy.merged" (list $before $value) | fromJson }}
{{- end }}
{{- $_ := set $merged $key $value }}
{{- end }}
{{- toJson $merged }}
{{- end }}

{{- /* A model's name as the value of a label. */ -}}
{{- define "pdproxy.modelLabel" -}}
{{- regexReplaceAll "[^A-Za-z0-9_.-]+" . "-" | trunc 63 | trimAll "-_." }}
{{- end }}
