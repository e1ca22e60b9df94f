//! One trace covers a record from its producer through all attempts and waits to its end, as a collector sees it.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use redeliver_core::Record;
use redeliver_core::headers::TRACEPARENT;
use redeliver_testkit::{OtlpReceiver, ReceivedSpan, Reply, ensure, eventually, free_port, until_seen};

use crate::batches::each_record;
use crate::support::{DEADLINE, Draft, PipeBuilder, text};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PRODUCER: &str = "b7ad6b7169203331";

/// The body and the trace context of each call.
type Calls = Arc<Mutex<Vec<(String, String)>>>;

/// The spans of one record, in the order of their ends. A wait starts at the time of the failure, in milliseconds, so start
/// times do not order a wait after an attempt of less than a millisecond.
struct Trace {
    spans: Vec<ReceivedSpan>,
}

impl Trace {
    /// Waits for this many spans of a trace.
    #[track_caller]
    fn of(receiver: &OtlpReceiver, trace: &str, count: usize) -> Self {
        let mut spans = eventually("all spans have come", DEADLINE, || {
            let spans: Vec<_> = receiver
                .spans()
                .into_iter()
                .filter(|span| span.trace_id() == trace)
                .collect();
            ensure(spans.len() >= count, format!("{spans:#?}")).map(|()| spans)
        });
        spans.sort_by_key(|span| span.span.end_time_unix_nano);
        assert_eq!(spans.len(), count, "{spans:#?}");
        Self { spans }
    }

    fn names(&self) -> Vec<&str> {
        self.spans.iter().map(|span| span.span.name.as_str()).collect()
    }

    /// The `traceparent` with this span as the parent.
    fn handed_on(&self, index: usize) -> String {
        let span = &self.spans[index];
        format!("00-{}-{}-01", span.trace_id(), span.span_id())
    }
}

fn traceparent(record: &Record) -> String {
    text(record, TRACEPARENT).unwrap().unwrap_or_default()
}

