{{/* Pods and StatefulSets. */}}

{{/*
The settings of a workload as JSON: those of all pods, overridden by each of `overrides`: { root, overrides }. An `autoscaling`
replaces the previous one as a whole.
*/}}
{{- define "redeliver.settings" -}}
{{- $keys := list "podAnnotations" "podLabels" "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" -}}
{{- $keys = concat $keys (list "priorityClassName" "extraEnv" "extraVolumes" "extraVolumeMounts") -}}
{{- $settings := dict -}}
{{- range $keys -}}
{{- $_ := set $settings . (get $.root.Values .) -}}
{{- end -}}
{{- range $override := .overrides -}}
{{- $override = default dict $override -}}
{{- if hasKey $override "autoscaling" -}}
{{- $settings = omit $settings "autoscaling" -}}
{{- end -}}
{{- $settings = include "redeliver.merge" (list $settings $override) | fromJson -}}
{{- end -}}
{{- toJson $settings -}}
{{- end -}}

{{/* Volumes for the configuration and for Secrets: { configMap, secrets }. */}}
{{- define "redeliver.volumes" -}}
- name: config
  configMap:
    name: {{ .configMap }}
{{- range $name, $secret := .secrets }}
- name: {{ $name }}
  secret:
    secretName: {{ $secret.secret }}
    defaultMode: 0440
    items:
      {{- range $secret.keys }}
      - key: {{ . }}
        path: {{ . }}
      {{- end }}
{{- end }}
{{- end -}}

{{- define "redeliver.volumeMounts" -}}
- name: config
  mountPath: /etc/redeliver
  readOnly: true
{{- range $name, $_ := .secrets }}
- name: {{ $name }}
  mountPath: /run/secrets/{{ $name }}
  readOnly: true
{{- end }}
{{- end -}}

