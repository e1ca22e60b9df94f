//! A property of librdkafka that Redeliver sets cannot be set by users. Otherwise their value would be ignored, or, through
//! an alias, sometimes win.

use std::collections::{BTreeMap, BTreeSet};

use redeliver_kafka::KafkaSettings;
use redeliver_runtime::Config;

/// librdkafka's aliases, each with the property that it sets and an example of a value: the lines with `Alias for` of its
/// `CONFIGURATION.md`.
const ALIASES: [(&str, &str, &str); 12] = [
    ("bootstrap.servers", "metadata.broker.list", "kafka:9092"),
    ("max.in.flight", "max.in.flight.requests.per.connection", "3"),
    ("sasl.mechanism", "sasl.mechanisms", "PLAIN"),
    (
        "sasl.oauthbearer.client.credentials.client.id",
        "sasl.oauthbearer.client.id",
        "x",
    ),
    (
        "sasl.oauthbearer.client.credentials.client.secret",
        "sasl.oauthbearer.client.secret",
        "x",
    ),
    ("max.partition.fetch.bytes", "fetch.message.max.bytes", "70000"),
    ("linger.ms", "queue.buffering.max.ms", "7"),
    ("retries", "message.send.max.retries", "7"),
    ("compression.type", "compression.codec", "gzip"),
    ("acks", "request.required.acks", "1"),
    ("delivery.timeout.ms", "message.timeout.ms", "70000"),
    // Also the name of a property of the whole client, which is not an alias.
    ("enable.auto.commit", "auto.commit.enable", "false"),
];

/// The properties of every kind of client.
fn clients(settings: &KafkaSettings) -> Vec<BTreeMap<String, String>> {
    let clients = [
        settings.client(),
        settings.reader("read_committed"),
        settings.consumer("group", "member"),
        settings.producer(),
        settings.transactional_producer("id"),
    ];
    let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
    clients
        .iter()
        .map(|client| client.properties().config_map().into_iter().map(owned).collect())
        .collect()
}

fn settings() -> KafkaSettings {
    KafkaSettings {
        static_membership: true,
        ..KafkaSettings::new("localhost:9092", "test")
    }
}

/// Whether the configuration refuses the property by its name.
fn is_refused(property: &str) -> bool {
    let yaml = format!("kafka: {{ properties: {{ {property}: '1' }} }}");
    match Config::from_yaml(&yaml) {
        Ok(_) => false,
        Err(error) => {
            let expected = format!("kafka.properties.{property}: cannot be set");
            assert!(error.to_string().contains(&expected), "{property}: {error}");
            true
        }
    }
}

fn set_by_redeliver() -> BTreeSet<String> {
    clients(&settings())
        .into_iter()
        .flat_map(BTreeMap::into_keys)
        .collect()
}

#[test]
fn user_property_is_used_or_refused() {
    let names = set_by_redeliver();
    assert!(names.len() > 25, "{names:?}");
    let mut ignored = Vec::new();
    for name in names {
        let mut settings = settings();
        settings.properties.insert(name.clone(), "of-the-user".to_owned());
        let is_used = clients(&settings)
            .iter()
            .filter_map(|client| client.get(&name))
            // More debug contexts are added to those of the user.
            .all(|value| value.contains("of-the-user"));
        if is_used == is_refused(&name) {
            ignored.push(name);
        }
    }
    assert_eq!(ignored, [""; 0], "neither used nor refused, or both");
}

#[test]
fn aliases_of_own_properties_are_refused() {
    let names = set_by_redeliver();
    let mut allowed = Vec::new();
    for (alias, name, _) in ALIASES {
        for (set, other) in [(alias, name), (name, alias)] {
            if names.contains(set) && !is_refused(other) {
                allowed.push(other);
            }
        }
    }
    assert_eq!(allowed, [""; 0]);
}

#[test]
fn librdkafka_treats_the_aliases_as_such() {
    for (alias, name, value) in ALIASES {
        // See above; and this build of librdkafka has no OpenID Connect.
        if alias == "enable.auto.commit" || alias.starts_with("sasl.oauthbearer.") {
            continue;
        }
        let mut client = KafkaSettings::new("localhost:9092", "test")
            .client()
            .properties()
            .clone();
        client.remove("bootstrap.servers");
        client.set(alias, value);
        let native = client.create_native_config().unwrap();
        assert_eq!(
            native.get(name).unwrap(),
            value,
            "{alias} is not an alias of {name}"
        );
    }
}