#[test]
fn trace_covers_all_attempts_and_waits() {
    let receiver = OtlpReceiver::start();
    let calls = Calls::default();
    let seen = calls.clone();
    let setup = PipeBuilder::new("traces")
        .partitions(1)
        .tiers(&[300])
        .behave(move |request| {
            let body = String::from_utf8_lossy(&request.body).into_owned();
            let parent = request
                .headers
                .get(TRACEPARENT)
                .and_then(|value| value.to_str().ok());
            seen.lock()
                .unwrap()
                .push((body.clone(), parent.unwrap_or_default().to_owned()));
            match (body.as_str(), request.earlier_calls_of_body) {
                (_, 0) => Reply::status(503),
                ("dies", _) => Reply::status(422),
                _ => Reply::ok("fine"),
            }
        });
    let pipe = setup
        .set("telemetry.otlp.endpoint", &receiver.endpoint())
        .create();
    let (mut enricher, mut tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    let traced = |word: &str, trace: &str| {
        let parent = format!("00-{trace}-{PRODUCER}-01");
        let draft = Draft::new("k", word.to_owned()).header("tracestate", b"vendor=1");
        draft.header(TRACEPARENT, parent.as_bytes()).header("user", b"1")
    };
    let dying_trace = TRACE.replace("0af", "1af");
    let drafts = vec![
        traced("lives", TRACE),
        traced("dies", &dying_trace),
        Draft::new("k", "begins here"),
        traced("not a trace", "xyz"),
    ];
    let sent = pipe.produce(drafts);
    let ends = pipe.settle(&sent, DEADLINE);
    // A process sends its last spans when it shuts down.
    enricher.shut_down();
    tier.shut_down();

    let group = pipe.pipeline.worker_group(&pipe.kafka.id_prefix);
    let due_topic = pipe.pipeline.due_topic();
    let [attempt, retry] = [pipe.name(), &due_topic].map(|topic| format!("process {topic}"));
    let wait = format!("wait {}", pipe.pipeline.policy.tiers()[0]);
    let own_traces = [2, 3].map(|n| traceparent(ends.of(&sent[n]))[3..35].to_owned());
    assert_ne!(own_traces[0], own_traces[1]);
    let cases = [
        (TRACE, PRODUCER),
        (&dying_trace, PRODUCER),
        (&own_traces[0], ""),
        (&own_traces[1], ""),
    ];
    for (sent, (trace, parent)) in sent.iter().zip(cases) {
        let word = String::from_utf8_lossy(sent.body()).into_owned();
        let trace = Trace::of(&receiver, trace, 5);
        assert_eq!(trace.names(), ["POST", &attempt, &wait, "POST", &retry], "{word}");
        let [first_call, first, waiting, second_call, second] = &trace.spans[..] else {
            unreachable!()
        };
        assert_eq!(first.parent_id(), parent, "{word}");
        assert_eq!(first_call.parent_id(), first.span_id(), "{word}");
        assert_eq!(second_call.parent_id(), second.span_id(), "{word}");
        assert_eq!(waiting.parent_id(), first.span_id(), "{word}");
        assert_eq!(second.parent_id(), first.span_id(), "{word}");
        assert_eq!(
            (
                first.number("redeliver.attempt"),
                second.number("redeliver.attempt")
            ),
            (Some(1), Some(2))
        );
        let destination = "messaging.destination.name";
        for (span, expected) in [
            (first, ("messaging.system", "kafka")),
            (first, ("messaging.operation.type", "process")),
            (first, ("messaging.operation.name", "process")),
            (first, ("messaging.consumer.group.name", group.as_str())),
            (first, (destination, pipe.name())),
            (first, ("messaging.destination.partition.id", "0")),
            (first, ("error.type", "http.503")),
            (first, ("redeliver.error_class", "transient")),
            (second, (destination, &due_topic)),
            (first_call, ("http.request.method", "POST")),
            (
                first_call,
                ("url.full", &format!("{}/records", pipe.endpoint.url())),
            ),
            (first_call, ("server.address", "127.0.0.1")),
            (first_call, ("error.type", "503")),
        ] {
            assert_eq!(
                span.attribute(expected.0),
                Some(expected.1),
                "{} of {word}",
                expected.0
            );
        }
        assert_eq!(first.number("messaging.kafka.offset"), Some(sent.position.offset));
        let port = i64::from(pipe.endpoint.address().port());
        let status = [first_call, second_call].map(|call| call.number("http.response.status_code"));
        assert_eq!(
            (first_call.number("server.port"), status),
            (
                Some(port),
                [Some(503), Some(if word == "dies" { 422 } else { 200 })]
            )
        );
        let fails = word == "dies";
        let has_failed = [second, second_call].map(|span| span.attribute("error.type").is_some());
        assert_eq!(has_failed, [fails, fails], "{word}");
        assert_eq!(
            first.attribute("redeliver.origin"),
            Some(sent.idempotency_key().as_str())
        );
        assert_eq!(first.resource("service.name"), Some("enricher"));
        assert_eq!(waiting.resource("service.name"), Some("retry-tier"));
        assert!(
            waiting.span.start_time_unix_nano <= second.span.start_time_unix_nano
                && waiting.span.end_time_unix_nano <= second.span.start_time_unix_nano
                && waiting.span.end_time_unix_nano - waiting.span.start_time_unix_nano >= 300_000_000,
            "the wait lies between the attempts: {:#?}",
            trace.spans
        );
        // The endpoint sees the call as the parent, and the consumer of the result the attempt.
        let parents: Vec<String> = calls
            .lock()
            .unwrap()
            .iter()
            .filter(|(body, _)| *body == word)
            .map(|(_, parent)| parent.clone())
            .collect();
        assert_eq!(parents, [trace.handed_on(0), trace.handed_on(3)], "{word}");
        let end = ends.of(sent);
        assert_eq!(traceparent(end), trace.handed_on(4), "{word}");
        let state = text(end, "tracestate").unwrap();
        assert_eq!(
            state.as_deref(),
            (parent == PRODUCER).then_some("vendor=1"),
            "{word}"
        );
    }
    assert_eq!(ends.dead().count(), 1);
}

/// Sends a request over REST, with this trace, and returns the response.
#[track_caller]
fn send(scheduler: &str, trace: &str, method: &str, path: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(scheduler).unwrap();
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
         traceparent: 00-{trace}-{PRODUCER}-01\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    response
}

#[test]
fn trace_covers_job_from_its_request() {
    let receiver = OtlpReceiver::start();
    let setup = PipeBuilder::new("traces-job")
        .partitions(1)
        .tiers(&[300])
        .behave(|request| {
            Reply::status(if request.earlier_calls_of_body == 0 {
                503
            } else {
                422
            })
        });
    let scheduler = format!("127.0.0.1:{}", free_port());
    let source = setup.name().to_owned();
    let pipe = setup
        .through_scheduler()
        .set("scheduler.listen", &scheduler)
        .set("scheduler.apps.demo.topic", &source)
        .set("telemetry.otlp.endpoint", &receiver.endpoint())
        .create();
    let mut services = [pipe.scheduler("a"), pipe.enricher("a"), pipe.retry_tier("a")];
    let job = r#"{"appName":"demo","delay":"400ms","jobData":{"n":1}}"#;
    let accepted = send(&scheduler, TRACE, "POST", "/v1/jobs", job);
    assert!(accepted.starts_with("HTTP/1.1 20"), "{accepted}");
    let unknown = "/v1/jobs/00000000000000000000000000";
    let no_job = send(&scheduler, &TRACE.replace("0af", "1af"), "DELETE", unknown, "");
    assert!(no_job.starts_with("HTTP/1.1 404"), "{no_job}");
    let dead = eventually("the job is dead", DEADLINE, || {
        let dead = pipe.read(&[pipe.pipeline.dead_letter_topic()]);
        dead.into_iter().next().ok_or_else(|| "no dead letter".to_owned())
    });
    for service in &mut services {
        service.shut_down();
    }
    let mut trace = Trace::of(&receiver, TRACE, 8);
    let is_request = |span: &ReceivedSpan| span.span.name == "POST /v1/jobs";
    let request = trace.spans.iter().position(is_request).unwrap();
    let request = trace.spans.remove(request);
    assert_eq!(request.parent_id(), PRODUCER);
    // SERVER
    assert_eq!(request.span.kind, 2);
    let status = request.number("http.response.status_code");
    assert!(matches!(status, Some(200..=202)), "{request:#?}");
    let due_topic = pipe.pipeline.due_topic();
    let [attempt, retry] = [pipe.name(), &due_topic].map(|topic| format!("process {topic}"));
    let wait = format!("wait {}", pipe.pipeline.policy.tiers()[0]);
    assert_eq!(
        trace.names(),
        [
            "demo accept",
            "demo wait",
            "POST",
            &attempt,
            &wait,
            "POST",
            &retry
        ]
    );
    let parents: Vec<String> = trace.spans.iter().map(ReceivedSpan::parent_id).collect();
    let ids: Vec<String> = trace.spans.iter().map(ReceivedSpan::span_id).collect();
    let parent = &request.span_id();
    let expected = [parent, &ids[0], &ids[3], &ids[1], &ids[3], &ids[6], &ids[3]];
    assert_eq!(parents.iter().collect::<Vec<_>>(), expected);
    let services: Vec<_> = trace
        .spans
        .iter()
        .map(|span| span.resource("service.name"))
        .collect();
    let names = [
        "scheduler",
        "scheduler",
        "enricher",
        "enricher",
        "retry-tier",
        "enricher",
        "enricher",
    ];
    assert_eq!(services, names.map(Some));
    assert_eq!(request.resource("service.name"), Some("scheduler"));
    assert_eq!(traceparent(&dead), trace.handed_on(6));
    let spans = receiver.spans();
    let is_refused = |span: &&ReceivedSpan| span.number("http.response.status_code") == Some(404);
    let cancel = spans.iter().find(is_refused).unwrap();
    assert_eq!(
        cancel.attribute("http.route"),
        Some(&cancel.span.name["DELETE ".len()..])
    );
    assert!(!cancel.span.name.contains("0000"), "{cancel:#?}");
}

#[test]
fn each_call_is_a_span() {
    let receiver = OtlpReceiver::start();
    let calls: Arc<Mutex<Vec<String>>> = Arc::default();
    let seen = calls.clone();
    let setup = PipeBuilder::new("traces-calls")
        .partitions(1)
        .tiers(&[300])
        .pipeline("http.quick_retries", "2")
        .behave(move |request| {
            let parent = request.headers.get(TRACEPARENT).unwrap().to_str().unwrap();
            seen.lock().unwrap().push(parent.to_owned());
            match request.earlier_calls_of_body {
                0 => Reply::Close,
                1 => Reply::status(500),
                _ => Reply::ok("fine"),
            }
        });
    let pipe = setup
        .set("telemetry.otlp.endpoint", &receiver.endpoint())
        .create();
    let mut enricher = pipe.enricher("a");
    let parent = format!("00-{TRACE}-{PRODUCER}-01");
    let sent = pipe.produce(vec![
        Draft::new("k", "word").header(TRACEPARENT, parent.as_bytes()),
    ]);
    pipe.settle(&sent, DEADLINE);
    enricher.shut_down();
    let trace = Trace::of(&receiver, TRACE, 4);
    let (attempt, spans) = trace.spans.split_last().unwrap();
    let described: Vec<_> = spans
        .iter()
        .map(|span| {
            assert_eq!(
                (span.span.name.as_str(), span.parent_id()),
                ("POST", attempt.span_id())
            );
            (
                span.attribute("error.type"),
                span.number("http.response.status_code"),
                span.number("http.request.resend_count"),
            )
        })
        .collect();
    assert_eq!(
        described,
        [
            (Some("closed"), None, None),
            (Some("500"), Some(500), Some(1)),
            (None, Some(200), Some(2)),
        ]
    );
    let handed_on = [0, 1, 2].map(|index| trace.handed_on(index));
    assert_eq!(*calls.lock().unwrap(), handed_on);
    assert_eq!(attempt.attribute("error.type"), None);
}

#[test]
fn batch_call_links_its_attempts() {
    let receiver = OtlpReceiver::start();
    let parents: Arc<Mutex<Vec<String>>> = Arc::default();
    let seen = parents.clone();
    let reply = each_record(|_| Reply::ok("fine"));
    let setup = PipeBuilder::new("traces-batch")
        .partitions(1)
        .pipeline("http.batch", "{ records: 3, wait: 1s, values: base64 }")
        .behave(move |request| {
            let parent = request.headers.get(TRACEPARENT).unwrap().to_str().unwrap();
            seen.lock().unwrap().push(parent.to_owned());
            reply(request)
        });
    let pipe = setup
        .set("telemetry.otlp.endpoint", &receiver.endpoint())
        .create();
    let sent = pipe.produce(["a", "b", "c"].map(|word| Draft::new("k", word)).to_vec());
    let mut enricher = pipe.enricher("a");
    pipe.settle(&sent, DEADLINE);
    enricher.shut_down();
    let parents = parents.lock().unwrap();
    let spans = eventually("all spans have come", DEADLINE, || {
        let mut spans = receiver.spans();
        spans.retain(|span| span.span.name != "transaction");
        ensure(spans.len() == parents.len() + sent.len(), format!("{spans:#?}")).map(|()| spans)
    });
    let (calls, attempts): (Vec<_>, Vec<_>) = spans.iter().partition(|span| span.span.name == "POST");
    let is_shared = |call: &&&ReceivedSpan| !call.span.links.is_empty();
    let shared: Vec<_> = calls.iter().filter(is_shared).collect();
    assert!(!shared.is_empty(), "{spans:#?}");
    for call in shared {
        assert_eq!(call.parent_id(), "");
        for link in &call.span.links {
            let linked = attempts
                .iter()
                .filter(|attempt| attempt.span.span_id == link.span_id);
            assert_eq!(linked.count(), 1, "{spans:#?}");
        }
        let context = format!("00-{}-{}-01", call.trace_id(), call.span_id());
        assert!(parents.contains(&context), "{context}: {parents:?}");
    }
}

#[test]
fn redrives_link_traces_of_records() {
    let receiver = OtlpReceiver::start();
    let works = Arc::new(AtomicBool::new(false));
    let endpoint_works = works.clone();
    let setup = PipeBuilder::new("traces-redrive")
        .partitions(1)
        .with_inspector()
        .behave(move |_| {
            Reply::status(if endpoint_works.load(Ordering::SeqCst) {
                200
            } else {
                422
            })
        });
    let pipe = setup
        .set("telemetry.otlp.endpoint", &receiver.endpoint())
        .create();
    let mut enricher = pipe.enricher("a");
    let traces = [TRACE.to_owned(), TRACE.replace("0af", "1af")];
    let drafts = traces.iter().map(|trace| {
        let parent = format!("00-{trace}-{PRODUCER}-01");
        Draft::new("k", trace.clone()).header(TRACEPARENT, parent.as_bytes())
    });
    let sent = pipe.produce(drafts.collect());
    let ends = pipe.settle(&sent, DEADLINE);
    assert_eq!(ends.dead().count(), 2);
    works.store(true, Ordering::SeqCst);

    let mut inspector = pipe.start("dlq-inspector", "a", &[]);
    let server = format!("http://{}", inspector.word_after(" api="));
    let arguments = [
        "dlq",
        "redrive",
        "--all",
        "--yes",
        "--observe",
        "0s",
        "--server",
        &server,
    ];
    eventually("both dead letters are redriven", DEADLINE, || {
        let printed = pipe.redeliver(&arguments);
        // The index may not contain both yet.
        ensure(printed.code == Some(0), format!("{printed:?}"))
    });
    let results = || pipe.read(&[pipe.pipeline.output.clone().unwrap()]).len();
    until_seen("both records have results", results, |&count| count == 2);
    inspector.shut_down();
    enricher.shut_down();

    let spans = receiver.spans();
    let redrives = spans.iter().filter(|span| span.span.name == "redrive");
    let mut linked: Vec<String> = redrives
        .flat_map(|span| &span.span.links)
        .map(|link| link.trace_id.iter().map(|byte| format!("{byte:02x}")).collect())
        .collect();
    linked.sort();
    assert_eq!(linked, traces);
    // OK
    let statuses = spans
        .iter()
        .filter(|span| span.span.name == "redrive")
        .map(|span| span.span.status.as_ref().unwrap().code);
    assert!(statuses.into_iter().all(|code| code == 1), "{spans:#?}");
    // The attempts after the redrive belong to the traces of the first ones.
    let attempts = spans
        .iter()
        .filter(|span| span.trace_id() == TRACE && span.span.name.starts_with("process"));
    assert_eq!(attempts.count(), 2);
    let call = spans
        .iter()
        .find(|span| span.attribute("rpc.service") == Some("redeliver.v1.RedriveService"));
    let call = call.unwrap();
    assert_eq!(call.attribute("error.type"), None, "{call:#?}");
    for service in ["enricher", "dlq-inspector"] {
        let is_own = |span: &&ReceivedSpan| span.resource("service.name") == Some(service);
        let transaction = spans
            .iter()
            .filter(is_own)
            .find(|span| span.span.name == "transaction");
        let transaction = transaction.unwrap();
        assert!(
            transaction.attribute("redeliver.transactional_id").is_some(),
            "{transaction:#?}"
        );
        assert!(
            transaction.number("messaging.batch.message_count").is_some(),
            "{transaction:#?}"
        );
    }
}
