//! What an open list does not show yet. Its rows stay where they are, and its script asks how many are new.

use redeliver_client::Timestamp;
use redeliver_client::convert::time;
use redeliver_client::messages::Completeness;
use serde::Deserialize;

use crate::html;
use crate::page::{address, literal};

/// How long before an answer dead letters can have died that it lacks, in milliseconds: clocks differ, and those of a transaction are visible at its
/// end.
const LATE: i64 = 60_000;
/// From how many on they are not counted again: a page can stay open while millions die.
const MANY_LETTERS: u64 = 10_000;
/// The same for groups.
pub(super) const MANY_GROUPS: i32 = 50;

/// What the script of an open list asks about.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Wanted {
    /// The filter of the list.
    filter: String,
    /// The tab of the list.
    pub(super) show: String,
    /// A time in RFC 3339.
    since: String,
}

impl Wanted {
    /// The filter of dead letters that are new to the list.
    pub(super) fn filter(&self) -> String {
        let new = format!("dead_at > {}", literal(&self.since));
        match self.filter.trim() {
            "" => new,
            filter => format!("({filter}) AND {new}"),
        }
    }
}

/// The address at which the script of a list asks what is new. `newest`: up to when the list has all that match. `None` if the answer does not say up to
/// when it is complete.
pub(super) fn link(
    path: &str,
    parameters: &[(&str, &str)],
    newest: Option<Timestamp>,
    completeness: Option<&Completeness>,
) -> Option<String> {
    let as_of = time(completeness?.as_of)?;
    let since = since(newest, as_of).to_rfc3339()?;
    Some(address(
        path,
        &[parameters, &[("since", since.as_str())]].concat(),
    ))
}

fn since(newest: Option<Timestamp>, as_of: Timestamp) -> Timestamp {
    let late = Timestamp::from_millis(as_of.as_millis() - LATE);
    newest.map_or(late, |newest| newest.max(late))
}

/// So many dead letters are new; empty if none is.
pub(super) fn of_letters(count: u64) -> String {
    match count {
        0 => String::new(),
        1 => "1 new dead letter".to_owned(),
        MANY_LETTERS.. => format!("{}+ new dead letters", html::number(MANY_LETTERS)),
        count => format!("{} new dead letters", html::number(count)),
    }
}

/// So many groups have new dead letters, or more; empty if none has.
pub(super) fn of_groups(count: usize, are_more: bool) -> String {
    match (count, are_more) {
        (0, _) => String::new(),
        (1, false) => "1 group has new dead letters".to_owned(),
        (count, false) => format!("{count} groups have new dead letters"),
        (count, true) => format!("{count}+ groups have new dead letters"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_letters_are_after_shown_ones() {
        let at = Timestamp::from_millis;
        let as_of = at(1_000_000);
        // The newest one of the list; from when on others are new.
        for (newest, expected) in [
            (Some(990_000), 990_000),
            (Some(1_020_000), 1_020_000),
            (Some(5), 940_000),
            (None, 940_000),
        ] {
            assert_eq!(since(newest.map(at), as_of), at(expected), "{newest:?}");
        }
    }

    #[test]
    fn addresses_lead_to_filters() {
        let completeness = Completeness {
            as_of: Some(redeliver_client::convert::to_timestamp(Timestamp::from_millis(
                1_000_000,
            ))),
            ..Completeness::default()
        };
        let filter = "topic = \"a\" OR topic = \"b\"";
        let link = |filter| link("/letters/new", &[("filter", filter)], None, Some(&completeness)).unwrap();
        assert_eq!(link(""), "/letters/new?since=1970-01-01T00%3A15%3A40.000Z");
        let wanted: Wanted = serde_urlencoded::from_str(link(filter).split_once('?').unwrap().1).unwrap();
        assert_eq!(
            wanted.filter(),
            "(topic = \"a\" OR topic = \"b\") AND dead_at > \"1970-01-01T00:15:40.000Z\""
        );
        let all = Wanted {
            filter: " ".to_owned(),
            ..wanted
        };
        assert_eq!(all.filter(), "dead_at > \"1970-01-01T00:15:40.000Z\"");
    }

    #[test]
    fn many_are_not_counted() {
        let letters = [0, 1, 2, 9_999, 10_000, 2_000_000].map(of_letters);
        assert_eq!(
            letters.each_ref().map(String::as_str),
            [
                "",
                "1 new dead letter",
                "2 new dead letters",
                "9\u{202f}999 new dead letters",
                "10\u{202f}000+ new dead letters",
                "10\u{202f}000+ new dead letters",
            ]
        );
        assert_eq!(of_groups(0, false), "");
        assert_eq!(of_groups(1, false), "1 group has new dead letters");
        assert_eq!(of_groups(2, false), "2 groups have new dead letters");
        assert_eq!(of_groups(50, true), "50+ groups have new dead letters");
    }
}
