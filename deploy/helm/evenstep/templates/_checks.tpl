{{- /* Combinations that no schema refuses. Each fails with what to do. */ -}}
{{- define "evenstep.check" -}}
{{- $v := .Values -}}
{{- $named := list -}}
{{- range $name := list "selector" "leaderWorkerSet" "list" -}}
{{- if index $v.workers $name }}{{ $named = append $named (print "workers." $name) }}{{ end -}}
{{- end -}}
{{- if not $named -}}
{{- fail "no engines: give workers.selector, workers.leaderWorkerSet or workers.list" -}}
{{- else if gt (len $named) 1 -}}
{{- fail (printf "engines are named twice: leave one of %s out" (join " and " $named)) -}}
{{- end -}}
{{- if and $v.workers.list $v.workers.options -}}
{{- fail "workers.options is for engines that are found: in workers.list write options after each URL" -}}
{{- end -}}
{{- range $place, $port := $v.workers.ports -}}
{{- if ne (int $port) (add $place (first $v.workers.ports)) }}{{ fail "workers.ports: the ports of a pod's ranks follow one another, as 8000, 8001, 8002" }}{{ end -}}
{{- end -}}
{{- with $v.inferencePool -}}
{{- if .enabled -}}
{{- if ne $v.mode "pick" }}{{ fail "an InferencePool asks an endpoint picker: set mode to pick" }}{{ end -}}
{{- if $v.workers.list }}{{ fail "an InferencePool selects pods: give workers.selector or workers.leaderWorkerSet" }}{{ end -}}
{{- if gt (len $v.workers.ports) 8 }}{{ fail "an InferencePool has at most 8 ports a pod (workers.ports): use fewer ranks a pod, or a Gateway of your own" }}{{ end -}}
{{- if and $v.workers.namespace (ne $v.workers.namespace $.Release.Namespace) }}{{ fail "an InferencePool and its pods are in one namespace: leave workers.namespace out, or install the chart there" }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if eq (int $v.adminPort) 8000 }}{{ fail "adminPort: 8000 is the clients' port; give another one" }}{{ end -}}
{{- $own := include "evenstep.config" . | fromToml -}}
{{- range $name, $_ := $v.settings -}}
{{- if hasKey $own $name }}{{ fail (printf "settings.%s: the chart sets it to %s; see values.yaml for the value that decides it" $name (index $own $name | toJson)) }}{{ end -}}
{{- end -}}
{{- if hasKey $v.settings "workers" }}{{ fail "settings.workers: engines are named by workers.list" }}{{ end -}}
{{- range $name := list "api_key_file" "worker_api_key_file" "secret_key_file" "admin_key_file" "tls_cert" "tls_key" -}}
{{- if hasKey $v.settings $name }}{{ fail (printf "settings.%s: keys and certificates come from Secrets (values keys and tls)" $name) }}{{ end -}}
{{- end -}}
{{- if and $v.networkPolicy.enabled (not $v.networkPolicy.engines) $v.workers.list -}}
{{- fail "networkPolicy.engines: nobody knows the labels of listed engines, so say as whom the router may reach them" -}}
{{- end -}}
{{- with $v.keda -}}
{{- if .enabled -}}
{{- if not .target.name }}{{ fail "keda.target.name: which workload of engines grows and shrinks?" }}{{ end -}}
{{- if not .prometheus }}{{ fail "keda.prometheus: the URL of the Prometheus that reads the router's metrics" }}{{ end -}}
{{- if gt (int .minReplicas) (int .maxReplicas) }}{{ fail (printf "keda.minReplicas (%v) is above keda.maxReplicas (%v)" .minReplicas .maxReplicas) }}{{ end -}}
{{- if not (or .waitingRequests .waitingTokens .slotsInUse .firstTokenSeconds) }}{{ fail "keda: none of waitingRequests, waitingTokens, slotsInUse and firstTokenSeconds is given" }}{{ end -}}
{{- if $v.workers.list }}{{ fail "keda: engines of a fixed list (workers.list) neither come nor go; find them by workers.selector or workers.leaderWorkerSet" }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if and $v.tls (eq $v.mode "pick") -}}
{{- fail "tls is for the clients' port of mode serve: in mode pick clients connect to the gateway" -}}
{{- end -}}
{{- end -}}
