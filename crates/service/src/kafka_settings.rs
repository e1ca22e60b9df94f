//! How to connect to Kafka.

use redeliver_kafka::KafkaSettings;
use redeliver_runtime::Config;

/// How to connect to Kafka, from the configuration, without a login by tokens; see [`login`](crate::login).
#[must_use]
pub(crate) fn kafka_settings(config: &Config) -> KafkaSettings {
    KafkaSettings {
        properties: config
            .kafka
            .properties
            .iter()
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .collect(),
        id_prefix: config.kafka.id_prefix.clone(),
        static_membership: config.static_membership(),
        session_timeout: config.kafka.session_timeout.duration(),
        transaction_timeout: config.kafka.transaction_timeout.duration(),
        ..KafkaSettings::new(&config.kafka.brokers, &config.instance)
    }
}
