//! A dead letter as text and as JSON.

use redeliver_client::{DeadLetter, Dialect, Position, RedrivenAs, Timestamp};
use redeliver_core::redrive::{REDRIVE_EDITED, REDRIVE_OF};
use serde_json::{Map, json};

use crate::output::{Json, block, fields, header_lines, headers_json, insert_bytes, line, shortened};

/// Limit of the payload in text output, in bytes.
const SHOWN: usize = 16 * 1024;
/// Limit of the names of masked headers or paths in text output, in characters.
const SHOWN_NAMES: usize = 500;
/// What is shown instead of a key or a payload that the caller may not see.
const WITHHELD: &str = "(withheld: needs the scope dead-letters:payload)";
/// What is shown instead of a key or a payload that is masked as a whole.
pub(super) const MASKED: &str = "(masked: needs the scope dead-letters:unmasked)";

pub(crate) fn as_text(letter: &DeadLetter, redriven: Option<&RedrivenAs>) -> String {
    let time = |time: Option<Timestamp>| time.map(|time| time.to_string());
    let mut text = fields(&[
        ("id", Some(letter.id.clone())),
        ("state", Some(letter.state.as_str().to_owned())),
        ("written to", redriven.map(redriven_text)),
        ("dead at", time(letter.dead_at)),
        ("pipeline", letter.pipeline.clone()),
        ("class", letter.error_class.clone()),
        ("code", letter.error_code.clone()),
        ("message", letter.error_message.clone()),
        ("failed at", time(letter.failed_at)),
        ("retries", Some(letter.retry_count.to_string())),
        ("origin", letter.origin.as_ref().map(origin)),
        ("written at", time(letter.origin_timestamp)),
        ("trace", letter.trace_id.clone()),
        ("job", letter.job_id.clone()),
        ("group", letter.group.clone()),
        (
            "headers of",
            letter.dialect.map(|dialect| dialect.as_str().to_owned()),
        ),
        ("edited", edited(letter)),
        ("masked", masked(letter)),
        (
            "key",
            Some(match &letter.key {
                _ if letter.is_payload_withheld => WITHHELD.to_owned(),
                _ if letter.masked.has("key") => MASKED.to_owned(),
                None => "(null)".to_owned(),
                Some(key) => line(key, 1024),
            }),
        ),
    ]);
    if letter.is_payload_withheld {
        text += &format!("\nheaders\n  {WITHHELD}\n");
    } else if !letter.headers.is_empty() {
        text += "\nheaders\n";
        text += &header_lines(&letter.headers);
    }
    if letter.are_headers_truncated {
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
            if letter.is_value_truncated || value.len() > SHOWN {
                text += "\n(use --payload to write all of it)";
            }
        }
        (None, Some(size)) if letter.is_payload_withheld => {
            text += &format!("payload, {size} bytes\n{WITHHELD}");
        }
        (None, Some(size)) => text += &format!("payload, {size} bytes\n(use --payload to write it)"),
        (None, None) if letter.is_payload_withheld && letter.masked.has("value_size") => {
            text += &format!("payload\n{WITHHELD}");
        }
        (None, None) if letter.masked.has("value") => text += &format!("payload\n{MASKED}"),
        (None, None) => text += "payload (null)",
    }
    text
}

/// Where its record was written by a redrive, in which job, and what was edited in it.
fn redriven_text(redriven: &RedrivenAs) -> String {
    let written = redriven.written.as_ref().map(ToString::to_string);
    let edited = (!redriven.edited.is_empty()).then(|| format!("edited {}", redriven.edited.join(", ")));
    let job = format!("job {}", redriven.redrive_id);
    let parts: Vec<String> = [written, edited, Some(job)].into_iter().flatten().collect();
    parts.join(", ")
}

pub(crate) fn redriven_json(redriven: &RedrivenAs) -> Json {
    let written = redriven.written.as_ref().map(ToString::to_string);
    json!({ "redrive_id": redriven.redrive_id, "edited": redriven.edited, "written": written })
}

