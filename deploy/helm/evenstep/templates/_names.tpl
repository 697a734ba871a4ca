{{- /* Services have no dots in their names. */ -}}
{{- define "evenstep.name" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | replace "." "-" | trunc 50 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | replace "." "-" | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | replace "." "-" | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "evenstep.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "evenstep.labels" -}}
{{ include "evenstep.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "evenstep.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "evenstep.account" -}}
{{- .Values.serviceAccount.name | default (include "evenstep.name" .) -}}
{{- end -}}

{{- /* Namespace of the engines. */ -}}
{{- define "evenstep.engines" -}}
{{- .Values.workers.namespace | default .Release.Namespace -}}
{{- end -}}

{{- /* Labels of the engines' pods; empty where nobody knows them. */ -}}
{{- define "evenstep.engineLabels" -}}
{{- if .Values.workers.selector }}{{ toYaml .Values.workers.selector }}
{{- else if .Values.workers.leaderWorkerSet }}leaderworkerset.sigs.k8s.io/name: {{ .Values.workers.leaderWorkerSet }}
{{- end -}}
{{- end -}}

{{- /* "true" where the router asks the API server; else empty. */ -}}
{{- define "evenstep.asksApi" -}}
{{- if or .Values.workers.selector .Values.workers.leaderWorkerSet (gt (int .Values.replicas) 1) }}true{{ end -}}
{{- end -}}

{{- /* Restrictions of every container. */ -}}
{{- define "evenstep.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "evenstep.podConfined" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}
