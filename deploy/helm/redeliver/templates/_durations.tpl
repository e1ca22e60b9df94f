{{/* Durations, with the rules of the configuration: a whole number and a unit. */}}

{{/* Milliseconds: { text, path }. The path of the value is for the error. */}}
{{- define "redeliver.millis" -}}
{{- $text := toString .text -}}
{{- if not (regexMatch "^[0-9]{1,15}(ms|s|m|h|d)$" $text) -}}
{{- fail (printf "%s: `%s` is not a duration: write a whole number and a unit, such as 500ms, 5s, 2m, 1h or 7d" .path $text) -}}
{{- end -}}
{{- $units := dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000 "d" 86400000 -}}
{{- /* Without leading zeros: int64 would read an octal number. */ -}}
{{- $number := regexReplaceAll "^0+([0-9])" (regexFind "^[0-9]+" $text) "${1}" | int64 -}}
{{- mul $number (get $units (regexFind "[a-z]+$" $text)) -}}
{{- end -}}

{{/* The text of milliseconds, with the largest unit that needs no fraction, as in the names of topics. */}}
{{- define "redeliver.duration" -}}
{{- $millis := int64 . -}}
{{- if eq $millis 0 -}}
0s
{{- else if eq (mod $millis 86400000) 0 -}}
{{- div $millis 86400000 -}}d
{{- else if eq (mod $millis 3600000) 0 -}}
{{- div $millis 3600000 -}}h
{{- else if eq (mod $millis 60000) 0 -}}
{{- div $millis 60000 -}}m
{{- else if eq (mod $millis 1000) 0 -}}
{{- div $millis 1000 -}}s
{{- else -}}
{{- $millis -}}ms
{{- end -}}
{{- end -}}

{{/* The delays of a retry policy in milliseconds, in ascending order, as a JSON array: { retry, path }. */}}
{{- define "redeliver.delays" -}}
{{- $retry := default dict .retry -}}
{{- $path := .path -}}
{{- $delays := list -}}
{{- if hasKey $retry "base" -}}
{{- $base := include "redeliver.millis" (dict "text" $retry.base "path" (printf "%s.base" $path)) | int64 -}}
{{- $limit := 31622400000 | int64 -}}
{{- if $retry.cap -}}
{{- $limit = include "redeliver.millis" (dict "text" $retry.cap "path" (printf "%s.cap" $path)) | int64 -}}
{{- end -}}
{{- $factor := default 2 $retry.factor | float64 -}}
{{- $delay := float64 $base -}}
{{- range until (int (default 5 $retry.max_retries)) -}}
{{- if lt (len $delays) 21 -}}
{{- /* Rounded up to milliseconds, from microseconds. */ -}}
{{- $rounded := divf (floor (mulf $delay 1000)) 1000 | ceil | int64 -}}
{{- $delays = append $delays (min $rounded $limit) | uniq -}}
{{- if lt $delay (float64 $limit) -}}
{{- $delay = mulf $delay $factor -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- else -}}
{{- range $index, $text := default (list "5s" "30s" "1m") $retry.tiers -}}
{{- if lt $index (int (default 1000 $retry.max_retries)) -}}
{{- $delays = append $delays (include "redeliver.millis" (dict "text" $text "path" (printf "%s.tiers" $path)) | int64) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $delays -}}
{{- end -}}
