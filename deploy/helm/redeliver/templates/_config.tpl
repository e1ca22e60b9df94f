{{/* The configuration file, and what the chart derives from it. */}}

{{/*
Merges the second map over the first one, as JSON. Unlike mergeOverwrite, it keeps false, 0 and empty values. null removes a key.
*/}}
{{- define "redeliver.merge" -}}
{{- $result := deepCopy (index . 0) -}}
{{- range $key, $value := index . 1 -}}
{{- if and (kindIs "map" $value) (kindIs "map" (get $result $key)) -}}
{{- $_ := set $result $key (include "redeliver.merge" (list (get $result $key) $value) | fromJson) -}}
{{- else if kindIs "invalid" $value -}}
{{- $_ := unset $result $key -}}
{{- else -}}
{{- $_ := set $result $key $value -}}
{{- end -}}
{{- end -}}
{{- toJson $result -}}
{{- end -}}

{{/*
The login to Kafka as JSON: `properties` of the client, `login` by tokens, `secrets` to mount below /run/secrets (the keys of
each Secret), and `env`.
*/}}
{{- define "redeliver.kafka" -}}
{{- $kafka := .Values.kafka -}}
{{- $properties := dict -}}
{{- $login := dict -}}
{{- $secrets := dict -}}
{{- $env := list -}}
{{- $oidc := $kafka.oidc -}}
{{- /* Its map may be empty. */ -}}
{{- $iam := kindIs "map" (dig "kafka" "login" "msk_iam" "" .Values.config) -}}
{{- if and $iam (or $oidc.secret.name $kafka.access.secret $kafka.sasl.mechanism) -}}
{{- fail "config.kafka.login.msk_iam: cannot be combined with kafka.oidc.secret.name, kafka.access.secret or kafka.sasl.mechanism" -}}
{{- end -}}
{{- if $oidc.secret.name -}}
{{- if or $kafka.access.secret $kafka.sasl.mechanism -}}
{{- fail "kafka.oidc.secret.name: cannot be combined with kafka.access.secret or kafka.sasl.mechanism" -}}
{{- else if not (dig "kafka" "login" "oidc" "token_url" "" .Values.config) -}}
{{- fail "config.kafka.login.oidc.token_url: is missing; kafka.oidc.secret contains only the client secret" -}}
{{- end -}}
{{- else if $oidc.caSecret.name -}}
{{- fail "kafka.oidc.caSecret.name: is set, but kafka.oidc.secret.name is not" -}}
{{- end -}}
{{- if $kafka.access.secret -}}
{{- if or $kafka.tls.enabled $kafka.sasl.mechanism -}}
{{- fail "kafka.access.secret: cannot be combined with kafka.tls.enabled or kafka.sasl.mechanism; the Secret of a KafkaAccess contains the whole login" -}}
{{- end -}}
{{- $secret := $kafka.access.secret -}}
{{- $keys := list "securityProtocol" -}}
{{- $_ := set $properties "security.protocol" (dict "file" "/run/secrets/kafka/securityProtocol") -}}
{{- if $kafka.access.tls -}}
{{- $keys = append $keys "ssl.truststore.crt" -}}
{{- $_ := set $properties "ssl.ca.location" "/run/secrets/kafka/ssl.truststore.crt" -}}
{{- end -}}
{{- if eq $kafka.access.authentication "scram-sha-512" -}}
{{- $keys = concat $keys (list "saslMechanism" "username" "password") -}}
{{- $_ := set $properties "sasl.mechanism" (dict "file" "/run/secrets/kafka/saslMechanism") -}}
{{- $_ := set $properties "sasl.username" (dict "file" "/run/secrets/kafka/username") -}}
{{- $_ := set $properties "sasl.password" (dict "file" "/run/secrets/kafka/password") -}}
{{- else if eq $kafka.access.authentication "tls" -}}
{{- $keys = concat $keys (list "ssl.keystore.crt" "ssl.keystore.key") -}}
{{- $_ := set $properties "ssl.certificate.location" "/run/secrets/kafka/ssl.keystore.crt" -}}
{{- $_ := set $properties "ssl.key.location" "/run/secrets/kafka/ssl.keystore.key" -}}
{{- end -}}
{{- $_ := set $secrets "kafka" (dict "secret" $secret "keys" $keys) -}}
{{- $source := dict "secretKeyRef" (dict "name" $secret "key" "bootstrapServers") -}}
{{- $env = append $env (dict "name" "REDELIVER__KAFKA__BROKERS" "valueFrom" $source) -}}
{{- else -}}
{{- $tls := $kafka.tls -}}
{{- $sasl := $kafka.sasl -}}
{{- if not $tls.enabled -}}
{{- if $tls.caSecret.name -}}
{{- fail "kafka.tls.caSecret.name: is set, but kafka.tls.enabled is not" -}}
{{- else if $tls.clientSecret.name -}}
{{- fail "kafka.tls.clientSecret.name: is set, but kafka.tls.enabled is not" -}}
{{- end -}}
{{- end -}}
{{- if $sasl.mechanism -}}
{{- if not $sasl.secret.name -}}
{{- fail "kafka.sasl.secret.name: is missing; name the Secret with the password" -}}
{{- else if not (or $sasl.username $sasl.secret.usernameKey) -}}
{{- fail "kafka.sasl.username: is missing; set it, or kafka.sasl.secret.usernameKey" -}}
{{- end -}}
{{- else if or $sasl.username $sasl.secret.name -}}
{{- fail "kafka.sasl.mechanism: is missing; set it, such as SCRAM-SHA-512" -}}
{{- end -}}
{{- $logsIn := or (or $sasl.mechanism $oidc.secret.name | empty | not) $iam -}}
{{- if or $tls.enabled $logsIn -}}
{{- $protocol := ternary (ternary "SASL_SSL" "SSL" $logsIn) "SASL_PLAINTEXT" (not (empty $tls.enabled)) -}}
{{- $_ := set $properties "security.protocol" $protocol -}}
{{- end -}}
{{- if $tls.caSecret.name -}}
{{- $_ := set $secrets "kafka-ca" (dict "secret" $tls.caSecret.name "keys" (list $tls.caSecret.key)) -}}
{{- $_ := set $properties "ssl.ca.location" (printf "/run/secrets/kafka-ca/%s" $tls.caSecret.key) -}}
{{- end -}}
{{- with $tls.clientSecret -}}
{{- if .name -}}
{{- $_ := set $secrets "kafka-client" (dict "secret" .name "keys" (list .certKey .keyKey)) -}}
{{- $_ := set $properties "ssl.certificate.location" (printf "/run/secrets/kafka-client/%s" .certKey) -}}
{{- $_ := set $properties "ssl.key.location" (printf "/run/secrets/kafka-client/%s" .keyKey) -}}
{{- end -}}
{{- end -}}
{{- if $sasl.mechanism -}}
{{- $keys := list $sasl.secret.passwordKey -}}
{{- $_ := set $properties "sasl.mechanism" $sasl.mechanism -}}
{{- $_ := set $properties "sasl.password" (dict "file" (printf "/run/secrets/kafka-sasl/%s" $sasl.secret.passwordKey)) -}}
{{- if $sasl.secret.usernameKey -}}
{{- $keys = append $keys $sasl.secret.usernameKey -}}
{{- $_ := set $properties "sasl.username" (dict "file" (printf "/run/secrets/kafka-sasl/%s" $sasl.secret.usernameKey)) -}}
{{- else -}}
{{- $_ := set $properties "sasl.username" $sasl.username -}}
{{- end -}}
{{- $_ := set $secrets "kafka-sasl" (dict "secret" $sasl.secret.name "keys" $keys) -}}
{{- end -}}
{{- if $oidc.secret.name -}}
{{- $_ := set $secrets "kafka-oidc" (dict "secret" $oidc.secret.name "keys" (list $oidc.secret.key)) -}}
{{- $client := dict "client_secret" (dict "file" (printf "/run/secrets/kafka-oidc/%s" $oidc.secret.key)) -}}
{{- if $oidc.caSecret.name -}}
{{- $_ := set $secrets "kafka-oidc-ca" (dict "secret" $oidc.caSecret.name "keys" (list $oidc.caSecret.key)) -}}
{{- $_ := set $client "ca_file" (printf "/run/secrets/kafka-oidc-ca/%s" $oidc.caSecret.key) -}}
{{- end -}}
{{- $_ := set $login "login" (dict "oidc" $client) -}}
{{- end -}}
{{- end -}}
{{- toJson (dict "properties" $properties "login" $login "secrets" $secrets "env" $env) -}}
{{- end -}}

