//! How much a client prefetches for each of many partitions, so that all of its queues together have a limit. Without it, librdkafka limits each
//! queue for itself, to 64 MiB.

use crate::client::{ClientSettings, KafkaSettings, QUEUED_RECORDS};

/// How much the client prefetches for each partition, in KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SharedPrefetch(usize);

/// The size of a queue, of a partition's part of a response, the number of records of a queue, and another name of the second. If the configuration sets one of
/// them, it sets them all.
const PROPERTIES: [&str; 4] = [
    "queued.max.messages.kbytes",
    "fetch.message.max.bytes",
    "queued.min.messages",
    "max.partition.fetch.bytes",
];

impl SharedPrefetch {
    /// Maximum for all partitions together, in KiB. A queue can exceed its share by one response.
    const ALL: usize = 64 << 10;
    const MIN: usize = 16;
    const MAX: usize = 1 << 10;

    /// Whether the configuration sets it, and so has the last word.
    pub(crate) fn is_configured(settings: &KafkaSettings) -> bool {
        PROPERTIES
            .iter()
            .any(|name| settings.properties.contains_key(*name))
    }

    /// The prefetch for a number of partitions. It is a power of two, so that it seldom changes.
    pub(crate) fn of(partitions: usize) -> Self {
        let share = (Self::ALL / partitions.max(1)).clamp(Self::MIN, Self::MAX);
        // The largest power of two that is not greater.
        Self(1 << share.ilog2())
    }

    /// Sets the properties of a client. A single batch can be larger than its part of a response.
    pub(crate) fn configure(self, config: &mut ClientSettings) {
        for (name, value) in self.properties() {
            config.set(name, value);
        }
    }

    /// These settings with this prefetch, unless they have one.
    pub(crate) fn limit(self, settings: &KafkaSettings) -> KafkaSettings {
        let mut limited = settings.clone();
        if !Self::is_configured(settings) {
            let properties = self.properties().into_iter();
            let properties = properties.map(|(name, value)| (name.to_owned(), value));
            limited.properties.extend(properties);
        }
        limited
    }

    fn properties(self) -> [(&'static str, String); 3] {
        // Enough to read on while the next response arrives, as of records of 2 KiB with their headers.
        let records = (self.0 / 2).max(QUEUED_RECORDS as usize);
        [
            (PROPERTIES[0], self.0.to_string()),
            (PROPERTIES[1], (self.0 << 10).to_string()),
            (PROPERTIES[2], records.to_string()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn total_prefetch_is_bounded() {
        for (partitions, expected) in [
            (0, 1024),
            (1, 1024),
            (64, 1024),
            (65, 512),
            (1_000, 64),
            (5_000, 16),
            (100_000, 16),
        ] {
            assert_eq!(
                SharedPrefetch::of(partitions),
                SharedPrefetch(expected),
                "{partitions}"
            );
        }
    }

    #[test]
    fn configured_prefetch_wins() {
        let mut settings = KafkaSettings::new("kafka:9092".to_owned(), "test".to_owned());
        let limited = SharedPrefetch::of(1).limit(&settings).properties;
        assert_eq!(limited["queued.max.messages.kbytes"], "1024");
        assert_eq!(limited["queued.min.messages"], "512");
        let own = ("max.partition.fetch.bytes".to_owned(), "1000".to_owned());
        settings.properties.extend([own]);
        assert_eq!(
            SharedPrefetch::of(1).limit(&settings).properties,
            settings.properties
        );
    }
}