/// Of which dead letter it is an edited copy, and what was edited, as its headers say.
fn edited(letter: &DeadLetter) -> Option<String> {
    let header = |name| {
        let value = letter.headers.last(name)?;
        Some(shortened(&String::from_utf8_lossy(value), SHOWN_NAMES))
    };
    let of = header(REDRIVE_OF)?;
    // It was redriven again since.
    let parts = header(REDRIVE_EDITED).unwrap_or_else(|| "an earlier copy".to_owned());
    Some(format!("{parts} of {of}"))
}

/// What is masked: fields, and in them headers and paths.
fn masked(letter: &DeadLetter) -> Option<String> {
    let masked = &letter.masked;
    if masked.fields.is_empty() {
        return None;
    }
    let parts = masked.fields.iter().map(|field| match field.as_str() {
        "headers" => format!("headers ({})", shortened(&masked.headers.join(", "), SHOWN_NAMES)),
        "value" if !masked.paths.is_empty() => {
            format!("value ({})", shortened(&masked.paths.join(", "), SHOWN_NAMES))
        }
        field => field.to_owned(),
    });
    Some(parts.collect::<Vec<_>>().join(", "))
}

/// What is known of an origin: its topic, and perhaps its partition and its offset.
fn origin(origin: &Position) -> String {
    match (origin.partition, origin.offset) {
        (..0, _) => origin.topic.to_string(),
        (partition, ..0) => format!("{}/{partition}", origin.topic),
        (partition, offset) => format!("{}/{partition}/{offset}", origin.topic),
    }
}

pub(crate) fn as_json(letter: &DeadLetter) -> Json {
    let time = |time: Option<Timestamp>| time.map(|time| time.to_string());
    let mut object = Map::new();
    let mut put = |name: &str, value: Json| object.insert(name.to_owned(), value);
    put("id", json!(letter.id));
    put("topic", json!(&*letter.position.topic));
    put("partition", json!(letter.position.partition));
    put("offset", json!(letter.position.offset));
    put("dead_at", json!(time(letter.dead_at)));
    put("state", json!(letter.state.as_str()));
    put("dialect", json!(letter.dialect.map(Dialect::as_str)));
    put("pipeline", json!(letter.pipeline));
    put("error_class", json!(letter.error_class));
    put("error_code", json!(letter.error_code));
    put("error_message", json!(letter.error_message));
    put("failed_at", json!(time(letter.failed_at)));
    put("retry_count", json!(letter.retry_count));
    let origin = letter.origin.as_ref().map(|origin| {
        json!({
            "topic": &*origin.topic,
            "partition": (origin.partition >= 0).then_some(origin.partition),
            "offset": (origin.offset >= 0).then_some(origin.offset),
            "timestamp": time(letter.origin_timestamp),
        })
    });
    put("origin", json!(origin));
    put("trace_id", json!(letter.trace_id));
    put("job_id", json!(letter.job_id));
    put("group", json!(letter.group));
    put("value_size", json!(letter.value_size));
    // What is withheld is not the same as what a record does not have.
    if letter.is_payload_withheld {
        object.insert("payload_withheld".to_owned(), true.into());
    } else {
        insert_bytes(&mut object, "key", letter.key.as_deref());
    }
    if letter.is_key_truncated {
        object.insert("key_truncated".to_owned(), true.into());
    }
    if !letter.masked.fields.is_empty() {
        let masked = &letter.masked;
        let masked = json!({ "fields": masked.fields, "headers": masked.headers, "paths": masked.paths });
        object.insert("masked".to_owned(), masked);
    }
    // A response without headers and value is not the same as a record that has none.
    if let Some(value) = &letter.value {
        insert_bytes(&mut object, "value", Some(value));
        object.insert("value_truncated".to_owned(), letter.is_value_truncated.into());
    }
    if !letter.headers.is_empty() {
        object.insert("headers".to_owned(), headers_json(&letter.headers));
    }
    if letter.are_headers_truncated {
        object.insert("headers_truncated".to_owned(), true.into());
    }
    if letter.unreadable_headers > 0 {
        object.insert("unreadable_headers".to_owned(), letter.unreadable_headers.into());
    }
    Json::Object(object)
}

