{{- define "mkernel.labels" -}}
{{ include "mkernel.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "mkernel.selector" -}}
app.kubernetes.io/name: mkernel
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "mkernel.peers" -}}{{ .Release.Name }}-peers{{- end }}

{{- define "mkernel.peersName" -}}
{{ include "mkernel.peers" . }}.{{ .Release.Namespace }}.svc.cluster.local
{{- end }}
