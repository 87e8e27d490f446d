{{- /* The engines of the values, each complete: what it has from engineDefaults, the name of its pool, and the
revision. Engines of one model and one connector are a pool, and a pool has one revision: it changes with the
image of one of them, and with each flag that may change the KV. Plain engines exchange none. */ -}}
{{- define "pdproxy.engines" -}}
{{- $engines := list }}
{{- $pools := dict }}
{{- $names := dict }}
{{- range .Values.engines }}
{{- $engine := include "pdproxy.merged" (list $.Values.engineDefaults .) | fromJson }}
{{- if hasKey $names $engine.name }}
{{- fail (printf "engines: two entries have the name %s" $engine.name) }}
{{- end }}
{{- $_ := set $names $engine.name true }}
{{- include "pdproxy.refuseOwn" $engine }}
{{- if and (not $engine.model) (not $engine.simulated) }}
{{- fail (printf "engines: %s has no model: set it, or engineDefaults.model" $engine.name) }}
{{- end }}
{{- $_ := set $engine "model" (ternary "sim" $engine.model $engine.simulated) }}
{{- $_ := set $engine "modelLabel" (include "pdproxy.modelLabel" $engine.model) }}
{{- $_ := set $engine "pool" (printf "%s-%s" $engine.modelLabel $engine.connector) }}
{{- if $engine.simulated }}
{{- $_ := set $engine "transfer" "" }}
{{- $_ := set $engine "imageName" (include "pdproxy.image" (list $.Values.image $.Chart.AppVersion)) }}
{{- else }}
{{- $_ := set $engine "transfer" (include "pdproxy.transfer" $engine) }}
{{- $_ := set $engine "imageName" (include "pdproxy.image" (list $engine.image "latest")) }}
{{- end }}
{{- $kv := printf "%s %s %s" $engine.imageName $engine.transfer (include "pdproxy.kvArgs" $engine) }}
{{- $kv = printf "%s %s %v %v" $kv $engine.model $engine.tensorParallelSize $engine.dataParallelSize }}
{{- if ne $engine.role "aggregated" }}
{{- $_ := set $pools $engine.pool (append (get $pools $engine.pool | default list) (printf "%s %s" $engine.role $kv)) }}
{{- end }}
{{- $engines = append $engines $engine }}
{{- end }}
{{- range $engines }}
{{- $_ := set . "revision" (get $pools .pool | default list | uniq | sortAlpha | join "\n" | sha256sum | trunc 10) }}
{{- end }}
{{- dict "engines" $engines | toJson }}
{{- end }}

{{- /* Fails for flags and variables that the chart sets from other values. */ -}}
{{- define "pdproxy.refuseOwn" -}}
{{- $name := .name }}
{{- $flags := dict "--data-parallel-size" "dataParallelSize" "--kv-transfer-config" "kvTransferConfig" "--model" "model" "--served-model-name" "servedModelName" "--side-channel-port" "sideChannelPort" "--tensor-parallel-size" "tensorParallelSize" "--role" "role" }}
{{- range .args }}
{{- $flag := toString . | splitList "=" | first }}
{{- if hasKey $flags $flag }}
{{- fail (printf "engines: %s: args: the chart sets %s: use %s" $name $flag (get $flags $flag)) }}
{{- else if has $flag (list "--port" "--side-channel-host" "--uds") }}
{{- fail (printf "engines: %s: args: the chart sets %s" $name $flag) }}
{{- else if hasPrefix "--ssl" $flag }}
{{- fail (printf "engines: %s: args: probes need plain HTTP: leave %s out" $name $flag) }}
{{- end }}
{{- end }}
{{- range .env }}
{{- if has .name (list "POD_IP" "VLLM_NIXL_SIDE_CHANNEL_HOST" "VLLM_NIXL_SIDE_CHANNEL_PORT") }}
{{- fail (printf "engines: %s: env: the chart sets %s" $name .name) }}
{{- end }}
{{- end }}
{{- end }}

{{- /* --kv-transfer-config of an engine; nothing for one that moves no KV. */ -}}
{{- define "pdproxy.transfer" -}}
{{- if ne .role "aggregated" }}
{{- $names := dict "nixl" "NixlConnector" "nixl-push" "NixlPushConnector" "mooncake" "MooncakeConnector" }}
{{- $roles := dict "prefill" "kv_producer" "decode" "kv_consumer" "any" "kv_both" }}
{{- $config := dict "kv_role" (get $roles .role) }}
{{- if hasKey $names .connector }}
{{- $_ := set $config "kv_connector" (get $names .connector) }}
{{- end }}
{{- $config = include "pdproxy.merged" (list $config .kvTransferConfig) | fromJson }}
{{- if not $config.kv_connector }}
{{- fail (printf "engines: %s: connector %s needs kvTransferConfig.kv_connector" .name .connector) }}
{{- end }}
{{- toJson $config }}
{{- end }}
{{- end }}

{{- /* The flags of `args` that may change the KV, each with its values. */ -}}
{{- define "pdproxy.kvArgs" -}}
{{- $kept := list }}
{{- $keep := true }}
{{- $without := .argsWithoutKv }}
{{- range .args }}
{{- $word := toString . }}
{{- if hasPrefix "-" $word }}
{{- $keep = not (has (splitList "=" $word | first) $without) }}
{{- end }}
{{- if $keep }}
{{- $kept = append $kept $word }}
{{- end }}
{{- end }}
{{- join " " $kept }}
{{- end }}

{{- /* Seconds in which an engine that is to end waits for its requests. */ -}}
{{- define "pdproxy.drainSeconds" -}}
{{- $engine := index . 1 }}
{{- if kindIs "invalid" $engine.drainSeconds }}
{{- include "pdproxy.seconds" (list (index . 0) "deadlines" "engine_drain") | float64 | ceil | add 10 }}
{{- else }}
{{- $engine.drainSeconds }}
{{- end }}
{{- end }}
