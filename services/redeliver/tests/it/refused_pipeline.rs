//! Topics of one pipeline that would lose records refuse this pipeline, and no other one.

use redeliver_testkit::Reply;
use redeliver_testkit::kafka_request::delete_topic;

use crate::support::{DEADLINE, PipeBuilder, records};

#[test]
fn wrong_topics_refuse_only_their_pipeline() {
    let builder = PipeBuilder::new("refused");
    let name = builder.name().to_owned();
    let other = format!("{name}-b");
    let of_other = |key: &str| format!("pipelines.{other}.{key}");
    let pipe = builder
        .tiers(&[1_000])
        .set(&of_other("output"), "{name}-b-out")
        .set(&of_other("retry.tiers"), "[1s]")
        // Nothing answers there.
        .set(&of_other("http.url"), "http://127.0.0.1:9/")
        .behave(|request| match request.earlier_calls_of_key {
            0 => Reply::status(503),
            _ => Reply::ok(request.body.clone()),
        })
        .create();
    delete_topic(&pipe.kafka.brokers, &format!("{other}-retry-1s"));
    let mut services = ["enricher", "retry-tier"].map(|service| pipe.spawn(service, "a", &[]));
    let problem = format!("topic `{other}-retry-1s` does not exist");
    for service in &mut services {
        service.until_not_ready(&problem);
        let (status, parts) = service.get("/readyz");
        assert_eq!(status, 503, "{parts}");
        assert!(parts.contains(&format!("topics-{other}")), "{parts}");
        for (pipeline, is_refused) in [(name.as_str(), 0), (&other, 1)] {
            let series = format!("redeliver_pipeline_refused{{pipeline=\"{pipeline}\"}}");
            assert_eq!(service.metric(&series), is_refused, "{pipeline}");
        }
        let log = service.output();
        assert!(log.contains("not serving the pipeline"), "{log}");
    }
    // A failed attempt, a wait in the tier and a success.
    let sent = pipe.produce(records(20));
    pipe.settle(&sent, DEADLINE);
    let applied = pipe.redeliver(&["topics", "apply"]);
    assert_eq!(applied.code, Some(0), "{applied:?}");
    for service in &mut services {
        assert!(!service.wait(DEADLINE).success());
        let log = service.output();
        assert!(
            log.contains(&format!("the topics of pipeline `{other}` can be used now")),
            "{log}"
        );
        service.start_again();
        service.until_ready();
    }
}
