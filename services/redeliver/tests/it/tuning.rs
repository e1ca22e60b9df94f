//! Properties of the Kafka client that the configuration passes on.

use redeliver_testkit::brokers;

use crate::raw;
use crate::support::{DEADLINE, Draft, PipeBuilder};

/// The largest batch that the output accepts, in bytes.
const NARROW: &str = "20000";

#[test]
fn compression_linger_and_batch_of_the_configuration_are_used() {
    const RECORDS: usize = 20;
    let setup = PipeBuilder::new("tuning")
        .partitions(1)
        .tiers(&[300])
        .set("kafka.properties.compression.type", "lz4")
        .set("kafka.properties.batch.size", "500000")
        .set("kafka.properties.linger.ms", "150")
        .set("kafka.batch", "1");
    let output = format!("{}-out", setup.name());
    raw::create_topic(&brokers(), &output, &[("max.message.bytes", NARROW)]);
    let pipe = setup.create();
    let draft = |n: usize| Draft::new(format!("key-{n}"), vec![b'x'; 100_000 + n]);
    let sent = pipe.produce((0..RECORDS).map(draft).collect());
    let mut enricher = pipe.enricher("a");
    // Without compression, the output would refuse the results, which would then be dead letters.
    let ends = pipe.settle(&sent, DEADLINE);
    assert_eq!((ends.report.output, ends.report.dead), (RECORDS as u64, 0));
    // Each transaction has one record, and waits for it as long as the client collects records.
    let transactions = enricher.metric("redeliver_lane_transactions_total");
    assert!(transactions >= RECORDS as u64, "{transactions}");
    let (_, metrics) = enricher.get("/metrics");
    let quick: Vec<&str> = metrics
        .lines()
        .filter(|line| line.starts_with("redeliver_lane_transaction_seconds_bucket{"))
        .filter(|line| line.contains("le=\"0.1\""))
        .collect();
    assert!(!quick.is_empty(), "{metrics}");
    assert!(quick.iter().all(|line| line.ends_with(" 0")), "{quick:?}");
}
