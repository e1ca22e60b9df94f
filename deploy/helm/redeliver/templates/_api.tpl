{{/*
The listener of the API of a workload as JSON: { section, suffix, api, facts }. `exposed`: whether other pods can reach it;
`env`, `secrets` and `ports` of the workload.
*/}}
{{- define "redeliver.api" -}}
{{- $token := .api.tokenSecret -}}
{{- $exposed := or (ne $token.name "") .api.allowUnauthenticated -}}
{{- $prefix := printf "REDELIVER__%s" (upper .section) -}}
{{- $host := ternary .facts.host "127.0.0.1" $exposed -}}
{{- $env := list (dict "name" (printf "%s__LISTEN" $prefix) "value" (printf "%s:%d" $host (int .api.port))) -}}
{{- $secrets := dict -}}
{{- if $token.name -}}
{{- $file := printf "/run/secrets/api-token/%s" $token.key -}}
{{- $env = append $env (dict "name" (printf "%s__TOKEN_FILE" $prefix) "value" $file) -}}
{{- $_ := set $secrets "api-token" (dict "secret" $token.name "keys" (list $token.key)) -}}
{{- else if $exposed -}}
{{- $env = append $env (dict "name" (printf "%s__ALLOW_REMOTE" $prefix) "value" "true") -}}
{{- end -}}
{{- $ports := list (dict "name" "api" "containerPort" (int .api.port)) -}}
{{- toJson (dict "exposed" $exposed "env" $env "secrets" $secrets "ports" (ternary $ports list $exposed)) -}}
{{- end -}}
