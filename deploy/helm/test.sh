#!/usr/bin/env bash
# Tests the chart without a cluster: lint, the table of values, strict validation of everything it renders, and the errors that
# it must report. Needs helm 3, kubeconform and python3.
#
#   SCHEMAS=FOLDER    schemas written by schemas.py. Without it, kubeconform downloads them.
#   BINARIES=FOLDER   the programs. With it, check-pods.py runs each container with --check. Needs pyyaml.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

locations=(-schema-location default -schema-location
    'https://raw.githubusercontent.com/datreeio/CRDs-catalog/main/{{.Group}}/{{.ResourceKind}}_{{.ResourceAPIVersion}}.json')
if [ -n "${SCHEMAS:-}" ]; then
    [ -e "$SCHEMAS/statefulset-apps-v1.json" ] || { echo "error: no schemas in $SCHEMAS; run schemas.py" >&2; exit 1; }
    locations=(-schema-location "$SCHEMAS/{{.ResourceKind}}{{.KindSuffix}}.json")
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0
failed=0

pass() { passed=$((passed + 1)); }
fail() {
    failed=$((failed + 1))
    echo "FAILED: $1"
    sed 's/^/    /' "${2:-/dev/null}"
}

render() { helm template test redeliver --namespace apps --kube-version 1.34.0 "$@"; }

# valid NAME [FLAGS]: renders, and every object is valid.
valid() {
    local name=$1
    shift
    if ! render "$@" >"$work/out.yaml" 2>"$work/err"; then
        fail "$name: cannot be rendered" "$work/err"
    elif ! kubeconform -strict -kubernetes-version 1.34.0 "${locations[@]}" "$work/out.yaml" >"$work/err" 2>&1; then
        fail "$name: invalid objects" "$work/err"
    elif [ -n "${BINARIES:-}" ] && ! ./check-pods.py "$BINARIES" <"$work/out.yaml" >"$work/err" 2>&1; then
        fail "$name: the programs refuse flags, environment or configuration" "$work/err"
    else
        pass
    fi
}

# contains NAME TEXT [FLAGS]: what is rendered contains the text.
contains() {
    local name=$1 text=$2
    shift 2
    if ! render "$@" >"$work/out.yaml" 2>"$work/err"; then
        fail "$name: cannot be rendered" "$work/err"
    elif ! grep --quiet --fixed-strings -- "$text" "$work/out.yaml"; then
        fail "$name: does not contain: $text"
    else
        pass
    fi
}

# refused TEXT [FLAGS]: is not rendered, and the error contains the text.
refused() {
    local text=$1
    shift
    if render "$@" >/dev/null 2>"$work/err"; then
        fail "accepted, but must be refused: $text"
    elif ! grep --quiet --fixed-strings -- "$text" "$work/err"; then
        fail "the error does not contain: $text" "$work/err"
    else
        pass
    fi
}

if ./values-table.py --check 2>"$work/err"; then pass; else fail "the table of values" "$work/err"; fi