{{/* redeliver.yaml as JSON. */}}
{{- define "redeliver.config" -}}
{{- $kafka := include "redeliver.kafka" . | fromJson -}}
{{- $config := .Values.config -}}
{{- $settings := $kafka.login -}}
{{- if $kafka.properties -}}
{{- $settings = merge (dict "properties" $kafka.properties) $settings -}}
{{- end -}}
{{- if $settings -}}
{{- /* What the user has set directly wins. */ -}}
{{- $config = include "redeliver.merge" (list (dict "kafka" $settings) $config) | fromJson -}}
{{- end -}}
{{- toJson $config -}}
{{- end -}}

{{/* The names of a Service, as a JSON array: { root, host }. */}}
{{- define "redeliver.serviceNames" -}}
{{- $inNamespace := printf "%s.%s" .host .root.Release.Namespace -}}
{{- list .host $inNamespace (printf "%s.svc" $inNamespace) (printf "%s.svc.cluster.local" $inNamespace) | toJson -}}
{{- end -}}

{{/* "true" if the API with this suffix runs, so that the console calls it: { root, suffix }. */}}
{{- define "redeliver.consoleCalls" -}}
{{- $facts := include "redeliver.facts" .root | fromJson -}}
{{- if or (ne .suffix "scheduler") (and .root.Values.scheduler.enabled $facts.jobs) -}}true{{- end -}}
{{- end -}}

