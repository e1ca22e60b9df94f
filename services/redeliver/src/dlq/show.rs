//! A dead letter as text and as JSON.

use redeliver_client::convert::from_headers;
use redeliver_client::messages::{DeadLetter, Position, RedrivenAs};
use redeliver_core::redrive::{REDRIVE_EDITED, REDRIVE_OF};
use serde_json::json;

use crate::output::{Json, Text as _, block, fields, header_lines, object, shortened};

/// Limit of the payload in text output, in bytes.
const SHOWN: usize = 16 * 1024;
/// Limit of the names of masked headers or paths in text output, in characters.
const SHOWN_NAMES: usize = 500;
/// What is shown instead of a key or a payload that the caller may not see.
pub(super) const WITHHELD: &str = "(withheld: needs the scope dead-letters:payload)";
/// What is shown instead of a key or a payload that is masked as a whole.
pub(super) const MASKED: &str = "(masked: needs the scope dead-letters:unmasked)";

pub(crate) fn as_text(letter: &DeadLetter) -> String {
    let key = match &letter.key {
        _ if is_withheld(letter) => WITHHELD.text(),
        _ if letter.is_masked("key") => MASKED.text(),
        None => "(null)".text(),
        key => key.text(),
    };
    let key = key.unwrap_or_default();
    let mut text = fields(&[
        ("id", &letter.id),
        ("state", &letter.state().name()),
        ("written to", &letter.redriven_as.as_ref().map(redriven)),
        ("dead at", &letter.timestamp()),
        ("pipeline", &letter.pipeline),
        ("class", &letter.error_class),
        ("code", &letter.error_code),
        ("message", &letter.error_message),
        ("response", &letter.error_response),
        ("failed at", &letter.failed_at),
        ("retries", &letter.retry_count),
        ("origin", &letter.origin.as_ref().map(origin)),
        ("at origin", &letter.payload_at_origin().known()),
        ("written at", &letter.origin_timestamp),
        ("trace", &letter.trace_id),
        ("job", &letter.job_id),
        ("group", &letter.group),
        ("headers of", &letter.dialect().name()),
        ("edited", &edited(letter)),
        ("masked", &masked(letter)),
        ("key", &format_args!("{key}")),
    ]);
    if is_withheld(letter) {
        text += &format!("\nheaders\n  {WITHHELD}\n");
    } else if !letter.headers.is_empty() {
        text += "\nheaders\n";
        text += &header_lines(&letter.headers);
    }
    if letter.headers_truncated {
        text += "  (more headers are too large to be shown)\n";
    }
    if letter.unreadable_headers > 0 {
        text += &format!(
            "  ({} more headers have names that are not UTF-8)\n",
            letter.unreadable_headers
        );
    }
    text += "\n";
    match (&letter.value, letter.value_size) {
        (Some(value), size) => {
            text += &match size {
                Some(size) => format!("payload, {size} bytes\n"),
                None => "payload\n".to_owned(),
            };
            text += &block(value, SHOWN);
            if letter.value_truncated || value.len() > SHOWN {
                text += "\n(use --payload to write all of it)";
            }
        }
        (None, Some(size)) if is_withheld(letter) => {
            text += &format!("payload, {size} bytes\n{WITHHELD}");
        }
        (None, Some(size)) => text += &format!("payload, {size} bytes\n(use --payload to write it)"),
        (None, None) if is_withheld(letter) && letter.is_masked("value_size") => {
            text += &format!("payload\n{WITHHELD}");
        }
        (None, None) if letter.is_masked("value") => text += &format!("payload\n{MASKED}"),
        (None, None) => text += "payload (null)",
    }
    text
}

fn is_withheld(letter: &DeadLetter) -> bool {
    letter.payload_withheld != 0
}

/// Where its record was written by a redrive, in which job, and with which edits.
fn redriven(redriven: &RedrivenAs) -> String {
    let written = redriven.written.text();
    let edited = (!redriven.edited.is_empty()).then(|| format!("edited {}", redriven.edited.join(", ")));
    let job = format!("job {}", redriven.redrive_id);
    let parts: Vec<String> = [written, edited, Some(job)].into_iter().flatten().collect();
    parts.join(", ")
}

