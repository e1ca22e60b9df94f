//! Tests of the settings of Kafka clients against the configuration.

mod properties;