{{/* redeliver.yaml of the console as JSON: it needs neither Kafka nor pipelines, and none of their secrets. */}}
{{- define "redeliver.consoleConfig" -}}
{{- $console := .Values.console -}}
{{- $host := include "redeliver.facts" . | fromJson | dig "host" "" -}}
{{- $settings := dict "listen" (printf "%s:%d" $host (int $console.port)) "allow_remote" true "sign_in" $console.signIn -}}
{{- $hosts := concat $console.hosts (list $console.ingress.host) -}}
{{- if $console.tls.secret.name -}}
{{- $hosts = concat $hosts (include "redeliver.serviceNames" (dict "root" . "host" (include "redeliver.objectName" (dict "root" . "suffix" "console"))) | fromJsonArray) -}}
{{- end -}}
{{- $hosts = $hosts | compact | uniq -}}
{{- $_ := set $settings "hosts" $hosts -}}
{{- if $console.cookieKeysSecret.name -}}
{{- $_ := set $settings "cookie_keys_file" (printf "/run/secrets/cookie-keys/%s" $console.cookieKeysSecret.key) -}}
{{- end -}}
{{- if eq $console.signIn "oidc" -}}
{{- $oidc := $console.oidc -}}
{{- if $console.oidcSecret.name -}}
{{- $oidc = merge (dict "client_secret" (dict "file" (printf "/run/secrets/oidc/%s" $console.oidcSecret.key))) $oidc -}}
{{- end -}}
{{- if $console.oidcCaSecret.name -}}
{{- $oidc = merge (dict "ca_file" (printf "/run/secrets/oidc-ca/%s" $console.oidcCaSecret.key)) $oidc -}}
{{- end -}}
{{- $_ := set $settings "oidc" $oidc -}}
{{- end -}}
{{- $root := . -}}
{{- range $section, $service := dict "inspector" (list "dlq-inspector" .Values.dlqInspector) "scheduler" (list "scheduler" .Values.scheduler) -}}
{{- $suffix := first $service -}}
{{- $api := (last $service).api -}}
{{- $certificate := not (empty $api.tls.secret.name) -}}
{{- /* Nothing answers at the address of a scheduler that does not run; with https://, nothing gets a token there either. */ -}}
{{- $hasTls := or $certificate (not (include "redeliver.consoleCalls" (dict "root" $root "suffix" $suffix))) -}}
{{- $name := include "redeliver.objectName" (dict "root" $root "suffix" $suffix) -}}
{{- $called := dict "url" (printf "%s://%s:%d" (ternary "https" "http" $hasTls) $name (int $api.port)) -}}
{{- if not $hasTls -}}
{{- $_ := set $called "allow_plaintext_token" $console.allowPlaintextToken -}}
{{- else -}}
{{- if and $certificate $api.tls.secret.caKey -}}
{{- $_ := set $called "ca_file" (printf "/run/secrets/%s-ca/%s" $suffix $api.tls.secret.caKey) -}}
{{- end -}}
{{- with $console.clientSecret -}}
{{- if .name -}}
{{- $_ := set $called "cert_file" (printf "/run/secrets/client/%s" .certKey) -}}
{{- $_ := set $called "key_file" (printf "/run/secrets/client/%s" .keyKey) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $_ := set $settings $section $called -}}
{{- end -}}
{{- $config := pick .Values.config "admin" "telemetry" "shutdown" "console" -}}
{{- include "redeliver.merge" (list $config (dict "console" $settings)) -}}
{{- end -}}

