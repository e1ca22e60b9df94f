{{/*
A Job that runs the command line, as a hook: { root, suffix, component, annotations, configMap, serviceAccountName, retries,
containers }. A container is { name, args, env, secrets }.
*/}}
{{- define "redeliver.job" -}}
{{- $root := .root -}}
{{- $settings := include "redeliver.settings" (dict "root" $root "overrides" (list (omit $root.Values.topics "provisioner" "strimzi"))) | fromJson -}}
{{- $kafka := include "redeliver.kafka" $root | fromJson -}}
{{- $secrets := $kafka.secrets -}}
{{- range .containers -}}
{{- $secrets = merge dict $secrets (default dict .secrets) -}}
{{- end -}}
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ include "redeliver.objectName" (dict "root" $root "suffix" .suffix) }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "redeliver.labels" . | nindent 4 }}
  annotations:
    {{- toYaml .annotations | nindent 4 }}
spec:
  backoffLimit: {{ .retries }}
  # Less than the default timeout of Helm, so that the reason is still there when Helm gives up.
  activeDeadlineSeconds: 240
  # Helm does not delete Jobs of hooks when it uninstalls the release.
  ttlSecondsAfterFinished: 86400
  template:
    metadata:
      labels:
        {{- with $settings.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- include "redeliver.selectorLabels" . | nindent 8 }}
      {{- with $settings.podAnnotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      {{- include "redeliver.podSpec" (dict "root" $root "settings" $settings "serviceAccountName" .serviceAccountName) | nindent 6 }}
      restartPolicy: Never
      containers:
        {{- range $container := .containers }}
        - name: {{ .name }}
          image: {{ include "redeliver.image" (dict "root" $root "image" $settings.image) }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          args:
            {{- toYaml .args | nindent 12 }}
          env:
            - name: REDELIVER_CONFIG
              value: /etc/redeliver/redeliver.yaml
            {{- with concat $kafka.env (default list .env) $settings.extraEnv }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          resources:
            {{- toYaml $settings.resources | nindent 12 }}
          securityContext:
            {{- toYaml $root.Values.securityContext | nindent 12 }}
          volumeMounts:
            {{- $mounted := merge dict $kafka.secrets (default dict .secrets) }}
            {{- include "redeliver.volumeMounts" (dict "secrets" $mounted) | nindent 12 }}
            {{- with $settings.extraVolumeMounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
        {{- end }}
      volumes:
        {{- include "redeliver.volumes" (dict "configMap" .configMap "secrets" $secrets) | nindent 8 }}
        {{- with $settings.extraVolumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
{{- end -}}
