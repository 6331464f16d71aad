#!/bin/bash
# Creates the stack's topics and exits. May run again: what exists stays as it is. The broker creates no topic on its own,
# so a misspelt name is an error that someone sees, not a new topic with one partition.
set -euo pipefail
server=${KAFKA_SERVER:-kafka:19092}

create() { # NAME PARTITIONS [KEY=VALUE ...]
  local name=$1 partitions=$2 settings=()
  for setting in "${@:3}"; do settings+=(--config "$setting"); done
  /opt/kafka/bin/kafka-topics.sh --bootstrap-server "$server" --create --if-not-exists \
    --topic "$name" --partitions "$partitions" --replication-factor 1 "${settings[@]}"
}

create inference.requests "${PARTITIONS:-6}" retention.ms=86400000
create inference.results "${PARTITIONS:-6}" retention.ms=86400000
create inference.dead-letters 1 retention.ms=1209600000
