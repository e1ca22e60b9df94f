{{/*
The TLS of a listener as JSON: { tls, section, volume }. `env` and `secrets` of the workload. Certificate and CA of clients are
mounted as folders, so that the process sees it when a Secret changes.
*/}}
{{- define "redeliver.tls" -}}
{{- $env := list -}}
{{- $secrets := dict -}}
{{- $prefix := printf "REDELIVER__%s__TLS" (upper .section) -}}
{{- with .tls.secret -}}
{{- if .name -}}
{{- $folder := printf "/run/secrets/%s" $.volume -}}
{{- $env = append $env (dict "name" (printf "%s__CERT_FILE" $prefix) "value" (printf "%s/%s" $folder .certKey)) -}}
{{- $env = append $env (dict "name" (printf "%s__KEY_FILE" $prefix) "value" (printf "%s/%s" $folder .keyKey)) -}}
{{- $_ := set $secrets $.volume (dict "secret" .name "keys" (list .certKey .keyKey)) -}}
{{- end -}}
{{- end -}}
{{- with .tls.clientCaSecret -}}
{{- if .name -}}
{{- $volume := printf "%s-clients" $.volume -}}
{{- $env = append $env (dict "name" (printf "%s__CLIENT_CA_FILE" $prefix) "value" (printf "/run/secrets/%s/%s" $volume .key)) -}}
{{- $_ := set $secrets $volume (dict "secret" .name "keys" (list .key)) -}}
{{- end -}}
{{- end -}}
{{- toJson (dict "env" $env "secrets" $secrets) -}}
{{- end -}}

{{/* Whether callers of an API must prove who they are: "true" or "". */}}
{{- define "redeliver.isAuthenticated" -}}
{{- if or .tokenSecret.name .tokensSecret.name .jwt .tls.clientCaSecret.name -}}true{{- end -}}
{{- end -}}

{{/* Whether other pods can reach an API: "true" or "". */}}
{{- define "redeliver.isExposed" -}}
{{- if or (include "redeliver.isAuthenticated" .) .allowUnauthenticated -}}true{{- end -}}
{{- end -}}

{{/*
The listener of the API of a workload as JSON: { section, suffix, api, facts }. `exposed`: whether other pods can reach it;
`env`, `secrets` and `ports` of the workload.
*/}}
{{- define "redeliver.api" -}}
{{- $token := .api.tokenSecret -}}
{{- $exposed := ne (include "redeliver.isExposed" .api) "" -}}
{{- $prefix := printf "REDELIVER__%s" (upper .section) -}}
{{- $host := ternary .facts.host "127.0.0.1" $exposed -}}
{{- $tls := include "redeliver.tls" (dict "tls" .api.tls "section" .section "volume" "api-tls") | fromJson -}}
{{- $env := list (dict "name" (printf "%s__LISTEN" $prefix) "value" (printf "%s:%d" $host (int .api.port))) -}}
{{- $env = concat $env $tls.env -}}
{{- $secrets := $tls.secrets -}}
{{- if $token.name -}}
{{- $file := printf "/run/secrets/api-token/%s" $token.key -}}
{{- $env = append $env (dict "name" (printf "%s__TOKEN_FILE" $prefix) "value" $file) -}}
{{- $_ := set $secrets "api-token" (dict "secret" $token.name "keys" (list $token.key)) -}}
{{- end -}}
{{- with .api.tokensSecret -}}
{{- if .name -}}
{{- $file := printf "/run/secrets/api-tokens/%s" .key -}}
{{- $env = append $env (dict "name" (printf "%s__AUTH__TOKENS_FILE" $prefix) "value" $file) -}}
{{- $_ := set $secrets "api-tokens" (dict "secret" .name "keys" (list .key)) -}}
{{- end -}}
{{- end -}}
{{- with .api.jwt -}}
{{- $env = append $env (dict "name" (printf "%s__AUTH__JWT" $prefix) "value" (toJson .)) -}}
{{- end -}}
{{- with .api.clientCertificates -}}
{{- $env = append $env (dict "name" (printf "%s__AUTH__CLIENT_CERTIFICATES" $prefix) "value" (toJson .)) -}}
{{- end -}}
{{- if and .api.allowUnauthenticated (not (include "redeliver.isAuthenticated" .api)) -}}
{{- $env = append $env (dict "name" (printf "%s__ALLOW_REMOTE" $prefix) "value" "true") -}}
{{- end -}}
{{- $ports := list (dict "name" "api" "containerPort" (int .api.port)) -}}
{{- toJson (dict "exposed" $exposed "env" $env "secrets" $secrets "ports" (ternary $ports list $exposed)) -}}
{{- end -}}