/// The dead letter of which it is an edited copy, and the edits, from its headers.
fn edited(letter: &DeadLetter) -> Option<String> {
    let headers = from_headers(&letter.headers);
    let header = |name| {
        let value = headers.last(name)?;
        Some(shortened(&String::from_utf8_lossy(value), SHOWN_NAMES))
    };
    let of = header(REDRIVE_OF)?;
    // It was redriven again since.
    let parts = header(REDRIVE_EDITED).unwrap_or_else(|| "an earlier copy".to_owned());
    Some(format!("{parts} of {of}"))
}

/// What is masked: fields, and in them headers and paths.
fn masked(letter: &DeadLetter) -> Option<String> {
    let masked = letter.masked.as_ref()?;
    let parts = masked.fields.iter().map(|field| match field.as_str() {
        "headers" => format!("headers ({})", shortened(&masked.headers.join(", "), SHOWN_NAMES)),
        "value" if !masked.paths.is_empty() => {
            format!("value ({})", shortened(&masked.paths.join(", "), SHOWN_NAMES))
        }
        field => field.to_owned(),
    });
    parts.collect::<Vec<_>>().join(", ").text()
}

/// What is known of an origin: its topic, and perhaps its partition and its offset.
fn origin(origin: &Position) -> String {
    match (origin.partition, origin.offset) {
        (..0, _) => origin.topic.clone(),
        (partition, ..0) => format!("{}/{partition}", origin.topic),
        _ => origin.to_string(),
    }
}

/// The fields that are shown if they say something.
const OPTIONAL: [&str; 6] = [
    "error_response",
    "key_truncated",
    "headers",
    "headers_truncated",
    "unreadable_headers",
    "payload_withheld",
];

pub(crate) fn as_json(letter: &DeadLetter) -> Json {
    let mut object = object(letter);
    let position = letter.position.as_ref();
    let origin = letter.origin.as_ref().map(|origin| {
        json!({
            "topic": origin.topic,
            "partition": (origin.partition >= 0).then_some(origin.partition),
            "offset": (origin.offset >= 0).then_some(origin.offset),
            "timestamp": letter.origin_timestamp.text(),
        })
    });
    for (name, value) in [
        ("topic", json!(position.map(|position| &position.topic))),
        ("partition", json!(position.map(|position| position.partition))),
        ("offset", json!(position.map(|position| position.offset))),
        ("origin", json!(origin)),
        ("dead_at", json!(letter.timestamp().text())),
        ("payload_withheld", json!(is_withheld(letter))),
    ] {
        object.insert(name.to_owned(), value);
    }
    // What is withheld is not the same as what a record does not have, and a response without headers and value not the same as a record that has none.
    let is_shown = |name: &str, value: &Json| match name {
        "position" | "origin_timestamp" | "timestamp_type" | "decoded" | "completeness" => false,
        "content_hash" | "content_hash_base64" | "state_time" | "state_by" | "state_reason" => false,
        "key" | "key_base64" => !is_withheld(letter),
        "value" | "value_base64" | "value_truncated" => letter.value.is_some(),
        "payload_at_origin" => !value.is_null(),
        "masked" => value["fields"] != json!([]),
        _ => !OPTIONAL.contains(&name) || ![json!(false), json!(0), json!([])].contains(value),
    };
    object.retain(|name, value| is_shown(name, value));
    object.into()
}

#[cfg(test)]
mod tests {
    use redeliver_client::Timestamp;
    use redeliver_client::convert::{to_headers, to_timestamp};
    use redeliver_client::messages::{DeadLetterState, HeaderDialect, Masked, PayloadWithheld};
    use redeliver_core::Headers;

    use super::*;

