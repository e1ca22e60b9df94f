//! Damaged responses: the handler never panics, and each call ends with a result or a failure.

use redeliver_core::json;
use redeliver_runtime::config::BatchValues;
use redeliver_testkit::fuzz::{FEW, check_each, fuzz};
use redeliver_testkit::valid_json;
use reqwest::header::{DATE, RETRY_AFTER};

use super::*;
use crate::output_choice::{Destination, OutputChoice};

const HOUR: Duration = Duration::from_secs(3_600);

/// Two headers, one per line. No wait is longer than the limit.
fn check_retry_after(input: &[u8]) {
    let mut lines = input.split(|byte| *byte == b'\n');
    let headers: HeaderMap = [RETRY_AFTER, DATE]
        .into_iter()
        .filter_map(|name| Some((name, HeaderValue::from_bytes(lines.next()?).ok()?)))
        .collect();
    let wait = retry_after::read(&headers, Timestamp::from_millis(784_111_777_000), HOUR);
    assert!(wait.is_none_or(|wait| wait <= HOUR), "{wait:?}");
}

fn values_of_retry_after() -> Vec<Vec<u8>> {
    [
        "120",
        "Sun, 06 Nov 1994 08:50:37 GMT\nSun, 06 Nov 1994 08:49:37 GMT",
        "Sunday, 06-Nov-94 08:50:37 GMT\nyesterday",
        "Sun Nov  6 08:50:37 1994\n0",
    ]
    .map(Vec::from)
    .into()
}

/// Three lines: a document, a pointer and a response. What is inserted is JSON again.
fn check_json(input: &[u8]) {
    let mut lines = input.splitn(3, |byte| *byte == b'\n');
    let [document, pointer, response] = [(); 3].map(|()| lines.next().unwrap_or_default());
    let pointer = String::from_utf8_lossy(pointer);
    if let Ok(merged) = merge::insert(document, &pointer, response) {
        let merged = serde_json::from_slice::<&serde_json::value::RawValue>(&merged);
        assert!(merged.is_ok(), "{merged:?}");
    }
    let choice = OutputChoice::By {
        subject: Subject::Response(pointer.into_owned()),
        topics: [("a".to_owned(), None)].into(),
        otherwise: Some("rest".into()),
    };
    let chosen = choice.destination(None, 200, document);
    assert!(
        matches!(chosen, Ok(Destination::Topic(_) | Destination::Nowhere)),
        "{chosen:?}"
    );
}

fn documents() -> Vec<Vec<u8>> {
    [
        "{\"b\":1.00,\"a\":1e400,\"r\":{\"x\":[null,true,\"\\ud83d\\ude00\"]}}\n/r/x~1y\n{\"ok\":\"a\"}",
        "{}\n/a/b/c/d\n[[[[1]]]]",
        "{\"a\":\"a\",\"a\":{}}\n/a\n\"a\"",
    ]
    .map(Vec::from)
    .into()
}

/// Whatever else a valid document contains, it chooses the output, only its field changes in a merge, and it
/// is a part of calls for several records.
fn check_valid_json(count: u32) {
    let document = |random: &mut fastrand::Rng| {
        let meta = valid_json::object(random, &[("queue", "\"a\"")]);
        valid_json::object(random, &[("meta", &meta)]).into_bytes()
    };
    let pointer = "/meta/queue".to_owned();
    let by =
        [Subject::Payload(pointer.clone()), Subject::Response(pointer)].map(|subject| OutputChoice::By {
            subject,
            topics: [("a".to_owned(), Some("chosen".into()))].into(),
            otherwise: None,
        });
    let whole = |value: &[u8]| -> Box<serde_json::value::RawValue> { serde_json::from_slice(value).unwrap() };
    let others = |document: &[u8]| -> Vec<(String, String)> {
        let document = whole(document);
        let fields = json::fields(&document).unwrap().into_iter();
        let texts = fields.map(|(name, value)| (name.get().to_owned(), value.get().to_owned()));
        texts
            .filter(|(_, value)| !value.contains("queue") && !value.contains("\\u00"))
            .collect()
    };
    check_each("valid JSON", count, document, |input| {
        for by in &by {
            let chosen = by.destination(Some(input), 200, input);
            assert_eq!(chosen, Ok(Destination::Topic("chosen".into())));
        }
        let merged = merge::insert(input, "/meta/queue/new", input);
        assert!(merged.is_err(), "a string contains nothing");
        let merged = merge::insert(input, "/meta/new", input).unwrap();
        let [new] = json::at_each(&merged, &["/meta/new"]).unwrap()[..] else {
            panic!("one")
        };
        assert_eq!(new.unwrap().get(), whole(input).get());
        assert_eq!(others(&merged), others(input));
        assert_eq!(batch::check(Some(input), BatchValues::Json), Ok(()));
        let response = [br#"{"results":[{"id":"1","value":"#, input, b"}]}"].concat();
        let results = batch::results(
            &response.into(),
            ["1".to_owned()].into_iter(),
            BatchValues::Json,
            HOUR,
        );
        let result = results.unwrap().pop().flatten().unwrap();
        assert_eq!(result.value, whole(input).get());
    });
}

fn responses() -> Vec<Vec<u8>> {
    [
        "HTTP/1.1 200 OK\r\ncontent-length: 9\r\ncontent-type: text/plain\r\n\r\n{\"a\":\"b\"}",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\npart\r\n0\r\n\r\n",
        "HTTP/1.1 429 Too Many Requests\r\nretry-after: 120\r\ndate: Sun, 06 Nov 1994 08:49:37 GMT\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 503 Service Unavailable\r\nretry-after: Sun, 06 Nov 1994 08:50:37 GMT\r\ncontent-length: 4\r\n\r\nbusy",
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n",
        "HTTP/1.0 301 Moved\r\nlocation: /\r\n\r\n",
    ]
    .map(Vec::from)
    .into()
}

/// Each call of a handler receives these bytes, and the end of the connection.
fn check_responses(count: u32) {
    let response = Arc::new(Mutex::new(Vec::new()));
    let next = response.clone();
    let server = Server::start(move |_| Answer::Last(next.lock().unwrap().clone()));
    let handler = handler(HttpSettings {
        quick_retries: 0,
        max_retry_after: HOUR,
        max_response_bytes: 2_000,
        ..settings(format!("http://{}", server.address))
    });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    fuzz("responses", count, &responses(), |input| {
        *response.lock().unwrap() = input.to_vec();
        match runtime.block_on(run(&handler, attempt(Some(b"doc"), &[]))) {
            Ok(produced) => assert!(value(&produced).len() <= 2_000),
            Err(failure) => {
                assert!(failure.code.starts_with("http."), "{failure}");
                assert!(failure.message.len() < 400, "{failure}");
            }
        }
    });
}

#[test]
fn damaged_responses_never_panic() {
    fuzz("Retry-After", FEW, &values_of_retry_after(), check_retry_after);
    fuzz("JSON", FEW, &documents(), check_json);
    check_valid_json(FEW);
    check_responses(FEW);
}

/// See the test of the decoders in `services/redeliver/tests/it/fuzz.rs`.
#[test]
#[ignore = "long"]
fn many_damaged_responses_never_panic() {
    fuzz("Retry-After", 70_000, &values_of_retry_after(), check_retry_after);
    fuzz("JSON", 60_000, &documents(), check_json);
    check_valid_json(10_000);
    check_responses(20_000);
}
