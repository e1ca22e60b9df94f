//! What the answers of an endpoint mean for a record: it ends in an output, waits in a tier, or is a dead letter.

use redeliver_core::headers::{ERROR_CLASS, ERROR_CODE, PROCESS_AFTER, RETRY_COUNT};
use redeliver_testkit::{Reply, Request};

use crate::retries::{begins_with, drafts, header};
use crate::support::{DEADLINE, Draft, Ends, Pipe, PipeBuilder, Sent, text};

/// The endpoint answers with the status in the body to this many calls for a record, and then with 200.
fn answers_with_its_body(
    failures: impl Fn(u16) -> u32 + Send + Sync,
) -> impl Fn(&Request) -> Reply + Send + Sync {
    move |request| {
        let text = std::str::from_utf8(&request.body).unwrap();
        let status = text.split_whitespace().next().unwrap().parse().unwrap();
        match request.earlier_calls_of_key {
            calls if calls < failures(status) => Reply::status(status),
            _ => Reply::status(200),
        }
    }
}

/// Records to which the endpoint answers with this status.
fn of_status(status: u16) -> Draft {
    Draft::new(format!("key-{status}"), format!("{status} is the answer"))
}

/// How a record ended: the topic without the name of the pipeline, the failed attempts, and class and code of the error.
#[track_caller]
fn end_of(pipe: &Pipe, ends: &Ends, sent: &Sent) -> (String, u32, Option<String>, Option<String>) {
    let end = ends.of(sent);
    let topic = end.position.topic.strip_prefix(pipe.name()).unwrap();
    let [class, code] = [ERROR_CLASS, ERROR_CODE].map(|name| text(end, name).unwrap());
    (topic.to_owned(), header(end, RETRY_COUNT), class, code)
}

fn succeeds(failures: u32) -> (String, u32, Option<String>, Option<String>) {
    ("-out".to_owned(), failures, None, None)
}

fn dies(failures: u32, class: &str, status: u16) -> (String, u32, Option<String>, Option<String>) {
    let code = format!("http.{status}");
    ("-dlq".to_owned(), failures, Some(class.to_owned()), Some(code))
}

/// Of each status with a meaning of its own, and of two others of each class of HTTP.
#[test]
fn without_overrides_statuses_have_the_documented_meaning() {
    const SUCCESS: [u16; 3] = [200, 202, 204];
    const TRANSIENT: [u16; 11] = [401, 403, 407, 408, 425, 500, 502, 503, 504, 520, 599];
    const THROTTLED: [u16; 1] = [429];
    const PERMANENT: [u16; 10] = [301, 304, 400, 404, 409, 410, 418, 422, 501, 505];
    let pipe = PipeBuilder::new("classes-default")
        .tiers(&[300])
        .pipeline("http.response", "keep")
        .behave(answers_with_its_body(|_| 1))
        .create();
    let _running = (pipe.enricher("a"), pipe.retry_tier("a"));
    let all = [&SUCCESS[..], &TRANSIENT, &THROTTLED, &PERMANENT].concat();
    let sent = pipe.produce(all.iter().map(|status| of_status(*status)).collect());
    let ends = pipe.settle(&sent, DEADLINE);
    for (status, sent) in all.iter().zip(&sent) {
        let expected = if SUCCESS.contains(status) {
            succeeds(0)
        } else if TRANSIENT.contains(status) {
            succeeds(1)
        } else if THROTTLED.contains(status) {
            // It was called twice, but the first call does not count as a failed attempt.
            assert_eq!(pipe.endpoint.calls_of_key(&sent.idempotency_key()), 2);
            succeeds(0)
        } else {
            dies(1, "permanent", *status)
        };
        assert_eq!(end_of(&pipe, &ends, sent), expected, "{status}");
    }
    let waited = pipe.read(&[pipe.first_tier()]);
    assert_eq!(waited.len(), TRANSIENT.len() + THROTTLED.len());
}

