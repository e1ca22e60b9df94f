#!/bin/bash
# The entry point of the stand-in for apache/kafka. As there, KAFKA_NODE_ID becomes the setting node.id.
set -euo pipefail
config=/var/lib/kafka/server.properties
env | sed --quiet 's/^KAFKA_\([A-Z_]*\)=/\1=/p' | while IFS== read -r name value; do
    name=${name,,}
    echo "${name//_/.}=$value"
done >"$config"
run() { java -Dlog4j2.level=INFO -cp '/opt/kafka/libs/*' "$@"; }
[ -e /var/lib/kafka/data/meta.properties ] || run kafka.tools.StorageTool format --cluster-id 4L6g3nShT-eMCtK--X86sw --config "$config"
exec java -Dlog4j2.level=INFO -Xms256m -Xmx512m -cp '/opt/kafka/libs/*' kafka.Kafka "$config"