{{/* The fields of all pods: { root, settings, serviceAccountName }. */}}
{{- define "redeliver.podSpec" -}}
serviceAccountName: {{ .serviceAccountName }}
automountServiceAccountToken: false
# Variables named after Services could be mistaken for the configuration.
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .settings.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .settings.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/*
A StatefulSet, or with `stateless` a Deployment without access to Kafka, with its PodDisruptionBudget and autoscaler:
root, facts;
configMap, config: of a Deployment, see redeliver.consoleConfig;
suffix: of the name; component, labels: select the pods;
path: of its values, for errors; settings: see redeliver.settings;
args, env; secrets: in addition to those for Kafka, see redeliver.kafka;
ports: further ports; readiness: its probe, /readyz by default;
volumes, volumeMounts, claims: further ones;
annotations: of the StatefulSet;
signal: what it is scaled by, see redeliver.autoscaler.
*/}}
{{- define "redeliver.workload" -}}
{{- $root := .root -}}
{{- $settings := .settings -}}
{{- $values := $root.Values -}}
{{- $name := include "redeliver.objectName" (dict "root" $root "suffix" .suffix) -}}
{{- $selector := include "redeliver.selectorLabels" . -}}
{{- $kafka := dict "secrets" dict "env" list -}}
{{- $configMap := .configMap -}}
{{- $config := .config -}}
{{- if not .stateless -}}
{{- $kafka = include "redeliver.kafka" $root | fromJson -}}
{{- $configMap = include "redeliver.fullname" $root -}}
{{- $config = include "redeliver.config" $root -}}
{{- end -}}
{{- $admin := include "redeliver.tls" (dict "tls" $values.admin.tls "section" "admin" "volume" "admin-tls") | fromJson -}}
{{- $secrets := merge dict $kafka.secrets $admin.secrets (default dict .secrets) -}}
{{- /* The kubelet does not verify the certificate, and needs none. */ -}}
{{- $scheme := ternary "HTTPS" "HTTP" (not (empty $values.admin.tls.secret.name)) -}}
{{- $readyz := dict "httpGet" (dict "path" "/readyz" "port" "admin" "scheme" $scheme) -}}
{{- $autoscaling := default dict $settings.autoscaling -}}
apiVersion: apps/v1
kind: {{ ternary "Deployment" "StatefulSet" (default false .stateless) }}
metadata:
  name: {{ $name }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "redeliver.labels" . | nindent 4 }}
  {{- with .annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- if not $autoscaling.enabled }}
  replicas: {{ int $settings.replicas }}
  {{- end }}
  {{- if not .stateless }}
  serviceName: {{ include "redeliver.fullname" $root }}
  # Pods do not depend on each other.
  podManagementPolicy: Parallel
  {{- end }}
  revisionHistoryLimit: 3
  selector:
    matchLabels:
      {{- $selector | nindent 6 }}
  {{- with .claims }}
  # What is in the volumes can be rebuilt.
  persistentVolumeClaimRetentionPolicy:
    whenDeleted: Delete
    whenScaled: Delete
  volumeClaimTemplates:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  template:
    metadata:
      labels:
        {{- with $settings.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- $selector | nindent 8 }}
      annotations:
        # Of the configuration only, so that settings of one workload restart no other.
        checksum/config: {{ $config | sha256sum }}
        {{- with $settings.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      {{- $account := include "redeliver.serviceAccountName" $root }}
      {{- include "redeliver.podSpec" (dict "root" $root "settings" $settings "serviceAccountName" $account) | nindent 6 }}
      {{- $constraints := list }}
      {{- range $settings.topologySpreadConstraints }}
      {{- $default := dict "labelSelector" (dict "matchLabels" (fromYaml $selector)) }}
      {{- $constraints = append $constraints (merge (dict) . (ternary dict $default (hasKey . "labelSelector"))) }}
      {{- end }}
      {{- with $constraints }}
      topologySpreadConstraints:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      # Longer than shutdown.grace.
      terminationGracePeriodSeconds: {{ .facts.grace }}
      containers:
        - name: {{ .component }}
          image: {{ include "redeliver.image" (dict "root" $root "image" $settings.image) }}
          imagePullPolicy: {{ $values.image.pullPolicy }}
          {{- with .args }}
          args:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          env:
            - name: REDELIVER_CONFIG
              value: /etc/redeliver/redeliver.yaml
            # A pod with the same name takes over the partitions of its predecessor at once.
            - name: REDELIVER__INSTANCE
              valueFrom:
                fieldRef:
                  fieldPath: metadata.name
            {{- with concat $kafka.env $admin.env (default list .env) $settings.extraEnv }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          ports:
            - name: admin
              containerPort: {{ .facts.adminPort }}
            {{- with .ports }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          startupProbe:
            httpGet: { path: /livez, port: admin, scheme: {{ $scheme }} }
            {{- toYaml $values.probes.startup | nindent 12 }}
          livenessProbe:
            httpGet: { path: /livez, port: admin, scheme: {{ $scheme }} }
            {{- toYaml $values.probes.liveness | nindent 12 }}
          readinessProbe:
            {{- toYaml (default $readyz .readiness) | nindent 12 }}
            {{- toYaml $values.probes.readiness | nindent 12 }}
          resources:
            {{- toYaml $settings.resources | nindent 12 }}
          securityContext:
            {{- toYaml $values.securityContext | nindent 12 }}
          volumeMounts:
            {{- include "redeliver.volumeMounts" (dict "secrets" $secrets) | nindent 12 }}
            {{- with concat (default list .volumeMounts) $settings.extraVolumeMounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
      volumes:
        {{- include "redeliver.volumes" (dict "configMap" $configMap "secrets" $secrets) | nindent 8 }}
        {{- with concat (default list .volumes) $settings.extraVolumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
{{- if $values.podDisruptionBudget.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ $name }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "redeliver.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ $values.podDisruptionBudget.maxUnavailable }}
  # A pod that is not ready does no work that an eviction could interrupt.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- $selector | nindent 6 }}
{{- end }}
{{- if $autoscaling.enabled }}
---
{{ include "redeliver.autoscaler" (merge (dict "name" $name "autoscaling" $autoscaling) .) }}
{{- end }}
{{- end -}}

{{/*
A ScaledObject or a HorizontalPodAutoscaler. Uses these fields of redeliver.workload: root, facts, component, labels, path; and
name, autoscaling, and signal:
metric, matchLabels: the external metric of a HorizontalPodAutoscaler; query: for Prometheus;
threshold: the default; perPod: whether the metric is divided by the number of pods.
*/}}
{{- define "redeliver.autoscaler" -}}
{{- $root := .root -}}
{{- $scaling := .autoscaling -}}
{{- $path := printf "%s.autoscaling" .path -}}
{{- $partitions := int64 (default .facts.partitions $scaling.partitions) -}}
{{- if gt (int64 $scaling.minReplicas) (int64 $scaling.maxReplicas) -}}
{{- fail (printf "%s.minReplicas: %d is more than maxReplicas (%d)" $path (int64 $scaling.minReplicas) (int64 $scaling.maxReplicas)) -}}
{{- else if gt (int64 $scaling.maxReplicas) $partitions -}}
{{- fail (printf "%s.maxReplicas: %d is more than the partitions of its topics (%d), and further pods would be idle; lower it, or set %s.partitions if the topics have more than config.kafka.topics.partitions" $path (int64 $scaling.maxReplicas) $partitions $path) -}}
{{- end -}}
{{- $threshold := default .signal.threshold $scaling.threshold -}}
{{- $type := ternary "AverageValue" "Value" .signal.perPod -}}
{{- $behavior := $root.Values.autoscaling.behavior -}}
{{- if eq $scaling.kind "keda" -}}
{{- $prometheus := $root.Values.autoscaling.prometheus -}}
{{- if not $prometheus.serverAddress -}}
{{- fail (printf "autoscaling.prometheus.serverAddress: is missing, and %s.kind is keda" $path) -}}
{{- end -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ .name }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "redeliver.labels" . | nindent 4 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: StatefulSet
    name: {{ .name }}
  minReplicaCount: {{ int $scaling.minReplicas }}
  maxReplicaCount: {{ int $scaling.maxReplicas }}
  pollingInterval: {{ int $root.Values.autoscaling.pollingInterval }}
  {{- with $behavior }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        {{- toYaml . | nindent 8 }}
  {{- end }}
  triggers:
    - type: prometheus
      metricType: {{ $type }}
      metadata:
        serverAddress: {{ $prometheus.serverAddress | quote }}
        query: {{ default .signal.query $scaling.query | quote }}
        threshold: {{ $threshold | toString | quote }}
        # Without data, the number of pods stays as it is.
        ignoreNullValues: "false"
        {{- with $prometheus.authModes }}
        authModes: {{ . | quote }}
        {{- end }}
      {{- with $prometheus.authenticationRef }}
      authenticationRef:
        {{- toYaml . | nindent 8 }}
      {{- end }}
{{- else -}}
{{- if $scaling.query -}}
{{- fail (printf "%s.query: requires kind: keda; a HorizontalPodAutoscaler reads the external metric %s" $path .signal.metric) -}}
{{- end -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ .name }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "redeliver.labels" . | nindent 4 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: StatefulSet
    name: {{ .name }}
  minReplicas: {{ int $scaling.minReplicas }}
  maxReplicas: {{ int $scaling.maxReplicas }}
  {{- with $behavior }}
  behavior:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  metrics:
    - type: External
      external:
        metric:
          name: {{ .signal.metric }}
          selector:
            matchLabels:
              {{- toYaml .signal.matchLabels | nindent 14 }}
        target:
          type: {{ $type }}
          {{ ternary "averageValue" "value" .signal.perPod }}: {{ $threshold | toString | quote }}
{{- end -}}
{{- end -}}
