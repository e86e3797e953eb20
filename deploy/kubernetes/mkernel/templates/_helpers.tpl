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

{{- define "mkernel.registeredGiB" -}}
{{- if lt (int .Values.registeredGiB) 1 }}{{ fail (printf "registeredGiB is %v; a whole number from 1 is expected" .Values.registeredGiB) }}{{ end -}}
{{ int .Values.registeredGiB }}
{{- end }}

{{/* Pages of jobs that the daemon or its NIC touches first are the daemon's in its control group's books. */}}
{{- define "mkernel.memory" -}}
{{ add (int (include "mkernel.registeredGiB" .)) 2 }}Gi
{{- end }}

{{- define "mkernel.peersName" -}}
{{ include "mkernel.peers" . }}.{{ .Release.Namespace }}.svc.cluster.local
{{- end }}
