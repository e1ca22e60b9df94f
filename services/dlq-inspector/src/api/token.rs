//! Page tokens and resume tokens. They are not signed: a forged token only selects another position in the same list.
//!
//! A page token contains the time and the hash of the id of the last dead letter, or the id of the last redrive or topic, a resume token how far the watch has come, and a
//! token of the audit log an offset. They mean the same on every replica, and after the index was rebuilt, but
//! for dead letters beyond 8.4 million of 8 milliseconds, whose time in the list depends on the order in which they were read. All are valid for one query.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use redeliver_core::{Position, Timestamp};
use redeliver_proto::error::invalid;
use sha2::{Digest as _, Sha256};
use tonic::Status;

use super::progress::Progress;
use crate::audit::Place;
use crate::index::Cursor;
use crate::waiting::page as waiting;

/// Identifies the query that a token belongs to.
pub(super) type QueryHash = [u8; 8];

pub(super) fn query_hash(parts: &[&str]) -> QueryHash {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part.as_bytes());
    }
    let mut query = QueryHash::default();
    query.copy_from_slice(&hash.finalize()[..8]);
    query
}

/// Continues a list with its next page.
pub(super) struct PageToken;

/// Continues a list of redrives after the one with this id, or of topics after the one with this name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NameToken(pub(super) String);

/// Continues a list of waiting records with its next page.
pub(super) struct WaitingToken;

/// Resumes a watch.
pub(super) struct ResumeToken;

/// Continues a list of audit entries with its next page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AuditToken {
    /// Where the page begins.
    pub(super) next: Place,
    /// Where the time of the first page begins.
    pub(super) from: Timestamp,
}

/// The first byte of a token: its kind and the version of its format.
const PAGE_TAG: u8 = 3;
const AUDIT_TAG: u8 = 10;
const NAME_TAG: u8 = 11;
const RESUME_TAG: u8 = 9;
const WAITING_TAG: u8 = 12;

impl PageToken {
    const FIELD: &str = "page_token";

    pub(super) fn encode(query: QueryHash, cursor: Cursor) -> String {
        let numbers = [cursor.dead_at.to_be_bytes(), cursor.id_hash.to_be_bytes()];
        encode(PAGE_TAG, query, numbers.as_flattened())
    }

    /// The cursor in a token; `None` for an empty token.
    pub(super) fn decode(query: QueryHash, token: &str) -> Result<Option<Cursor>, Status> {
        let Some(rest) = decode(Self::FIELD, PAGE_TAG, query, token)? else {
            return Ok(None);
        };
        let [dead_at, id_hash] = numbers(&rest).ok_or_else(|| unknown(Self::FIELD))?;
        Ok(Some(Cursor {
            dead_at: i64::from_be_bytes(dead_at),
            id_hash: u64::from_be_bytes(id_hash),
        }))
    }
}

impl NameToken {
    pub(super) fn encode(&self, query: QueryHash) -> String {
        encode(NAME_TAG, query, self.0.as_bytes())
    }

    /// `None` for an empty token.
    pub(super) fn decode(query: QueryHash, token: &str) -> Result<Option<Self>, Status> {
        let Some(rest) = decode(PageToken::FIELD, NAME_TAG, query, token)? else {
            return Ok(None);
        };
        let id = String::from_utf8(rest).map_err(|_| unknown(PageToken::FIELD))?;
        Ok(Some(Self(id)))
    }
}

impl AuditToken {
    pub(super) fn encode(self, query: QueryHash) -> String {
        let numbers = [
            self.next.offset.to_be_bytes(),
            self.next.topic.to_be_bytes(),
            self.from.as_millis().to_be_bytes(),
        ];
        encode(AUDIT_TAG, query, numbers.as_flattened())
    }

    /// `None` for an empty token.
    pub(super) fn decode(query: QueryHash, token: &str) -> Result<Option<Self>, Status> {
        let Some(rest) = decode(PageToken::FIELD, AUDIT_TAG, query, token)? else {
            return Ok(None);
        };
        let [offset, topic, from] = numbers(&rest).ok_or_else(|| unknown(PageToken::FIELD))?;
        Ok(Some(Self {
            next: Place {
                offset: i64::from_be_bytes(offset),
                topic: u64::from_be_bytes(topic),
            },
            from: Timestamp::from_millis(i64::from_be_bytes(from)),
        }))
    }
}

impl WaitingToken {
    pub(super) fn encode(query: QueryHash, cursor: &waiting::Cursor) -> String {
        let waiting::Cursor { rank, position } = cursor;
        let numbers = [
            rank.to_be_bytes(),
            position.offset.to_be_bytes(),
            i64::from(position.partition).to_be_bytes(),
        ];
        encode(
            WAITING_TAG,
            query,
            &[numbers.as_flattened(), position.topic.as_bytes()].concat(),
        )
    }

    /// `None` for an empty token.
    pub(super) fn decode(query: QueryHash, token: &str) -> Result<Option<waiting::Cursor>, Status> {
        let Some(rest) = decode(PageToken::FIELD, WAITING_TAG, query, token)? else {
            return Ok(None);
        };
        let cursor = || {
            let (numbers, topic) = rest.split_first_chunk::<24>()?;
            let [rank, offset, partition] = self::numbers(numbers)?.map(i64::from_be_bytes);
            Some(waiting::Cursor {
                rank,
                position: Position {
                    topic: std::str::from_utf8(topic).ok()?.into(),
                    partition: i32::try_from(partition).ok()?,
                    offset,
                },
            })
        };
        cursor().map(Some).ok_or_else(|| unknown(PageToken::FIELD))
    }
}

impl ResumeToken {
    const FIELD: &str = "resume_token";