#[test]
fn overrides_change_the_meaning_of_single_statuses() {
    let overrides = "{ 409: success, 404: transient, 503: permanent, 418: endpoint, 400: throttled }";
    let pipe = PipeBuilder::new("classes-overrides")
        .tiers(&[300])
        .pipeline("http.response", "keep")
        .pipeline("http.classification", overrides)
        // Throttled calls use up no attempts, so a record that is always throttled would never end.
        .behave(answers_with_its_body(
            |status| if status == 400 { 3 } else { u32::MAX },
        ))
        .create();
    let _running = (pipe.enricher("a"), pipe.retry_tier("a"));
    let statuses = [409, 404, 503, 418, 400, 410, 500];
    let sent = pipe.produce(statuses.map(of_status).into());
    let ends = pipe.settle(&sent, DEADLINE);
    let found: Vec<_> = sent.iter().map(|sent| end_of(&pipe, &ends, sent)).collect();
    let expected = [
        succeeds(0),
        dies(2, "exhausted", 404),
        dies(1, "permanent", 503),
        dies(2, "exhausted", 418),
        succeeds(0),
        dies(1, "permanent", 410),
        dies(2, "exhausted", 500),
    ];
    assert_eq!(found, expected);
    assert_eq!(pipe.endpoint.calls_of_key(&sent[4].idempotency_key()), 4);
}

/// For each record, its answer decides whether it waits in a tier, is a dead letter, or goes to a topic for this answer.
#[test]
fn the_failure_of_each_record_chooses_where_it_goes() {
    let pipe = PipeBuilder::new("classes-routes")
        .tiers(&[300])
        .pipeline("http.response", "keep")
        .pipeline("http.classification", "{ 409: success }")
        .output("{ by: status, topics: { 409: '{name}-conflicts' }, default: '{name}-out' }")
        .behave(answers_with_its_body(|_| 1))
        .create();
    let _running = (pipe.enricher("a"), pipe.retry_tier("a"));
    let statuses = [200, 409, 503, 422].repeat(20);
    let sent = pipe.produce(statuses.iter().copied().map(of_status).collect());
    let ends = pipe.settle(&sent, DEADLINE);
    for (status, sent) in statuses.iter().zip(&sent) {
        let expected = match status {
            409 => ("-conflicts".to_owned(), 0, None, None),
            503 => succeeds(1),
            422 => dies(1, "permanent", 422),
            _ => succeeds(0),
        };
        assert_eq!(end_of(&pipe, &ends, sent), expected, "{status}");
    }
    let waited = pipe.read(&[pipe.first_tier()]);
    assert_eq!(waited.len(), 20);
    assert!(
        waited
            .iter()
            .all(|record| begins_with(record.value.as_deref().unwrap(), "503"))
    );
}

/// Nothing listens on the port of the endpoint. The records wait, and use up their attempts, because the breaker is off.
#[test]
fn a_refused_connection_is_transient() {
    const RECORDS: usize = 20;
    let pipe = PipeBuilder::new("classes-refused")
        .tiers(&[300])
        .pipeline("http.url", "http://127.0.0.1:1/records")
        .create();
    let _running = (pipe.enricher("a"), pipe.retry_tier("a"));
    let sent = pipe.produce(drafts("refused", RECORDS));
    let ends = pipe.settle(&sent, DEADLINE);
    assert_eq!(
        ends.report.dead_by_class,
        [("exhausted".to_owned(), RECORDS as u64)].into()
    );
    for sent in &sent {
        let end = ends.of(sent);
        assert_eq!(text(end, ERROR_CODE).unwrap().as_deref(), Some("http.connect"));
        assert_eq!(header::<u32>(end, RETRY_COUNT), 2);
    }
    for waited in pipe.read(&[pipe.first_tier()]) {
        assert_eq!(text(&waited, ERROR_CLASS).unwrap().as_deref(), Some("transient"));
        assert!(text(&waited, PROCESS_AFTER).unwrap().is_some());
    }
}
