//! A source topic that is deleted and created again while the enricher runs.

use redeliver_kafka::producer::Producer;
use redeliver_kafka::survey::Surveyor;
use redeliver_testkit::kafka_request::delete_topic;
use redeliver_testkit::{Reply, eventually};

use crate::support::{DEADLINE, Draft, Pipe, PipeBuilder};

#[test]
fn recreated_source_is_read_from_beginning() {
    let setup = PipeBuilder::new("recreated").behave(|request| {
        let is_kept = request.body.ends_with(b"7");
        if is_kept {
            Reply::Hang
        } else {
            Reply::ok(request.body.clone())
        }
    });
    let pipe = setup
        .pipeline("http.timeout", "5m")
        .set("shutdown.grace", "2s")
        .create();
    let mut enricher = pipe.enricher("a");
    enricher.until_ready();
    let before = pipe.produce(numbered(0..200));
    let kept = before.iter().filter(|sent| sent.body().ends_with(b"7")).count();
    let outputs: Vec<_> = pipe.pipeline.output.iter().cloned().collect();
    let written = |count: usize| {
        eventually("all are written", DEADLINE, || match pipe.read(&outputs).len() {
            written if written == count => Ok(()),
            written => Err(format!("{written} of {count}")),
        });
    };
    written(before.len() - kept);

    delete_topic(&pipe.kafka.brokers, &pipe.pipeline.source);
    eventually("the source exists again", DEADLINE, || {
        let applied = pipe.redeliver(&["topics", "apply"]);
        let created = format!("created  {}\n", pipe.pipeline.source);
        if applied.code == Some(0) && applied.stdout.contains(&created) {
            Ok(())
        } else {
            Err(applied.stdout)
        }
    });
    pipe.endpoint.behave(|request| Reply::ok(request.body.clone()));
    // A producer that knows the old topic would continue its sequence numbers.
    let producer = Producer::new(&pipe.kafka).unwrap();
    let after = pipe.produce_with(&producer, &pipe.pipeline.source, numbered(200..250));
    written(before.len() - kept + after.len());

    enricher.until_ready();
    assert_eq!(
        enricher.metric("redeliver_lane_dropped_records_total"),
        kept as u64
    );
    assert!(enricher.metric("redeliver_lane_recreated_partitions_total") > 0);
    eventually("nothing is left to be done", DEADLINE, || {
        match enricher.metric("redeliver_lane_lag") {
            0 => Ok(()),
            lag => Err(lag),
        }
    });
    let output = enricher.output();
    assert!(output.contains("topic was deleted and created again"), "{output}");
}

#[test]
fn enricher_waits_for_missing_output_topic() {
    let pipe = PipeBuilder::new("no-output").create();
    let output = pipe.pipeline.output.clone().unwrap();
    delete(&pipe, &output);
    let mut enricher = pipe.enricher("a");
    enricher.until_ready();
    assert!(
        enricher.output().contains("does not exist"),
        "{}",
        enricher.output()
    );
    pipe.produce(numbered(0..20));
    eventually("all calls are made", DEADLINE, || match pipe.endpoint.calls() {
        20 => Ok(()),
        calls => Err(calls),
    });
    assert_eq!(pipe.redeliver(&["topics", "apply"]).code, Some(0));
    eventually("all are written", DEADLINE, || {
        match pipe.read(std::slice::from_ref(&output)).len() {
            20 => Ok(()),
            written => Err(written),
        }
    });
    assert_eq!(pipe.endpoint.calls(), 20, "no call was repeated");
}

/// Deletes a topic, and waits until processes that start now do not find it.
#[track_caller]
pub(crate) fn delete(pipe: &Pipe, topic: &str) {
    delete_topic(&pipe.kafka.brokers, topic);
    let surveyor = Surveyor::new(&pipe.kafka).unwrap();
    eventually("the topic is deleted", DEADLINE, || {
        match surveyor.topics(|name| *name == *topic) {
            Ok(topics) if topics.is_empty() => Ok(()),
            found => Err(format!("{found:?}")),
        }
    });
}

fn numbered(numbers: std::ops::Range<usize>) -> Vec<Draft> {
    numbers
        .map(|n| Draft::new(format!("key-{n}"), format!("record {n}")))
        .collect()
}
