#!/usr/bin/env bash
# Runs the health checks of all containers again and again. Podman leaves that to systemd, and without it no container would ever
# become healthy.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export CONTAINERS_CONF="${CONTAINERS_CONF:-$PWD/containers.conf}"
while :; do
    for container in $(podman ps --quiet --filter health=starting --filter health=healthy --filter health=unhealthy); do
        # The result is in the state of the container.
        podman healthcheck run "$container" >/dev/null || true
    done
    sleep 5
done
