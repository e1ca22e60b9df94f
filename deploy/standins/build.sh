#!/usr/bin/env bash
# Builds local images under the names of public ones, on Debian 12 without access to an image registry: those from which
# deploy/Dockerfile builds, and those that docker-compose.yml runs besides ours. They contain what Debian packages, this machine's Rust
# toolchain, and Kafka's jars from the cache of the tests. For trying out; use the real images wherever they can be pulled.
#
#   build.sh [rust] [kafka] [redis] [python]     needs root and the Debian packages buildah, podman, runc and mmdebstrap
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export CONTAINERS_CONF="${CONTAINERS_CONF:-$PWD/containers.conf}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# base IMAGE PACKAGES [CHANGES]: an image of Debian with these packages
base() {
    local image=$1 packages=$2
    shift 2
    mmdebstrap --quiet --variant=minbase --include="$packages" bookworm "$work/root.tar"
    podman import --quiet "$@" "$work/root.tar" "$image"
    rm "$work/root.tar"
}

rust() {
    base standin-rust ca-certificates,g++,gcc,libc6-dev,make,perl
    mkdir "$work/rust"
    cp -a "$(rustc --print sysroot)"/{bin,lib} "$work/rust/"
    cat >"$work/rust.Dockerfile" <<'DOCKERFILE'
FROM standin-rust
COPY rust /usr/local/rust
ENV PATH=/usr/local/rust/bin:/usr/bin:/bin CARGO_HOME=/usr/local/cargo
DOCKERFILE
    image "docker.io/library/rust:1.89-bookworm" "$work/rust.Dockerfile"
}

kafka() {
    base standin-kafka ca-certificates,openjdk-17-jre-headless
    local jars
    jars=$(find "${XDG_CACHE_HOME:-$HOME/.cache}/redeliver" -maxdepth 1 -type d -name 'kafka-*' | head -n 1)
    [ -n "$jars" ] || { echo "error: no jars of Kafka in the cache; run cargo xtask services up" >&2; exit 1; }
    mkdir "$work/libs"
    cp "$jars"/*.jar "$work/libs/"
    cp kafka.sh "$work/"
    cat >"$work/kafka.Dockerfile" <<'DOCKERFILE'
FROM standin-kafka
COPY libs /opt/kafka/libs
COPY kafka.sh /kafka.sh
RUN mkdir --parents /opt/kafka/bin /var/lib/kafka/data \
    && printf '#!/bin/sh\nexec java -cp "/opt/kafka/libs/*" org.apache.kafka.tools.BrokerApiVersionsCommand "$@"\n' \
        >/opt/kafka/bin/kafka-broker-api-versions.sh \
    && chmod +x /kafka.sh /opt/kafka/bin/kafka-broker-api-versions.sh \
    && chown -R 1000:1000 /var/lib/kafka
USER 1000:1000
ENTRYPOINT ["/kafka.sh"]
DOCKERFILE
    image "docker.io/apache/kafka:4.3.1" "$work/kafka.Dockerfile"
}

# The public image accepts connections from other containers without a password.
redis() {
    base docker.io/library/redis:7 redis-server \
        --change 'ENTRYPOINT ["sh", "-c", "exec \"$@\" --protected-mode no", "redis"]'
}

python() { base docker.io/library/python:3-slim libpython3-stdlib,python3-minimal; }

# image NAME DOCKERFILE. Other kinds of isolation need control over cgroups.
image() { buildah bud --quiet --isolation chroot --pull=never --tag "$1" --file "$2" "$work"; }

[ $# -gt 0 ] || set -- rust kafka redis python
for name; do "$name"; done
podman images