    fn letter() -> DeadLetter {
        let headers: Headers = [
            ("tenant", Some(&b"x"[..])),
            ("tenant", None),
            ("error-class", Some(&b"permanent"[..])),
        ]
        .into_iter()
        .collect();
        let time = |millis| Some(to_timestamp(Timestamp::from_millis(millis)));
        DeadLetter {
            id: "crawl-dlq/3/17".to_owned(),
            position: position("crawl-dlq", 3, 17),
            dead_at: time(1_763_722_800_123),
            state: DeadLetterState::Open.into(),
            dialect: HeaderDialect::Redeliver.into(),
            pipeline: "crawl".to_owned(),
            error_class: "permanent".to_owned(),
            error_code: "http.404".to_owned(),
            error_message: "not\u{1b}[31m found".to_owned(),
            error_response: "{\"error\":\"gone\"}".to_owned(),
            failed_at: time(1_763_722_800_100),
            retry_count: 1,
            origin: position("crawl", 0, 5),
            key: Some(bytes::Bytes::from_static(b"k")),
            value_size: Some(3),
            value: Some(bytes::Bytes::from_static(b"\xff\x00a")),
            headers: to_headers(&headers),
            ..DeadLetter::default()
        }
    }

    fn position(topic: &str, partition: i32, offset: i64) -> Option<Position> {
        let topic = topic.to_owned();
        Some(Position {
            topic,
            partition,
            offset,
        })
    }