#[cfg(test)]
mod tests {
    use redeliver_client::{DeadLetterState, Headers, Masked};

    use super::*;

    fn letter() -> DeadLetter {
        let headers: Headers = [
            ("tenant", Some(&b"x"[..])),
            ("tenant", None),
            ("error-class", Some(&b"permanent"[..])),
        ]
        .into_iter()
        .collect();
        DeadLetter {
            id: "crawl-dlq/3/17".to_owned(),
            position: Position {
                topic: "crawl-dlq".into(),
                partition: 3,
                offset: 17,
            },
            dead_at: Some(Timestamp::from_millis(1_763_722_800_123)),
            timestamp_type: None,
            state: DeadLetterState::Open,
            dialect: Some(Dialect::Redeliver),
            pipeline: Some("crawl".to_owned()),
            error_class: Some("permanent".to_owned()),
            error_code: Some("http.404".to_owned()),
            error_message: Some("not\u{1b}[31m found".to_owned()),
            failed_at: Some(Timestamp::from_millis(1_763_722_800_100)),
            retry_count: 1,
            origin: Some(Position {
                topic: "crawl".into(),
                partition: 0,
                offset: 5,
            }),
            origin_timestamp: None,
            key: Some(bytes::Bytes::from_static(b"k")),
            value_size: Some(3),
            value: Some(bytes::Bytes::from_static(b"\xff\x00a")),
            is_value_truncated: false,
            is_key_truncated: false,
            are_headers_truncated: false,
            is_payload_withheld: false,
            masked: Masked::default(),
            headers,
            unreadable_headers: 0,
            trace_id: None,
            job_id: None,
            group: None,
        }
    }

    #[test]
    fn dead_letter_shows_failure_and_payload() {
        let expected = "\
id          crawl-dlq/3/17
state       open
dead at     2025-11-21T11:00:00.123Z
pipeline    crawl
class       permanent
code        http.404
message     not\\u{1b}[31m found
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
        assert_eq!(as_text(&letter(), None), expected);
        let mut copy = letter();
        copy.headers.push_text(REDRIVE_OF, "crawl-dlq/0/5");
        copy.headers.push_text(REDRIVE_EDITED, "value, key");
        let shown = as_text(&copy, None);
        assert!(
            shown.contains("\nedited      value, key of crawl-dlq/0/5\n"),
            "{shown}"
        );
        let gone = DeadLetter {
            value: None,
            value_size: None,
            ..letter()
        };
        assert!(as_text(&gone, None).ends_with("\npayload (null)"));
        let long = DeadLetter {
            value: Some(vec![b'a'; SHOWN + 1].into()),
            ..letter()
        };
        assert!(as_text(&long, None).ends_with("… 1 more bytes\n(use --payload to write all of it)"));
    }

    #[test]
    fn withheld_payload_is_not_missing() {
        let withheld = DeadLetter {
            key: None,
            value: None,
            headers: Headers::new(),
            is_payload_withheld: true,
            ..letter()
        };
        let text = as_text(&withheld, None);
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
            masked: Masked {
                fields: names(&["content_hash", "key", "value_size", "headers", "value"]),
                headers: names(&["tenant"]),
                paths: names(&["/card/*"]),
            },
            ..letter()
        };
        let text = as_text(&masked, None);
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
            masked: Masked {
                fields: names(&["value", "value_size"]),
                ..Masked::default()
            },
            ..masked
        };
        assert!(as_text(&whole, None).ends_with("payload\n(masked: needs the scope dead-letters:unmasked)"));
        assert!(as_json(&letter()).get("masked").is_none());
    }

    #[test]
    fn binary_numbers_of_headers_are_decoded() {
        let headers: Headers = [
            ("kafka_dlt-original-partition", Some(&2_i32.to_be_bytes()[..])),
            ("other", Some(&2_i32.to_be_bytes()[..])),
        ]
        .into_iter()
        .collect();
        let letter = DeadLetter {
            headers,
            unreadable_headers: 3,
            ..letter()
        };
        let shown = as_text(&letter, None);
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
}