{{/*
What the templates need to know of the configuration, as JSON:
`pipelines`: all of them with their settings, `retired` and `delays` (milliseconds);
`tiers`: their names in ascending order;
`host` and `adminPort` of the admin port;
`partitions` of topics; `prefix` of consumer groups; `grace`: terminationGracePeriodSeconds;
`jobs`: whether there is work for the scheduler.
*/}}
{{- define "redeliver.facts" -}}
{{- $config := .Values.config -}}
{{- $pipelines := dict -}}
{{- $padded := list -}}
{{- $jobs := not (empty (dig "scheduler" "apps" dict $config)) -}}
{{- range $section := list "retired" "pipelines" -}}
{{- range $name, $settings := default dict (get $config $section) -}}
{{- $settings = default dict $settings -}}
{{- $path := printf "config.%s.%s.retry" $section $name -}}
{{- $delays := include "redeliver.delays" (dict "retry" $settings.retry "path" $path) | fromJsonArray -}}
{{- range $delays -}}
{{- $padded = append $padded (printf "%020d" (int64 .)) -}}
{{- end -}}
{{- if eq (toString $settings.long_waits) "scheduler" -}}
{{- $jobs = true -}}
{{- end -}}
{{- $_ := set $pipelines $name (dict "settings" $settings "retired" (eq $section "retired") "delays" $delays) -}}
{{- end -}}
{{- end -}}
{{- $tiers := list -}}
{{- range $padded | uniq | sortAlpha -}}
{{- $tiers = append $tiers (include "redeliver.duration" (regexReplaceAll "^0+" . "" | int64)) -}}
{{- end -}}
{{- $listen := dig "admin" "listen" "" $config | toString -}}
{{- $port := regexFind "[0-9]+$" $listen -}}
{{- if not (regexMatch "^.+:[1-9][0-9]*$" $listen) -}}
{{- fail (printf "config.admin.listen: `%s` is not an address with a port, such as 0.0.0.0:9464" $listen) -}}
{{- end -}}
{{- $grace := dig "shutdown" "grace" "25s" $config -}}
{{- $grace = include "redeliver.millis" (dict "text" $grace "path" "config.shutdown.grace") | int64 -}}
{{- $facts := dict "pipelines" $pipelines "tiers" $tiers "jobs" $jobs -}}
{{- $_ := set $facts "host" (trimSuffix (printf ":%s" $port) $listen) -}}
{{- $_ := set $facts "adminPort" (int $port) -}}
{{- $_ := set $facts "partitions" (int64 (dig "kafka" "topics" "partitions" 12 $config)) -}}
{{- $_ := set $facts "prefix" (dig "kafka" "id_prefix" "" $config) -}}
{{- /* The process needs a moment beyond its own grace, before it is killed. */ -}}
{{- $_ := set $facts "grace" (add 10 (div (add $grace 999) 1000)) -}}
{{- toJson $facts -}}
{{- end -}}