    #[test]
    fn a_dead_letter_is_shown_whole() {
        let expected = "\
id          crawl-dlq/3/17
state       open
dead at     2025-11-21T11:00:00.123Z
pipeline    crawl
class       permanent
code        http.404
message     not\\u{1b}[31m found
response    {\"error\":\"gone\"}
failed at   2025-11-21T11:00:00.100Z
retries     1
origin      crawl/0/5
headers of  redeliver
key         k

headers
  tenant: x
  tenant: (null)
  error-class: permanent

payload, 3 bytes
ff 00 61";
        assert_eq!(as_text(&letter()), expected);
        let mut copy = letter();
        let mut headers = from_headers(&copy.headers);
        headers.push_text(REDRIVE_OF, "crawl-dlq/0/5");
        headers.push_text(REDRIVE_EDITED, "value, key");
        copy.headers = to_headers(&headers);
        let shown = as_text(&copy);
        assert!(
            shown.contains("\nedited      value, key of crawl-dlq/0/5\n"),
            "{shown}"
        );
        let gone = DeadLetter {
            value: None,
            value_size: None,
            ..letter()
        };
        assert!(as_text(&gone).ends_with("\npayload (null)"));
        let long = DeadLetter {
            value: Some(vec![b'a'; SHOWN + 1].into()),
            ..letter()
        };
        assert!(as_text(&long).ends_with("… 1 more bytes\n(use --payload to write all of it)"));
    }

    #[test]
    fn a_redriven_letter_names_its_copy() {
        let redriven = RedrivenAs {
            redrive_id: "01a212ee742fea04".to_owned(),
            edited: vec!["value".to_owned(), "headers".to_owned()],
            written: position("crawl-retry-due", 0, 7),
        };
        let shown = |redriven: &RedrivenAs| {
            let letter = DeadLetter {
                redriven_as: Some(redriven.clone()),
                ..letter()
            };
            (
                as_text(&letter),
                as_json(&letter)["redriven_as"]["written"].clone(),
            )
        };
        let (text, written) = shown(&redriven);
        let line = "\nwritten to  crawl-retry-due/0/7, edited value, headers, job 01a212ee742fea04\n";
        assert!(text.contains(line), "{text}");
        assert_eq!(written, json!("crawl-retry-due/0/7"));
        let unknown = RedrivenAs {
            edited: Vec::new(),
            written: None,
            ..redriven
        };
        let (text, written) = shown(&unknown);
        assert!(text.contains("\nwritten to  job 01a212ee742fea04\n"), "{text}");
        assert_eq!(written, Json::Null);
    }

    #[test]
    fn an_origin_may_lack_a_position() {
        for (partition, offset, expected) in [(-1, -1, "crawl"), (3, -1, "crawl/3"), (3, 0, "crawl/3/0")] {
            let letter = DeadLetter {
                origin: position("crawl", partition, offset),
                ..letter()
            };
            let shown = as_text(&letter);
            assert!(shown.contains(&format!("\norigin      {expected}\n")), "{shown}");
        }
    }

    #[test]
    fn withheld_and_missing_payloads_differ() {
        let withheld = DeadLetter {
            key: None,
            value: None,
            headers: Vec::new(),
            payload_withheld: PayloadWithheld::NoPermission.into(),
            ..letter()
        };
        let text = as_text(&withheld);
        assert!(text.contains("key         (withheld: "), "{text}");
        assert!(
            text.ends_with("payload, 3 bytes\n(withheld: needs the scope dead-letters:payload)"),
            "{text}"
        );
        let value = as_json(&withheld);
        assert_eq!(value["payload_withheld"], json!(true));
        assert!(value.get("key").is_none());
        assert!(as_json(&letter()).get("payload_withheld").is_none());
    }

    #[test]
    fn masked_parts_are_marked() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let masked = DeadLetter {
            key: None,
            value_size: None,
            masked: Some(Masked {
                fields: names(&["content_hash", "key", "value_size", "headers", "value"]),
                headers: names(&["tenant"]),
                paths: names(&["/card/*"]),
            }),
            ..letter()
        };
        let text = as_text(&masked);
        let line = "masked      content_hash, key, value_size, headers (tenant), value (/card/*)\n";
        assert!(text.contains(line), "{text}");
        assert!(
            text.contains("key         (masked: needs the scope dead-letters:unmasked)\n"),
            "{text}"
        );
        assert!(text.contains("\npayload\nff 00 61"), "{text}");
        assert_eq!(as_json(&masked)["masked"]["paths"], json!(["/card/*"]));
        let whole = DeadLetter {
            value: None,
            masked: Some(Masked {
                fields: names(&["value", "value_size"]),
                ..Masked::default()
            }),
            ..masked
        };
        assert!(as_text(&whole).ends_with("payload\n(masked: needs the scope dead-letters:unmasked)"));
        assert!(as_json(&letter()).get("masked").is_none());
    }

    #[test]
    fn binary_numbers_in_headers_are_decoded() {
        let headers: Headers = [
            ("kafka_dlt-original-partition", Some(&2_i32.to_be_bytes()[..])),
            ("other", Some(&2_i32.to_be_bytes()[..])),
        ]
        .into_iter()
        .collect();
        let letter = DeadLetter {
            headers: to_headers(&headers),
            unreadable_headers: 3,
            ..letter()
        };
        let shown = as_text(&letter);
        let expected = "headers\n  kafka_dlt-original-partition: 2\n  other: \\u{0}\\u{0}\\u{0}\\u{2}\n  \
                        (3 more headers have names that are not UTF-8)\n";
        assert!(shown.contains(expected), "{shown}");
        let value = as_json(&letter);
        // The exact bytes stay.
        assert_eq!(
            value["headers"][0],
            json!({ "name": "kafka_dlt-original-partition", "value": "\0\0\0\u{2}", "decoded": "2" })
        );
        assert_eq!(value["headers"][1].get("decoded"), None);
        assert_eq!(value["unreadable_headers"], json!(3));
    }

    #[test]
    fn json_contains_exact_bytes() {
        let value = as_json(&letter());
        assert_eq!(value["value_base64"], json!("/wBh"));
        assert_eq!(value["error_message"], json!("not\u{1b}[31m found"));
        assert_eq!(value["headers"][1], json!({ "name": "tenant", "value": null }));
        assert_eq!(value["origin"]["offset"], json!(5));
        let basic = DeadLetter {
            value: None,
            headers: Vec::new(),
            ..letter()
        };
        let basic = as_json(&basic);
        assert!(basic.get("value").is_none() && basic.get("headers").is_none());
        assert_eq!(basic["value_size"], json!(3));
    }
}
