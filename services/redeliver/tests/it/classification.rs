//! What the answers of an endpoint mean for a record: it ends in an output, waits in a tier, or is a dead letter.

use redeliver_core::Record;
use redeliver_core::headers::{ERROR_CLASS, ERROR_CODE, RETRY_COUNT};
use redeliver_testkit::{Reply, Request};

use crate::retries::{begins_with, header};
use crate::support::{DEADLINE, Draft, Ends, Pipe, PipeBuilder, Sent, text};

/// The endpoint answers with the status in the body to the first call for a record, and then with 200.
fn answers_with_its_body(request: &Request) -> Reply {
    let text = std::str::from_utf8(&request.body).unwrap();
    match request.earlier_calls_of_key {
        0 => Reply::status(text.split_whitespace().next().unwrap().parse().unwrap()),
        _ => Reply::status(200),
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

/// For each record, its answer decides whether it waits in a tier, is a dead letter, or goes to a topic for this answer.
#[test]
fn answer_decides_where_record_goes() {
    let pipe = PipeBuilder::new("classes-routes")
        .tiers(&[300])
        .pipeline("http.response", "keep")
        .pipeline("http.classification", "{ 409: success }")
        .output("{ by: status, topics: { 409: '{name}-conflicts' }, default: '{name}-out' }")
        .behave(answers_with_its_body)
        .create();
    let _running = (pipe.enricher("a"), pipe.retry_tier("a"));
    let statuses = [200, 409, 503, 422, 429].repeat(20);
    let sent = pipe.produce(statuses.iter().copied().map(of_status).collect());
    let ends = pipe.settle(&sent, DEADLINE);
    for (status, sent) in statuses.iter().zip(&sent) {
        let expected = match status {
            409 => ("-conflicts".to_owned(), 0, None, None),
            503 => succeeds(1),
            422 => dies(1, "permanent", 422),
            // The first call does not count as a failed attempt.
            _ => succeeds(0),
        };
        assert_eq!(end_of(&pipe, &ends, sent), expected, "{status}");
    }
    let waited = pipe.read(&[pipe.first_tier()]);
    assert_eq!(waited.len(), 40);
    let has_waited = |record: &Record| {
        let value = record.value.as_deref().unwrap();
        begins_with(value, "503") || begins_with(value, "429")
    };
    assert!(waited.iter().all(has_waited), "{waited:?}");
}
