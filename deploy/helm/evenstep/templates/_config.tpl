{{- /* The config file: what follows from values, then settings. JSON's scalars and lists are TOML. */ -}}
{{- define "evenstep.config" -}}
{{- $v := .Values -}}
host = "0.0.0.0"
port = 8000
admin_port = {{ int $v.adminPort }}
{{- if $v.keys.admin }}
admin_host = "0.0.0.0"
admin_key_file = "/etc/evenstep/keys/admin/keys"
{{- end }}
{{- if eq $v.mode "pick" }}
grpc_port = 9002
{{- end }}
{{- with $v.workers.list }}
workers = {{ toJson . }}
{{- end }}
{{- $found := printf ",port=%d,ranks=%d" (int (first $v.workers.ports)) (len $v.workers.ports) }}
{{- with $v.workers.options }}{{ $found = print $found "," . }}{{ end }}
{{- if $v.workers.selector }}
discover = [{{ printf "endpointslices:%s/%s-engines%s" (include "evenstep.engines" .) (include "evenstep.name" .) $found | toJson }}]
{{- end }}
{{- with $v.workers.leaderWorkerSet }}
discover = [{{ printf "lws:%s/%s%s" (include "evenstep.engines" $) . $found | toJson }}]
{{- end }}
{{- if gt (int $v.replicas) 1 }}
replica_lock = {{ printf "lease:%s/%s" .Release.Namespace (include "evenstep.name" .) | toJson }}
{{- end }}
{{- if $v.keys.clients }}
api_key_file = "/etc/evenstep/keys/clients/keys"
{{- end }}
{{- if $v.keys.workers }}
worker_api_key_file = "/etc/evenstep/keys/workers/key"
{{- end }}
{{- if $v.keys.streams }}
secret_key_file = "/etc/evenstep/keys/streams/key_secret"
{{- end }}
{{- if $v.tls }}
tls_cert = "/etc/evenstep/keys/tls/tls.crt"
tls_key = "/etc/evenstep/keys/tls/tls.key"
{{- end }}
drain_delay_s = {{ $v.ending.drainDelaySeconds }}
grace_s = {{ $v.ending.graceSeconds }}
{{- end -}}