if helm lint --strict redeliver >"$work/err" 2>&1; then pass; else fail "lint: default values" "$work/err"; fi
valid "default values"
for example in redeliver/examples/*.yaml ../one-shot/*.yaml; do
    case $example in
        *-servers.yaml | *one-shot*)
            if kubeconform -strict -kubernetes-version 1.34.0 "${locations[@]}" "$example" >"$work/err" 2>&1; then
                pass
            else
                fail "$example" "$work/err"
            fi
            continue
            ;;
    esac
    if helm lint --strict redeliver --values "$example" >"$work/err" 2>&1; then pass; else fail "lint: $example" "$work/err"; fi
    valid "$example" --values "$example"
done

# All values of the docs together. What they say of TLS and tokens of one API is also for the other one.
awk -v work="$work" '/^ *```yaml$/ { file = sprintf("%s/docs-%02d.yaml", work, ++n); next } /^ *```$/ { file = "" } file { print > file }' \
    ../../docs/kubernetes.md
docs=()
for block in "$work"/docs-*.yaml; do docs+=(--values "$block"); done
valid "the values of the docs" "${docs[@]}" --set dlqInspector.api.tls.secret.name=redeliver-tls --set dlqInspector.api.tokensSecret.name=tokens

# A pipeline and a job application, with everything else left at its default.
cat >"$work/base.yaml" <<'YAML'
config:
  pipelines:
    docs: { output: enriched, retry: { tiers: [5s, 30s, 1m] }, http: { url: "http://endpoint/" } }
    custom: { retry: { base: 2m, factor: 2, max_retries: 5, cap: 10m } }
  scheduler: { apps: { docs: { topic: docs } } }
YAML
base=(--values "$work/base.yaml")
keda='enabled: true, kind: keda, minReplicas: 1, maxReplicas: 12'

# Every option.
cat >"$work/all.yaml" <<'YAML'
commonLabels: { team: data }
image: { registry: registry.example.com/team, tag: 1.2.3, pullSecrets: [{ name: registry }] }
config:
  kafka: { id_prefix: staging- }
  pipelines:
    Docs_V2.x: { retry: {}, http: { url: "http://endpoint/" }, long_waits: scheduler }
  retired:
    previous: { retry: { tiers: [2m] }, http: { url: "http://endpoint/" } }
  redis: { url: "rediss://:$(REDIS_PASSWORD)@redis:6379" }
  lake: { location: "s3://bucket/redeliver", flush_interval: 5m }
  admin: { listen: "[::]:9999" }
  shutdown: { grace: 90s }
kafka:
  tls: { enabled: true, caSecret: { name: ca }, clientSecret: { name: client } }
  sasl: { mechanism: SCRAM-SHA-256, secret: { name: sasl, usernameKey: user } }
redis: { secret: redis, passwordKey: password, caSecret: { name: redis-ca } }
retryTier:
  podAnnotations: { a: b }
  autoscaling: { enabled: true, kind: hpa, minReplicas: 2, maxReplicas: 12, threshold: 0.5 }
retryTiers:
  5s: { replicas: 0, nodeSelector: { disk: fast }, autoscaling: { enabled: false } }
  30s: { autoscaling: { enabled: true, kind: keda, minReplicas: 1, maxReplicas: 24, partitions: 24 } }
leftovers: { tiers: [15s, 1h], resources: { limits: { memory: 64Mi } } }
admin: { tls: { secret: { name: admin }, clientCaSecret: { name: clients } } }
certManager: { issuerRef: { kind: ClusterIssuer, name: internal }, spec: { duration: 720h, renewBefore: 240h } }
scheduler:
  autoscaling: { enabled: true, kind: keda, minReplicas: 1, maxReplicas: 3 }
  api:
    port: 8443
    tokenSecret: { name: token }
    tokensSecret: { name: tokens }
    jwt: { issuer: "https://login.example.org", audience: redeliver, jwks_url: "https://login.example.org/keys", roles: { admin: ["jobs:*"] } }
    tls: { secret: { name: scheduler } }
    service: { type: LoadBalancer, annotations: { a: b } }
enricher:
  autoscaling: { enabled: true, kind: keda, minReplicas: 1, maxReplicas: 12 }
enrichers:
  previous: { autoscaling: { enabled: true, kind: hpa, minReplicas: 1, maxReplicas: 2 } }
dlqInspector:
  persistence: { enabled: true, storageClass: fast }
  api:
    tls: { secret: { name: inspector }, clientCaSecret: { name: inspector } }
    clientCertificates: [{ uri: "spiffe://example.org/*", scopes: ["dead-letters:read"] }]
console:
  enabled: true
  replicas: 2
  signIn: oidc
  oidc: { issuer: "https://login.example.org", client_id: console, scope: openid offline_access, parameters: { audience: redeliver }, token: id_token }
  oidcSecret: { name: console }
  oidcCaSecret: { name: idp }
  cookieKeysSecret: { name: console }
  clientSecret: { name: console-client }
  hosts: [console.internal]
  tls: { secret: { name: console-tls }, clientCaSecret: { name: browsers } }
  ingress: { host: console.example.org, className: nginx, tlsSecret: console-public, annotations: { a: b } }
  service: { annotations: { a: b } }
  podLabels: { g: h }
lake: { enabled: true, extraEnv: [{ name: AWS_REGION, value: eu-central-1 }], podLabels: { g: h } }
autoscaling:
  prometheus: { serverAddress: "http://prometheus", authModes: bearer, authenticationRef: { name: prometheus } }
podAnnotations: { c: d }
podLabels: { e: f }
nodeSelector: { kubernetes.io/os: linux }
tolerations: [{ key: dedicated, operator: Exists }]
affinity: { nodeAffinity: { preferredDuringSchedulingIgnoredDuringExecution: [] } }
topologySpreadConstraints:
  - { maxSkew: 2, topologyKey: zone, whenUnsatisfiable: DoNotSchedule, labelSelector: { matchLabels: { own: selector } } }
priorityClassName: high
extraEnv: [{ name: RUST_LOG, value: debug }]
extraVolumes: [{ name: extra, emptyDir: {} }]
extraVolumeMounts: [{ name: extra, mountPath: /extra }]
serviceAccount: { annotations: { eks.amazonaws.com/role-arn: "arn:aws:iam::1:role/x" } }
networkPolicy: { enabled: true, egress: [{ to: [{ podSelector: {} }] }] }
podMonitor:
  enabled: true
  labels: { release: prometheus }
  tlsConfig:
    serverName: redeliver
    ca: { secret: { name: admin, key: ca.crt } }
    cert: { secret: { name: prometheus, key: tls.crt } }
    keySecret: { name: prometheus, key: tls.key }
  metricRelabelings: [{ action: labeldrop, regex: x }]
prometheusRule: { enabled: true, alertLabels: { team: data } }
dashboards: { enabled: true, annotations: { folder: Redeliver } }
extraObjects:
  - { apiVersion: v1, kind: ConfigMap, metadata: { name: "{{ .Release.Name }}-extra" } }
  - |
    apiVersion: v1
    kind: ConfigMap
    metadata: { name: {{ .Release.Name }}-text }
YAML
for provisioner in job none strimzi; do
    valid "every option, topics by $provisioner" --values "$work/all.yaml" --set topics.provisioner=$provisioner \
        --set topics.strimzi.cluster=main --set topics.strimzi.userTopics=true
    valid "few options, topics by $provisioner" "${base[@]}" --set topics.provisioner=$provisioner \
        --set topics.strimzi.cluster=main
done
# Results of an output choice that are dropped, which have no topic.
cat >"$work/dropped.yaml" <<'YAML'
config:
  pipelines:
    docs:
      output: { by: status, topics: { "200": ready, "204": null }, default: null }
      retry: { tiers: [5s] }
      http: { url: "http://endpoint/" }
topics: { strimzi: { cluster: main, userTopics: true } }
YAML
for provisioner in job none strimzi; do
    valid "dropped results, topics by $provisioner" --values "$work/dropped.yaml" --set topics.provisioner=$provisioner
done
for id_prefix in "" staging-; do
    contains "the audit topic of the prefix '$id_prefix'" "topicName: \"${id_prefix}redeliver.audit\"" "${base[@]}" \
        --set topics.provisioner=strimzi --set topics.strimzi.cluster=main --set-string config.kafka.id_prefix=$id_prefix
    contains "the status topic of the prefix '$id_prefix'" "topicName: \"${id_prefix}redeliver.status\"" "${base[@]}" \
        --set topics.provisioner=strimzi --set topics.strimzi.cluster=main --set-string config.kafka.id_prefix=$id_prefix
    contains "the topic of actions of the prefix '$id_prefix'" "topicName: \"${id_prefix}redeliver.waiting.actions\"" "${base[@]}" \
        --set topics.provisioner=strimzi --set topics.strimzi.cluster=main --set-string config.kafka.id_prefix=$id_prefix
    contains "the control topic of the prefix '$id_prefix'" "topicName: \"${id_prefix}redeliver.control\"" "${base[@]}" \
        --set topics.provisioner=strimzi --set topics.strimzi.cluster=main --set-string config.kafka.id_prefix=$id_prefix
done
contains "the topic of the states of groups" 'topicName: "redeliver.dlq.groups"' "${base[@]}" \
    --set topics.provisioner=strimzi --set topics.strimzi.cluster=main
contains "the topic of redrives" 'topicName: "redeliver.dlq.redrives"' "${base[@]}" \
    --set topics.provisioner=strimzi --set topics.strimzi.cluster=main
contains "the topics of a choice with dropped results" 'topicName: "ready"' --values "$work/dropped.yaml" --set topics.provisioner=strimzi
for kind in keda hpa; do
    for workload in retryTier scheduler enricher; do
        valid "$workload scaled by $kind" "${base[@]}" --set autoscaling.prometheus.serverAddress=http://prometheus \
            --set-json "$workload.autoscaling={\"enabled\":true,\"kind\":\"$kind\",\"minReplicas\":1,\"maxReplicas\":12}"
    done
done
for login in scram-sha-512 tls none; do
    valid "KafkaAccess with $login" "${base[@]}" --set kafka.access.secret=binding --set kafka.access.authentication=$login
done

contains "tiers of exponential backoff, capped" "name: test-redeliver-retry-10m" "${base[@]}"
contains "sizes are written as whole numbers" "in_flight_bytes: 268435456" "${base[@]}" \
    --set-json 'config.pipelines.docs.in_flight_bytes=268435456'
contains "probes of admin ports with TLS" "path: /livez, port: admin, scheme: HTTPS" --values "$work/all.yaml"
contains "scrapes of admin ports with TLS" "scheme: https" --values "$work/all.yaml"
contains "names in the certificate of an API" "test-redeliver-scheduler.apps.svc" --values "$work/all.yaml"
contains "tests of an API with TLS" "https://test-redeliver-scheduler:8443" --values "$work/all.yaml"
contains "probes of an API without TLS" "grpc:" --set dlqInspector.api.tokenSecret.name=token
contains "tests send a token without TLS" "name: REDELIVER_INSECURE" --set dlqInspector.api.tokenSecret.name=token
if render --set dlqInspector.api.tokenSecret.name=token --set dlqInspector.api.tls.secret.name=tls | grep --quiet REDELIVER_INSECURE; then
    fail "tests send a token with TLS, if there is a certificate"
else
    pass
fi
if render --set dlqInspector.api.tokenSecret.name=token --set dlqInspector.api.tls.secret.name=tls | grep --quiet 'grpc:'; then
    fail "gRPC probes cannot use TLS"
else
    pass
fi
contains "a lake" "name: test-redeliver-lake" --set lake.enabled=true --set config.lake.location=s3://bucket/redeliver
refused "config.lake.location: is missing" --set lake.enabled=true
if render "${base[@]}" --set scheduler.enabled=false >"$work/out.yaml" && ! grep --quiet 'name: test-redeliver-scheduler$' "$work/out.yaml"; then
    pass
else
    fail "a scheduler that is not enabled has no objects"
fi
contains "grace is longer than the shutdown's" "terminationGracePeriodSeconds: 100" --values "$work/all.yaml"

console=(--set console.enabled=true --set dlqInspector.api.tokenSecret.name=token --set console.ingress.host=console.example.org
    --set console.allowPlaintextToken=true)
valid "a console behind an Ingress" "${base[@]}" "${console[@]}"
contains "the console calls the inspector of the release" "url: http://test-redeliver-dlq-inspector:50051" "${console[@]}"
if render --show-only templates/console.yaml "${console[@]}" --set kafka.access.secret=binding | grep --quiet 'binding\|brokers'; then
    fail "the console has no access to Kafka"
else
    pass
fi
refused "dlqInspector.api: the console cannot reach it" --set console.enabled=true --set console.ingress.host=x
refused "console.cookieKeysSecret.name: is missing" "${console[@]}" --set console.replicas=2
refused "console.ingress.host: is missing" "${console[@]}" --set console.ingress.host=
refused "console.oidc.issuer: is missing" "${console[@]}" --set console.signIn=oidc
refused "console.oidc.client_id: is missing" "${console[@]}" --set console.signIn=oidc --set console.oidc.issuer=https://x
refused "console.cookieKeysSecret: requires console.signIn" "${console[@]}" --set console.signIn=none --set console.cookieKeysSecret.name=x
refused "dlqInspector.api.tls.secret.name: is missing; set it, or console.allowPlaintextToken" "${console[@]}" \
    --set console.allowPlaintextToken=false
refused "scheduler.api.tls.secret.name: is missing" "${base[@]}" "${console[@]}" --set console.allowPlaintextToken=false \
    --set dlqInspector.api.tls.secret.name=inspector
valid "a console without plain-text tokens" "${console[@]}" --set console.allowPlaintextToken=false --set dlqInspector.api.tls.secret.name=inspector
contains "a certificate of the console has its public name" "- console.example.org" "${console[@]}" --show-only templates/certificates.yaml \
    --set console.tls.secret.name=console --set certManager.issuerRef.name=internal
contains "a console with TLS knows the names of its Service" "- test-redeliver-console.apps.svc" "${console[@]}" \
    --show-only templates/console.yaml --set console.tls.secret.name=console
refused "console.oidc: requires console.signIn: oidc" "${console[@]}" --set console.oidc.issuer=https://x
refused "config.console.hosts: the chart sets it for each pod; set console.hosts" --set 'config.console.hosts={x}'

# Scaling a tier changes no other object.
render "${base[@]}" >"$work/before.yaml"
render "${base[@]}" --set retryTiers.5s.replicas=7 --set retryTiers.5s.resources.limits.memory=1Gi >"$work/after.yaml"
diff --unified=0 "$work/before.yaml" "$work/after.yaml" >"$work/diff" || true
if [ "$(grep --count '^[-+] ' "$work/diff")" -eq 4 ] && grep --quiet '^+  replicas: 7' "$work/diff"; then
    pass
else
    fail "scaling a tier changes only its own StatefulSet" "$work/diff"
fi

# null removes what another values file has set.
cat >"$work/tiers.yaml" <<'YAML'
retryTiers: { 5s: { replicas: 7, autoscaling: { enabled: true, kind: hpa, minReplicas: 1, maxReplicas: 2 } } }
enrichers: { docs: { replicas: 7 } }
YAML
# same NAME [FLAGS]: what is rendered with other values and these flags is what the base renders.
same() {
    local name=$1
    shift
    if ! render "${base[@]}" --values "$work/tiers.yaml" "$@" >"$work/after.yaml" 2>"$work/err"; then
        fail "$name: cannot be rendered" "$work/err"
    elif ! diff "$work/before.yaml" "$work/after.yaml" >"$work/diff"; then
        fail "$name" "$work/diff"
    else
        pass
    fi
}
same "null removes the settings of a tier and of an enricher" --set-json 'retryTiers.5s=null' --set-json 'enrichers.docs=null'
same "null removes all settings of tiers and enrichers" --set-json 'retryTiers=null' --set-json 'enrichers=null'
same "null removes an autoscaler" --set-json 'retryTiers.5s.autoscaling=null' --set retryTiers.5s.replicas=1 --set enrichers.docs.replicas=1
same "null is neither a login nor TLS" --set-json 'retryTiers=null' --set-json 'enrichers=null' --set-json 'kafka.sasl.mechanism=null' \
    --set-json 'kafka.oidc.secret.name=null' --set-json 'kafka.tls.enabled=null' --set-json 'admin.tls.secret.name=null' \
    --set-json 'dlqInspector.api.tls.secret.name=null'
# A tier that is now a leftover, and whose settings another values file still contains.
removed=("${base[@]}" --values "$work/tiers.yaml" --set-json 'retryTiers.5s=null' --set-json 'enrichers.other=null' \
    --set-json 'config.pipelines.docs.retry.tiers=["30s"]' --set 'leftovers.tiers={5s}')
valid "a tier that null has removed is a leftover" "${removed[@]}"
contains "the StatefulSet of leftovers" "name: test-redeliver-leftovers" "${removed[@]}"
if render "${removed[@]}" | grep --quiet 'name: test-redeliver-retry-5s$'; then
    fail "a leftover has no StatefulSet of its own"
else
    pass
fi
# Values that the chart cannot do without.
refused "missing property 'retryTier'" --set-json 'retryTier=null'
refused "missing property 'replicas'" --set-json 'enricher.replicas=null'
refused "missing property 'api'" --set-json 'scheduler.api=null'

# Typos.
refused "retryTier" --set retryTier.replica=2
refused "replica" --set retryTier.replica=2
refused "autoscalling" "${base[@]}" --set retryTiers.5s.autoscalling.enabled=true
refused "tokenSecrets" --set scheduler.api.tokenSecrets.name=x
refused "provisioner" --set topics.provisioner=jobs
refused "retryTiers.15s: no pipeline has this tier; config.pipelines has 5s, 30s, 1m, 2m, 4m, 8m, 10m" "${base[@]}" --set retryTiers.15s.replicas=2
refused "retryTiers.60s: write it as 1m" "${base[@]}" --set retryTiers.60s.replicas=2
refused "enrichers.dosc: there is no pipeline with this name; config.pipelines has custom, docs" "${base[@]}" --set enrichers.dosc.replicas=2
refused "enrichers.custom: the pipeline has no \`http\`" "${base[@]}" --set enrichers.custom.replicas=2
refused "config.pipelines.docs.retry.tiers: \`5\` is not a duration" "${base[@]}" --set-json 'config.pipelines.docs.retry.tiers=["5"]'
refused "config.shutdown.grace: \`soon\` is not a duration" --set config.shutdown.grace=soon
refused "config.admin.listen: \`9464\` is not an address" --set-string config.admin.listen=9464
# Settings that the chart makes itself.
refused "config.scheduler.token_file: the chart sets it for each pod; set scheduler.api.tokenSecret" --set config.scheduler.token_file=/x
refused "config.retry_tier.tiers: the chart sets it" --set 'config.retry_tier.tiers={5s}'
refused "config.scheduler.auth: the chart sets it for each pod; set scheduler.api.tokensSecret, jwt or clientCertificates" --set config.scheduler.auth.tokens_file=/x
refused "jwt" --set scheduler.api.jwt.isuer=x
contains "an API with a tokens file is reachable" "AUTH__TOKENS_FILE" --set dlqInspector.api.tokensSecret.name=tokens
if render --show-only templates/tests/test.yaml --set dlqInspector.api.tokensSecret.name=tokens | grep --quiet 'redeliver-dlq-inspector:50051'; then
    fail "helm test has no token of a tokens file"
else
    pass
fi
contains "the tokens file of an API" "/run/secrets/api-tokens/tokens.yaml" --set dlqInspector.api.tokensSecret.name=tokens
refused "config.scheduler.tls: the chart sets it for each pod; set scheduler.api.tls" --set config.scheduler.tls.cert_file=/x
refused "config.admin.tls: the chart sets it for each pod; set admin.tls" --set config.admin.tls.cert_file=/x
refused "config.instance: the chart sets it" --set config.instance=x
# Half-set values.
for missing in kind minReplicas maxReplicas; do
    flags=()
    for field in kind=keda minReplicas=1 maxReplicas=2; do
        [ "${field%%=*}" = "$missing" ] || flags+=(--set "retryTier.autoscaling.$field")
    done
    refused "$missing" "${base[@]}" --set retryTier.autoscaling.enabled=true "${flags[@]}"
done
refused "enabled" "${base[@]}" --set retryTiers.5s.autoscaling.maxReplicas=2
refused "minReplicas" "${base[@]}" --set-json 'scheduler.autoscaling={"enabled":true,"kind":"hpa","minReplicas":0,"maxReplicas":2}'
refused "autoscaling.prometheus.serverAddress: is missing" "${base[@]}" --set-json "scheduler.autoscaling={\"enabled\":true,\"kind\":\"keda\",\"minReplicas\":1,\"maxReplicas\":2}"
refused "retryTiers.5s.autoscaling.maxReplicas: 13 is more than the partitions of its topics (12)" "${base[@]}" \
    --set-json 'retryTiers={"5s":{"autoscaling":{"enabled":true,"kind":"hpa","minReplicas":1,"maxReplicas":13}}}'
refused "scheduler.autoscaling.minReplicas: 3 is more than maxReplicas (2)" "${base[@]}" \
    --set-json 'scheduler.autoscaling={"enabled":true,"kind":"hpa","minReplicas":3,"maxReplicas":2}'
refused "topics.strimzi.cluster: is missing" --set topics.provisioner=strimzi
refused "kafka.sasl.secret.name: is missing" --set kafka.sasl.mechanism=PLAIN
refused "kafka.sasl.username: is missing" --set kafka.sasl.mechanism=PLAIN --set kafka.sasl.secret.name=x
refused "kafka.sasl.mechanism: is missing" --set kafka.sasl.username=x
refused "config.kafka.login.oidc.token_url: is missing" --set kafka.oidc.secret.name=x
refused "kafka.oidc.secret.name: cannot be combined" --set kafka.oidc.secret.name=x --set kafka.sasl.mechanism=PLAIN
refused "kafka.oidc.caSecret.name: is set, but" --set kafka.oidc.caSecret.name=x
refused "config.kafka.login.msk_iam: cannot be combined" --set kafka.sasl.mechanism=PLAIN --set-json 'config.kafka.login.msk_iam={}'
contains "IAM over TLS" "SASL_SSL" --set kafka.tls.enabled=true --set-json 'config.kafka.login.msk_iam={}'
refused "kafka.tls.caSecret.name: is set, but kafka.tls.enabled is not" --set kafka.tls.caSecret.name=x
refused "kafka.access.secret: cannot be combined" --set kafka.access.secret=x --set kafka.tls.enabled=true
refused "redis.secret: set redis.urlKey or redis.passwordKey too" --set redis.secret=x
refused "config.redis.url does not contain \$(REDIS_PASSWORD)" --set redis.secret=x --set redis.passwordKey=y
refused "redis.passwordKey: is missing" --set 'config.redis.url=redis://:$(REDIS_PASSWORD)@redis:6379'
refused "admin.tls.secret.name: is missing, and admin.tls.clientCaSecret.name is set" --set admin.tls.clientCaSecret.name=x
refused "dlqInspector.api.tls.secret.name: is missing" --set dlqInspector.api.tls.clientCaSecret.name=x
refused "admin.tls.secret.certKey: is own.crt, but certManager.issuerRef is set" --set admin.tls.secret.name=x \
    --set admin.tls.secret.certKey=own.crt --set certManager.issuerRef.name=x
valid "a certificate under other keys" "${base[@]}" --set admin.tls.secret.name=x --set admin.tls.secret.certKey=own.crt \
    --set admin.tls.secret.keyKey=own.key
refused "podMonitor.tlsConfig: is missing" --set podMonitor.enabled=true --set admin.tls.secret.name=x
for missing in cert keySecret; do
    refused "podMonitor.tlsConfig.$missing: is missing, and admin.tls.clientCaSecret.name is set" --values "$work/all.yaml" \
        --set-json "podMonitor.tlsConfig.$missing=null"
done
refused "caKeys" --set scheduler.api.tls.secret.caKeys=x
refused "leftovers.tiers: a pipeline has the tier 5s" "${base[@]}" --set 'leftovers.tiers={5s}'

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
