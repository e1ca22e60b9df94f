//! An output topic that does not exist yet. A source that is deleted and created again: the tests of `redeliver_kafka`.

use redeliver_testkit::kafka_request::delete_topic;
use redeliver_testkit::until_seen;

use crate::support::{Draft, PipeBuilder};

#[test]
fn enricher_waits_for_missing_output_topic() {
    let pipe = PipeBuilder::new("no-output").create();
    let output = pipe.pipeline.output.clone().unwrap();
    delete_topic(&pipe.kafka.brokers, &output);
    let mut enricher = pipe.enricher("a");
    enricher.until_ready();
    assert!(
        enricher.output().contains("does not exist"),
        "{}",
        enricher.output()
    );
    pipe.produce(numbered(0..20));
    pipe.endpoint.until_calls(20);
    assert_eq!(pipe.redeliver(&["topics", "apply"]).code, Some(0));
    let written = || pipe.read(std::slice::from_ref(&output)).len();
    until_seen("all are written", written, |&written| written == 20);
    assert_eq!(pipe.endpoint.calls(), 20, "no call was repeated");
}

fn numbered(numbers: std::ops::Range<usize>) -> Vec<Draft> {
    numbers
        .map(|n| Draft::new(format!("key-{n}"), format!("record {n}")))
        .collect()
}
