{{/*
The topics that `redeliver topics apply` creates (crates/kafka/src/topology/needed.rs), as JSON: by name, `partitions` and, if
Redeliver manages the topic, `config` and the topics whose records must fit into it (`sources`).
*/}}
{{- define "redeliver.topics" -}}
{{- $config := .Values.config -}}
{{- $facts := include "redeliver.facts" . | fromJson -}}
{{- $settings := dig "kafka" "topics" dict $config -}}
{{- $partitions := $facts.partitions -}}
{{- $day := 86400000 | int64 -}}
{{- $retention := dict "text" (default "7d" $settings.retention) "path" "config.kafka.topics.retention" -}}
{{- $retention = include "redeliver.millis" $retention | int64 -}}
{{- $dead := dict "text" (default "30d" $settings.dead_letter_retention) "path" "config.kafka.topics.dead_letter_retention" -}}
{{- $dead = include "redeliver.millis" $dead | int64 -}}
{{- $users := list -}}
{{- $managed := dict -}}
{{- $ingest := dig "scheduler" "topics" "ingest" "scheduler.jobs.ingest" $config -}}
{{- $waiting := list -}}
{{- range $name, $pipeline := $facts.pipelines -}}
{{- $own := $pipeline.settings -}}
{{- $source := default $name $own.source -}}
{{- if not $pipeline.retired -}}
{{- $users = append $users $source -}}
{{- end -}}
{{- if kindIs "map" $own.output -}}
{{- $users = concat $users (values (default dict $own.output.topics)) (list $own.output.default) -}}
{{- else if kindIs "slice" $own.output -}}
{{- $users = concat $users $own.output -}}
{{- else if $own.output -}}
{{- $users = append $users $own.output -}}
{{- end -}}
{{- $path := printf "config.%s.%s.max_wait" (ternary "retired" "pipelines" $pipeline.retired) $name -}}
{{- $longest := include "redeliver.millis" (dict "text" (default "1d" $own.max_wait) "path" $path) | int64 -}}
{{- if eq (toString $own.long_waits) "scheduler" -}}
{{- $waiting = append $waiting $source -}}
{{- $longest = min (int64 (last $pipeline.delays)) $longest -}}
{{- end -}}
{{- $sources := list $source -}}
{{- range $pipeline.delays -}}
{{- $kept := max $retention (add (mul 2 (max $longest (int64 .))) $day) -}}
{{- $topic := printf "%s-retry-%s" $name (include "redeliver.duration" (int64 .)) -}}
{{- $_ := set $managed $topic (dict "sources" $sources "config" (dict "cleanup.policy" "delete" "retention.ms" $kept)) -}}
{{- end -}}
{{- if or $pipeline.retired (ne (toString $own.return_to) "source") -}}
{{- $due := dict "cleanup.policy" "delete" "retention.ms" $retention -}}
{{- $_ := set $managed (printf "%s-retry-due" $name) (dict "sources" $sources "config" $due) -}}
{{- end -}}
{{- $letters := dict "cleanup.policy" "delete" "retention.ms" $dead -}}
{{- $_ := set $managed (printf "%s-dlq" $name) (dict "sources" $sources "config" $letters) -}}
{{- end -}}
{{- $compacted := dict "cleanup.policy" "compact" "delete.retention.ms" (mul 7 $day) -}}
{{- if $facts.jobs -}}
{{- range $app := values (dig "scheduler" "apps" dict $config) -}}
{{- $users = append $users $app.topic -}}
{{- end -}}
{{- $names := dig "scheduler" "topics" dict $config -}}
{{- $_ := set $managed $ingest (dict "sources" $waiting "config" (dict "cleanup.policy" "delete" "retention.ms" $retention)) -}}
{{- $_ := set $managed (default "scheduler.jobs.state" $names.state) (dict "sources" (list $ingest) "config" (deepCopy $compacted)) -}}
{{- $letters := dict "cleanup.policy" "delete" "retention.ms" $dead -}}
{{- $_ := set $managed (default "scheduler.jobs.dlq" $names.dlq) (dict "sources" (list $ingest) "config" $letters) -}}
{{- $answers := dict "cleanup.policy" "delete" "retention.ms" 3600000 -}}
{{- $answers = dict "sources" list "partitions" (min 4 $partitions) "config" $answers -}}
{{- $_ := set $managed (default "scheduler.jobs.answers" $names.answers) $answers -}}
{{- end -}}
{{- $_ := set $managed "redeliver.dlq.ledger" (dict "sources" list "config" (deepCopy $compacted)) -}}
{{- $_ := set $managed "redeliver.dlq.groups" (dict "sources" list "partitions" 1 "config" (deepCopy $compacted)) -}}
{{- $redrives := default (printf "%sredeliver.dlq.redrives" $facts.prefix) (dig "dlq_inspector" "redrive" "topic" "" $config) -}}
{{- $progress := merge (dict "segment.bytes" 33554432 "segment.ms" 600000 "min.cleanable.dirty.ratio" "0.1") $compacted -}}
{{- $_ := set $managed $redrives (dict "sources" list "partitions" 1 "config" (deepCopy $progress)) -}}
{{- if $facts.pipelines -}}
{{- $_ := set $managed (printf "%sredeliver.status" $facts.prefix) (dict "sources" list "partitions" 1 "config" (deepCopy $progress)) -}}
{{- end -}}
{{- $_ := set $managed (printf "%sredeliver.waiting.actions" $facts.prefix) (dict "sources" list "partitions" 1 "config" (deepCopy $progress)) -}}
{{- $control := default (printf "%sredeliver.control" $facts.prefix) (dig "control" "topic" "" $config) -}}
{{- $_ := set $managed $control (dict "sources" list "partitions" 1 "config" (deepCopy $compacted)) -}}
{{- $audit := default (printf "%sredeliver.audit" $facts.prefix) (dig "audit" "topic" "" $config) -}}
{{- $kept := include "redeliver.millis" (dict "text" (dig "audit" "retention" "400d" $config) "path" "config.audit.retention") | int64 -}}
{{- $_ := set $managed $audit (dict "sources" list "partitions" 1 "config" (dict "cleanup.policy" "delete" "retention.ms" $kept "message.timestamp.type" "LogAppendTime")) -}}
{{- $topics := dict -}}
{{- /* An output choice contains null for results that are dropped. */ -}}
{{- range compact $users -}}
{{- $_ := set $topics . (dict "partitions" $partitions) -}}
{{- end -}}
{{- range $name, $topic := $managed -}}
{{- $_ := set $topic.config "retention.bytes" -1 -}}
{{- $limits := dict "topics" $topics "managed" $managed "base" (int64 $.Values.topics.strimzi.maxMessageBytes) -}}
{{- $limit := include "redeliver.maxMessageBytes" (merge (dict "name" $name) $limits) | int64 -}}
{{- if gt $limit 0 -}}
{{- $_ := set $topic.config "max.message.bytes" $limit -}}
{{- end -}}
{{- end -}}
{{- range $name, $topic := $managed -}}
{{- $_ := set $topics $name (dict "partitions" (int64 (default $partitions $topic.partitions)) "config" $topic.config) -}}
{{- end -}}
{{- toJson $topics -}}
{{- end -}}

{{/*
max.message.bytes of a managed topic: that of the source with the largest records, and room for headers. 0 if it is that of
the brokers: { name, topics, managed, base }.
*/}}
{{- define "redeliver.maxMessageBytes" -}}
{{- $largest := int64 0 -}}
{{- range $source := (get .managed .name).sources -}}
{{- $limit := int64 0 -}}
{{- if hasKey $.managed $source -}}
{{- $limit = include "redeliver.maxMessageBytes" (merge (dict "name" $source) (omit $ "name")) | int64 -}}
{{- $limit = max $limit $.base -}}
{{- else if hasKey $.topics $source -}}
{{- $limit = $.base -}}
{{- end -}}
{{- $largest = max $largest $limit -}}
{{- end -}}
{{- ternary 0 (add $largest 16384) (eq $largest 0) -}}
{{- end -}}