{{/* Refuses values that contradict each other. values.schema.json checks each value by itself. */}}
{{- define "redeliver.validate" -}}
{{- $config := .Values.config -}}
{{- $facts := include "redeliver.facts" . | fromJson -}}
{{- $own := dict -}}
{{- $_ := set $own "instance" "the name of the pod is the instance" -}}
{{- $_ := set $own "retry_tier.tiers" "each tier has its own StatefulSet; see retryTiers" -}}
{{- $_ := set $own "retry_tier.leftovers" "see leftovers.tiers" -}}
{{- $_ := set $own "enricher.pipelines" "each pipeline has its own StatefulSet; see enrichers" -}}
{{- range $section, $value := dict "scheduler" "scheduler" "dlq_inspector" "dlqInspector" -}}
{{- $_ := set $own (printf "%s.listen" $section) (printf "set %s.api.port" $value) -}}
{{- $_ := set $own (printf "%s.token_file" $section) (printf "set %s.api.tokenSecret" $value) -}}
{{- $_ := set $own (printf "%s.auth" $section) (printf "set %s.api.tokensSecret, jwt or clientCertificates" $value) -}}
{{- $_ := set $own (printf "%s.allow_remote" $section) (printf "set %s.api.allowUnauthenticated" $value) -}}
{{- $_ := set $own (printf "%s.tls" $section) (printf "set %s.api.tls" $value) -}}
{{- end -}}
{{- $_ := set $own "admin.tls" "set admin.tls" -}}
{{- range $key, $value := dict "listen" "port" "allow_remote" "signIn" "hosts" "hosts or ingress.host" "tls" "tls" "sign_in" "signIn" "oidc" "oidc" "cookie_keys_file" "cookieKeysSecret" -}}
{{- $_ := set $own (printf "console.%s" $key) (printf "set console.%s" $value) -}}
{{- end -}}
{{- range $service := list "inspector" "scheduler" -}}
{{- $_ := set $own (printf "console.%s" $service) "it calls those of the release" -}}
{{- end -}}
{{- $_ := set $own "dlq_inspector.data_dir" "set dlqInspector.persistence" -}}
{{- range $key, $remedy := $own -}}
{{- $keys := splitList "." $key -}}
{{- $parent := ternary $config (default dict (get $config (first $keys))) (eq (len $keys) 1) -}}
{{- if hasKey $parent (last $keys) -}}
{{- fail (printf "config.%s: the chart sets it for each pod; %s" $key $remedy) -}}
{{- end -}}
{{- end -}}
{{- /* null removes what another values file has set for a tier or an enricher. */ -}}
{{- range $name, $own := $.Values.retryTiers -}}
{{- $tier := include "redeliver.duration" (include "redeliver.millis" (dict "text" $name "path" "retryTiers") | int64) -}}
{{- if ne $tier $name -}}
{{- fail (printf "retryTiers.%s: write it as %s" $name $tier) -}}
{{- else if and (kindIs "map" $own) (not (has $name $facts.tiers)) -}}
{{- fail (printf "retryTiers.%s: no pipeline has this tier; config.pipelines has %s" $name (default "no tiers" (join ", " $facts.tiers))) -}}
{{- end -}}
{{- end -}}
{{- range $index, $name := $.Values.leftovers.tiers -}}
{{- $tier := include "redeliver.duration" (include "redeliver.millis" (dict "text" $name "path" "leftovers.tiers") | int64) -}}
{{- if ne $tier $name -}}
{{- fail (printf "leftovers.tiers: write %s as %s" $name $tier) -}}
{{- else if has $name $facts.tiers -}}
{{- fail (printf "leftovers.tiers: a pipeline has the tier %s, whose own pods release its records; remove it here" $name) -}}
{{- end -}}
{{- end -}}
{{- if and $.Values.leftovers.tiers (not $facts.pipelines) -}}
{{- fail "leftovers.tiers: there is no pipeline; list the previous ones under config.retired" -}}
{{- end -}}
{{- range $name, $own := $.Values.enrichers -}}
{{- if kindIs "map" $own -}}
{{- $pipeline := get $facts.pipelines $name -}}
{{- if not $pipeline -}}
{{- fail (printf "enrichers.%s: there is no pipeline with this name; config.pipelines has %s" $name (keys $facts.pipelines | sortAlpha | join ", " | default "none")) -}}
{{- else if not $pipeline.settings.http -}}
{{- fail (printf "enrichers.%s: the pipeline has no `http`, so the enricher does not serve it" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $url := dig "redis" "url" "" $config | toString -}}
{{- with $.Values.redis -}}
{{- if and .secret (not (or .urlKey .passwordKey)) -}}
{{- fail "redis.secret: set redis.urlKey or redis.passwordKey too" -}}
{{- else if and (or .urlKey .passwordKey) (not .secret) -}}
{{- fail "redis.secret: is missing; name the Secret" -}}
{{- else if and .urlKey .passwordKey -}}
{{- fail "redis.passwordKey: cannot be combined with redis.urlKey; the URL contains the password" -}}
{{- else if and .passwordKey (not (contains "$(REDIS_PASSWORD)" $url)) -}}
{{- fail "redis.passwordKey: config.redis.url does not contain $(REDIS_PASSWORD), such as rediss://:$(REDIS_PASSWORD)@redis:6379" -}}
{{- else if and (contains "$(REDIS_PASSWORD)" $url) (not .passwordKey) -}}
{{- fail "redis.passwordKey: is missing, and config.redis.url contains $(REDIS_PASSWORD)" -}}
{{- end -}}
{{- end -}}
{{- $listeners := dict "admin.tls" $.Values.admin.tls "scheduler.api.tls" $.Values.scheduler.api.tls -}}
{{- $_ := set $listeners "dlqInspector.api.tls" $.Values.dlqInspector.api.tls -}}
{{- $_ := set $listeners "console.tls" $.Values.console.tls -}}
{{- range $path, $tls := $listeners -}}
{{- if and $tls.clientCaSecret.name (not $tls.secret.name) -}}
{{- fail (printf "%s.secret.name: is missing, and %s.clientCaSecret.name is set; name the Secret with the certificate" $path $path) -}}
{{- end -}}
{{- end -}}
{{- if $.Values.certManager.issuerRef -}}
{{- range $path, $tls := $listeners -}}
{{- range $field, $issued := dict "certKey" "tls.crt" "keyKey" "tls.key" -}}
{{- $key := get $tls.secret $field -}}
{{- if and $tls.secret.name (ne $key $issued) -}}
{{- fail (printf "%s.secret.%s: is %s, but certManager.issuerRef is set, and Secrets of cert-manager contain %s" $path $field $key $issued) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $.Values.console -}}
{{- if .enabled -}}
{{- if not (include "redeliver.isExposed" $.Values.dlqInspector.api) -}}
{{- fail "dlqInspector.api: the console cannot reach it; configure its authentication, or allowUnauthenticated" -}}
{{- else if and (eq .signIn "oidc") (not .oidc.issuer) -}}
{{- fail "console.oidc.issuer: is missing, and console.signIn is oidc" -}}
{{- else if and (eq .signIn "oidc") (not .oidc.client_id) -}}
{{- fail "console.oidc.client_id: is missing, and console.signIn is oidc" -}}
{{- else if and (eq .signIn "none") .cookieKeysSecret.name -}}
{{- fail "console.cookieKeysSecret: requires console.signIn: token or oidc" -}}
{{- else if and (ne .signIn "oidc") .oidc -}}
{{- fail "console.oidc: requires console.signIn: oidc" -}}
{{- else if and (gt (int .replicas) 1) (ne .signIn "none") (not .cookieKeysSecret.name) -}}
{{- fail "console.cookieKeysSecret.name: is missing; pods that share no keys of cookies do not know the sessions of each other" -}}
{{- else if and (ne .signIn "none") (not (or .tls.secret.name .ingress.host .hosts)) -}}
{{- fail "console.ingress.host: is missing; set it, console.hosts if another proxy has the certificate, or console.tls, because browsers keep sessions only with HTTPS" -}}
{{- end -}}
{{- if and (ne .signIn "none") (not .allowPlaintextToken) -}}
{{- range $suffix, $value := dict "dlq-inspector" "dlqInspector" "scheduler" "scheduler" -}}
{{- if and (include "redeliver.consoleCalls" (dict "root" $ "suffix" $suffix)) (not (index $.Values $value).api.tls.secret.name) -}}
{{- fail (printf "%s.api.tls.secret.name: is missing; set it, or console.allowPlaintextToken, because the console sends tokens of viewers to this API" $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $.Values.podMonitor.enabled $.Values.admin.tls.secret.name (not $.Values.podMonitor.tlsConfig) -}}
{{- fail "podMonitor.tlsConfig: is missing, and admin.tls.secret.name is set; set `ca`, `serverName` and, for admin.tls.clientCaSecret, `cert` and `keySecret`" -}}
{{- else if and $.Values.podMonitor.enabled $.Values.admin.tls.clientCaSecret.name -}}
{{- range $key := list "cert" "keySecret" -}}
{{- if not (get $.Values.podMonitor.tlsConfig $key) -}}
{{- fail (printf "podMonitor.tlsConfig.%s: is missing, and admin.tls.clientCaSecret.name is set; without a client certificate, /metrics does not answer" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq $.Values.topics.provisioner "strimzi") (not $.Values.topics.strimzi.cluster) -}}
{{- fail "topics.strimzi.cluster: is missing; name the Kafka object" -}}
{{- end -}}
{{- /* Only a real upgrade can see these. */ -}}
{{- range (lookup "apps/v1" "StatefulSet" $.Release.Namespace "").items -}}
{{- $labels := default dict .metadata.labels -}}
{{- if and (eq (get $labels "app.kubernetes.io/instance") $.Release.Name) (eq (get $labels "app.kubernetes.io/component") "retry-tier") -}}
{{- $tier := get $labels "redeliver/tier" -}}
{{- if not (or (has $tier $facts.tiers) (has $tier $.Values.leftovers.tiers)) -}}
{{- fail (printf "leftovers.tiers: no pipeline has the tier %s any more, and records may wait in it; add it here until `redeliver topics check` says that its topics are empty" $tier) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