    pub(super) fn encode(query: QueryHash, progress: &Progress) -> String {
        encode(RESUME_TAG, query, &progress.encode())
    }

    /// `None` for an empty token.
    pub(super) fn decode(query: QueryHash, token: &str) -> Result<Option<Progress>, Status> {
        let Some(rest) = decode(Self::FIELD, RESUME_TAG, query, token)? else {
            return Ok(None);
        };
        let progress = Progress::decode(&rest).ok_or_else(|| unknown(Self::FIELD))?;
        Ok(Some(progress))
    }
}

fn encode(tag: u8, query: QueryHash, rest: &[u8]) -> String {
    URL_SAFE_NO_PAD.encode([&[tag][..], &query, rest].concat())
}

/// What follows the query in a token; `None` for an empty token.
fn decode(field: &str, tag: u8, query: QueryHash, token: &str) -> Result<Option<Vec<u8>>, Status> {
    if token.is_empty() {
        return Ok(None);
    }
    let bytes = URL_SAFE_NO_PAD.decode(token).map_err(|_| unknown(field))?;
    let rest = bytes
        .strip_prefix(&[tag])
        .and_then(|rest| rest.split_first_chunk());
    let (of_query, rest) = rest.ok_or_else(|| unknown(field))?;
    if *of_query != query {
        let problem = "belongs to a query with another filter or order";
        return Err(invalid(field, problem, "TOKEN_OF_ANOTHER_QUESTION", []));
    }
    Ok(Some(rest.to_vec()))
}

/// The two numbers of a token, if it contains only those.
fn numbers<const N: usize>(rest: &[u8]) -> Option<[[u8; 8]; N]> {
    let (numbers, rest) = rest.as_chunks();
    rest.is_empty().then(|| numbers.try_into().ok()).flatten()
}

fn unknown(field: &str) -> Status {
    invalid(field, "is not a token of this service", "TOKEN_INVALID", [])
}

#[cfg(test)]
mod tests {
    use redeliver_proto::error::reason;
    use redeliver_testkit::fuzz::fuzz;
    use tonic::Code;

    use super::*;

    fn refused<T: std::fmt::Debug>(result: Result<T, Status>) -> (Code, String) {
        let refused = result.unwrap_err();
        (refused.code(), reason(&refused).unwrap())
    }

    fn progress() -> Progress {
        let mut progress = Progress::default();
        progress.pass("a-dlq", 2, 300);
        progress.pass("a-dlq", 3, 7);
        progress.pass("b-dlq", 1, 3);
        progress
    }

    #[test]
    fn tokens_belong_to_query_and_kind() {
        let cursor = Cursor {
            dead_at: -5,
            id_hash: u64::MAX,
        };
        let query = query_hash(&["list", "a = b", ""]);
        let page = PageToken::encode(query, cursor);
        let resume = ResumeToken::encode(query, &progress());
        assert_eq!(PageToken::decode(query, &page).unwrap(), Some(cursor));
        assert_eq!(ResumeToken::decode(query, &resume).unwrap(), Some(progress()));
        assert_eq!(PageToken::decode(query, "").unwrap(), None);
        assert_eq!(ResumeToken::decode(query, "").unwrap(), None);
        let invalid = (Code::InvalidArgument, "TOKEN_INVALID".to_owned());
        for other in ["nonsense", &page[1..], &resume] {
            assert_eq!(refused(PageToken::decode(query, other)), invalid, "{other}");
        }
        for other in ["nonsense", &resume[1..], &page] {
            assert_eq!(refused(ResumeToken::decode(query, other)), invalid, "{other}");
        }
        let other = query_hash(&["list", "a = ", "b"]);
        let other_query = (Code::InvalidArgument, "TOKEN_OF_ANOTHER_QUESTION".to_owned());
        assert_eq!(refused(PageToken::decode(other, &page)), other_query);
        assert_eq!(refused(ResumeToken::decode(other, &resume)), other_query);
    }

    fn damaged_tokens(count: u32) {
        let query = query_hash(&["list"]);
        let cursor = Cursor {
            dead_at: 1_700_000_000_000,
            id_hash: 7,
        };
        let audit = AuditToken {
            next: Place { offset: 7, topic: 8 },
            from: Timestamp::from_millis(1_700_000_000_000),
        };
        let valid = [
            PageToken::encode(query, cursor),
            ResumeToken::encode(query, &progress()),
            audit.encode(query),
            NameToken("01a212ee742fea04".to_owned()).encode(query),
        ];
        let valid = valid.map(String::into_bytes);
        fuzz("damaged_tokens", count, &valid, |input| {
            let token = String::from_utf8_lossy(input);
            if let Ok(Some(cursor)) = PageToken::decode(query, &token) {
                assert_eq!(PageToken::encode(query, cursor), token);
            }
            if let Ok(Some(audit)) = AuditToken::decode(query, &token) {
                assert_eq!(audit.encode(query), token);
            }
            if let Ok(Some(name)) = NameToken::decode(query, &token) {
                assert_eq!(name.encode(query), token);
            }
            if let Ok(Some(progress)) = ResumeToken::decode(query, &token) {
                let again = ResumeToken::encode(query, &progress);
                assert!(again.len() < 20_000);
                let decoded = ResumeToken::decode(query, &again).unwrap().unwrap();
                assert_eq!(ResumeToken::encode(query, &decoded), again);
            }
        });
    }

    #[test]
    fn damaged_token_never_panics() {
        damaged_tokens(10_000);
    }

    #[test]
    #[ignore = "long"]
    fn many_damaged_tokens_never_panic() {
        damaged_tokens(1_000_000);
    }
}
