//! The id of a dead letter: its position `topic/partition/offset` in the dead-letter topic.

use std::fmt;
use std::str::FromStr;

use redeliver_core::Position;
use redeliver_core::pipeline::is_topic_name;

/// The text is not a valid id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is not topic/partition/offset, such as crawl-jobs-dlq/3/1024")]
pub struct InvalidId;

/// Parses an id. Topic names contain no `/`, so that its text is unambiguous.
///
/// # Errors
/// If it is none.
pub fn parse_id(text: &str) -> Result<Position, InvalidId> {
    let mut parts = text.split('/');
    let (Some(topic), Some(partition), Some(offset), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(InvalidId);
    };
    if !is_topic_name(topic) {
        return Err(InvalidId);
    }
    Ok(Position {
        topic: topic.into(),
        partition: digits(partition)?,
        offset: digits(offset)?,
    })
}

/// A number without sign and leading zeros, so that each id has exactly one text.
fn digits<T: FromStr + fmt::Display>(text: &str) -> Result<T, InvalidId> {
    let number: T = text.parse().map_err(|_| InvalidId)?;
    if number.to_string() == text && !text.starts_with('-') {
        Ok(number)
    } else {
        Err(InvalidId)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_has_exactly_one_text() {
        let id = Position {
            topic: "a.b_c-dlq".into(),
            partition: 3,
            offset: i64::MAX,
        };
        assert_eq!(parse_id(&id.to_string()), Ok(id));
        for invalid in [
            "",
            "t",
            "t/1",
            "t/1/2/3",
            "/1/2",
            "t/-1/2",
            "t/1/-2",
            "t/01/2",
            "t/+1/2",
            "t/1/",
            "a b/1/2",
            "../1/2",
            "t/2147483648/1",
            "t/1/9223372036854775808",
        ] {
            assert_eq!(parse_id(invalid), Err(InvalidId), "{invalid}");
        }
    }
}
