{{/* Names, labels and images. */}}

{{- define "redeliver.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "redeliver.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
The name of an object: { root, suffix }. At most 52 characters: the names of a StatefulSet's pods and revisions, which are
values of labels, are up to 11 longer. A name that had to be changed gets a hash, so that it stays unique.
*/}}
{{- define "redeliver.objectName" -}}
{{- $full := printf "%s-%s" (include "redeliver.fullname" .root) .suffix -}}
{{- $name := regexReplaceAll "[^a-z0-9]+" (lower $full) "-" | trimAll "-" -}}
{{- if or (ne $name $full) (gt (len $name) 52) -}}
{{- printf "%s-%s" (trunc 43 $name | trimSuffix "-") (sha256sum $full | trunc 8) -}}
{{- else -}}
{{- $name -}}
{{- end -}}
{{- end -}}

{{/* A valid value of a label for any name of a pipeline. */}}
{{- define "redeliver.labelValue" -}}
{{- if regexMatch "^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$" . -}}
{{- . -}}
{{- else -}}
{{- printf "%s-%s" (regexReplaceAll "^[^A-Za-z0-9]+" . "" | trunc 50) (sha256sum . | trunc 8) -}}
{{- end -}}
{{- end -}}

{{/* The labels that select the pods of a workload: { root, component, labels }. They never change. */}}
{{- define "redeliver.selectorLabels" -}}
app.kubernetes.io/name: {{ include "redeliver.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The labels of an object: { root, component, labels }. */}}
{{- define "redeliver.labels" -}}
{{ include "redeliver.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The reference of an image: { root, image }. */}}
{{- define "redeliver.image" -}}
{{- $name := list .root.Values.image.registry .image.repository | compact | join "/" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (coalesce .image.tag .root.Values.image.tag .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "redeliver.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "redeliver.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}
