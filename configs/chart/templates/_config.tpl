{{- /* The settings of pdproxy: those of the values over those of the chart. */ -}}
{{- define "pdproxy.config" -}}
{{- $config := .Values.config }}
{{- $own := dict "listen" (dict "admin" "unix:/run/pdproxy/admin.sock") }}
{{- if not (hasKey $config "replicas") }}
{{- $_ := set $own "replicas" (dict "count" "auto" "name" (printf "%s-replicas" (include "pdproxy.name" .))) }}
{{- end }}
{{- $auth := dict }}
{{- if .Values.clientKeys.existingSecret }}
{{- $_ := set $auth "api_keys_file" (printf "/etc/pdproxy-keys/clients/%s" .Values.clientKeys.key) }}
{{- end }}
{{- if .Values.adminKeys.existingSecret }}
{{- $_ := set $auth "admin_keys_file" (printf "/etc/pdproxy-keys/admin/%s" .Values.adminKeys.key) }}
{{- end }}
{{- if .Values.engineKey.existingSecret }}
{{- $_ := set $auth "engine_api_key_file" (printf "/etc/pdproxy-keys/engines/%s" .Values.engineKey.key) }}
{{- end }}
{{- if $auth }}
{{- $_ := set $own "auth" $auth }}
{{- end }}
{{- if .Values.tls.existingSecret }}
{{- $_ := set $own.listen "tls" (dict "certificate" "/etc/pdproxy-tls/tls.crt" "key" "/etc/pdproxy-tls/tls.key") }}
{{- end }}
{{- $pools := include "pdproxy.pools" . | fromJson }}
{{- if not $pools.pools }}
{{- fail "no engines: set `engines` for those that the chart starts, or `config.pools` for those that are there already" }}
{{- end }}
{{- range $pools.pools }}
{{- range .nodes }}
{{- if regexMatch "^(podss?|inferencepools?)://" (lower .url) }}
{{- $_ := set $own "kubernetes" (dict "cache_file" "/run/pdproxy/pods.json") }}
{{- end }}
{{- end }}
{{- end }}
{{- $merged := include "pdproxy.merged" (list $own $config) | fromJson }}
{{- $_ := set $merged "pools" $pools.pools }}
{{- toJson $merged }}
{{- end }}

{{- /* The pools: those of the engines of the values, and those of `config`. Where both have one of a name, its
settings are those of `config`, and its engines are those of both. */ -}}
{{- define "pdproxy.pools" -}}
{{- $pools := list }}
{{- $by := dict }}
{{- range (include "pdproxy.engines" . | fromJson).engines }}
{{- if not (hasKey $by .pool) }}
{{- $pool := dict "name" .pool "connector" .connector "nodes" list }}
{{- $_ := set $by .pool $pool }}
{{- $pools = append $pools $pool }}
{{- end }}
{{- $pool := get $by .pool }}
{{- $selector := printf "app.kubernetes.io/instance=%s,app.kubernetes.io/component=%s" $.Release.Name .name }}
{{- $node := dict "url" (printf "pods://:8000/%s" $selector) "role" .role }}
{{- $facts := dict }}
{{- if gt (int .dataParallelSize) 1 }}
{{- $_ := set $facts "data_parallel_size" (int .dataParallelSize) }}
{{- end }}
{{- if not .simulated }}
{{- $_ := set $facts "tensor_parallel_size" (int .tensorParallelSize) }}
{{- end }}
{{- $args := .args }}
{{- range $fact := list "max_num_seqs" "max_num_batched_tokens" }}
{{- $flag := printf "--%s" ($fact | replace "_" "-") }}
{{- $before := "" }}
{{- range $args }}
{{- $word := toString . }}
{{- $value := ternary $word (trimPrefix (printf "%s=" $flag) $word) (eq $before $flag) }}
{{- if and (or (eq $before $flag) (ne $value $word)) (regexMatch "^[0-9]+$" $value) }}
{{- $_ := set $facts $fact (int $value) }}
{{- end }}
{{- $before = $word }}
{{- end }}
{{- end }}
{{- if $facts }}
{{- $_ := set $node "facts" $facts }}
{{- end }}
{{- $node = include "pdproxy.merged" (list $node .node) | fromJson }}
{{- $_ := set $pool "nodes" (append $pool.nodes $node) }}
{{- end }}
{{- range .Values.config.pools }}
{{- $before := get $by (.name | default "default") }}
{{- if $before }}
{{- $nodes := concat $before.nodes (.nodes | default list) }}
{{- range $key, $value := include "pdproxy.merged" (list $before .) | fromJson }}
{{- $_ := set $before $key $value }}
{{- end }}
{{- $_ := set $before "nodes" $nodes }}
{{- else }}
{{- $pools = append $pools . }}
{{- end }}
{{- end }}
{{- dict "pools" $pools | toJson }}
{{- end }}

