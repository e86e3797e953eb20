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
{{ include "mkernel.peers" . }}.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain | default "cluster.local" }}
{{- end }}

{{/*
mkerneld.toml: the chart's keys and the text of `config`. TOML has each table once, so where `config` has a table of the chart's, the
chart's keys go into it. Each of them: name, value, and what sets it; where that is empty, `config` may have another value.
*/}}
{{- define "mkernel.toml" -}}
{{- $values := .Values }}
{{- $metrics := ternary "\"127.0.0.1:9464\"" "\"\"" $values.metrics.enabled }}
{{- $tables := list
    (dict "name" "socket" "keys" (list (list "path" "\"/run/mkernel/mkerneld.sock\"" "the pod's mounts and socketFolder")))
    (dict "name" "admin" "keys" (list (list "socket" "\"/run/mkernel-admin/mkerneld.sock\"" "the pod's mounts")))
    (dict "name" "discovery" "keys" (list (list "kind" "\"dns\"" "the headless service") (list "interval" "\"5s\"" "")))
    (dict "name" "discovery.dns" "keys" (list
      (list "name" (printf "\"%s:%d\"" (include "mkernel.peersName" .) (int $values.port)) "the headless service, port and clusterDomain")))
    (dict "name" "metrics" "keys" (list (list "listen" $metrics "metrics.enabled")))
    (dict "name" "log" "keys" (list (list "format" "\"json\"" "")))
    (dict "name" "limits" "keys" (list
      (list "drain" (printf "\"%vs\"" $values.drainSeconds) "drainSeconds")
      (list "all_registered" (printf "\"%sGiB\"" (include "mkernel.registeredGiB" .)) "registeredGiB"))) }}
{{- if or $values.tls.hostFolder $values.tls.secret }}
{{- $tables = append $tables (dict "name" "tls" "keys" (list
    (list "cert" "\"/etc/mkernel/tls/tls.crt\"" "tls.hostFolder or tls.secret")
    (list "key" "\"/etc/mkernel/tls/tls.key\"" "tls.hostFolder or tls.secret")
    (list "ca" "\"/etc/mkernel/tls/ca.crt\"" "tls.hostFolder or tls.secret"))) }}
{{- end }}
{{- /* `config` up to its first table, and the rest. */}}
{{- $config := replace "\r" "" $values.config }}
{{- $root := regexFind "(?ms)\\A.*?(?:^[ \\t]*\\[|\\z)" $config }}
{{- $rest := trimPrefix $root $config }}
{{- if hasSuffix "[" $root }}
{{- $root = trimSuffix "[" $root }}
{{- $rest = printf "[%s" $rest }}
{{- end }}
{{- $head := list (printf "listen = \"0.0.0.0:%d\"" (int $values.port)) (printf "insecure = %v" $values.insecure) }}
{{- range tuple "listen" "insecure" }}
{{- if regexMatch (printf "(?m)^[ \\t]*\"?%s\"?[ \\t]*=" .) $root }}
{{- fail (printf "config: %s follows from %s: set that" . (ternary "port" "insecure" (eq . "listen"))) }}
{{- end }}
{{- end }}
{{- $more := list }}
{{- range $tables }}
{{- $name := .name }}
{{- $pattern := replace "." "\\." $name }}
{{- $header := printf "^[ \\t]*\\[[ \\t]*%s[ \\t]*\\]" $pattern }}
{{- $body := regexFind (printf "(?ms)%s.*?(?:^[ \\t]*\\[|\\z)" $header) $rest }}
{{- if regexMatch (printf "(?m)^[ \\t]*%s[ \\t]*=" $pattern) $root }}
{{- fail (printf "config: %s has keys of the chart's as well: write it as a table, [%s]" $name $name) }}
{{- end }}
{{- $lines := list }}
{{- $dotted := list }}
{{- range .keys }}
{{- $key := index . 0 }}
{{- $there := regexMatch (printf "(?m)^[ \\t]*\"?%s\"?[ \\t]*=" $key) $body }}
{{- if or $there (regexMatch (printf "(?m)^[ \\t]*%s\\.%s[ \\t]*=" $pattern $key) $root) }}
{{- if index . 2 }}
{{- fail (printf "config: %s.%s follows from %s: set that" $name $key (index . 2)) }}
{{- end }}
{{- else }}
{{- $lines = append $lines (printf "%s = %s" $key (index . 1)) }}
{{- $dotted = append $dotted (printf "%s.%s = %s" $name $key (index . 1)) }}
{{- end }}
{{- end }}
{{- if $body }}
{{- $rest = regexReplaceAllLiteral (printf "(?m)%s[^\\n]*$" $header) $rest (join "\n" (prepend $lines (printf "[%s]" $name))) }}
{{- else if regexMatch (printf "(?m)^[ \\t]*%s\\." $pattern) $root }}
{{- $head = concat $head $dotted }}
{{- else }}
{{- $more = concat $more (prepend $lines (printf "[%s]" $name)) }}
{{- end }}
{{- end }}
{{- join "\n" $head }}
{{ trim $root }}
{{ join "\n" $more }}
{{ trim $rest }}
{{- end }}