{{- /* A number of seconds of the settings in force: of `config`, or pdproxy's own default. */ -}}
{{- define "pdproxy.seconds" -}}
{{- $section := get (index . 0).Values.config (index . 1) | default dict }}
{{- $defaults := (index . 0).Files.Get "files/seconds.json" | fromJson }}
{{- if hasKey $section (index . 2) }}{{ get $section (index . 2) }}{{ else }}{{ get (get $defaults (index . 1)) (index . 2) }}{{ end }}
{{- end }}

{{- /* Within how many seconds a proxy that stops has ended: each wait of a drain has a deadline. */ -}}
{{- define "pdproxy.longestDrain" -}}
{{- $all := include "pdproxy.seconds" (list . "listen" "linger") | float64 }}
{{- range list "drain" "abandoned_prefill" "prefill" "kv_ready" "first_token" "release" }}
{{- $all = addf $all (include "pdproxy.seconds" (list $ "deadlines" .) | float64) }}
{{- end }}
{{- addf $all (.Files.Get "files/seconds.json" | fromJson).margin | ceil | int }}
{{- end }}

{{- define "pdproxy.gracePeriod" -}}
{{- $longest := include "pdproxy.longestDrain" . | int }}
{{- $seconds := .Values.terminationGracePeriodSeconds }}
{{- if kindIs "invalid" $seconds }}
{{- add $longest 20 }}
{{- else if le (int $seconds) $longest }}
{{- fail (printf "terminationGracePeriodSeconds is %d, but a proxy that stops takes up to %d s (listen.linger, deadlines.drain and the release of KV): set more, or shorter deadlines" (int $seconds) $longest) }}
{{- else }}
{{- int $seconds }}
{{- end }}
{{- end }}

{{- define "pdproxy.scheme" -}}
{{- ternary "https" "http" (not (empty (dig "listen" "tls" "certificate" "" (include "pdproxy.config" . | fromJson)))) }}
{{- end }}

{{- define "pdproxy.port" -}}
{{- get (.Values.config.listen | default dict) "port" | default 8000 | int }}
{{- end }}

{{- /* Where the settings look for pods, by namespace: whether also for InferencePools. `elsewhere`: whether they
have engines that are no pods. */ -}}
{{- define "pdproxy.discovery" -}}
{{- $namespaces := dict }}
{{- $elsewhere := false }}
{{- range (include "pdproxy.config" . | fromJson).pools }}
{{- range .nodes }}
{{- if regexMatch "^podss?://" .url }}
{{- $place := regexReplaceAll "^podss?://([^/]*).*$" .url "${1}" }}
{{- range splitList "," (splitList ":" $place | first) }}
{{- $name := . | default $.Release.Namespace }}
{{- $_ := set $namespaces $name (get $namespaces $name | default false) }}
{{- end }}
{{- else if regexMatch "^inferencepools?://" .url }}
{{- $place := regexReplaceAll "^inferencepools?://" .url "" | splitList "/" }}
{{- $_ := set $namespaces (ternary (first $place) $.Release.Namespace (eq (len $place) 2)) true }}
{{- else }}
{{- $elsewhere = true }}
{{- end }}
{{- end }}
{{- end }}
{{- dict "namespaces" $namespaces "elsewhere" $elsewhere | toJson }}
{{- end }}
