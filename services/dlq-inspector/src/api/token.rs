//! Page tokens and resume tokens. They are not signed: a forged token only selects another position in the same list.
//!
//! A page token contains the time and the hash of the id of the last dead letter, which are the same in every index: it is
//! valid on every replica, and after the index was rebuilt. A resume token contains a number in the order of indexing, so that
//! it is valid for one generation of the index. A token of the audit log contains an offset. All are valid for one query.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use redeliver_core::Timestamp;
use redeliver_proto::error::{invalid, status};
use sha2::{Digest as _, Sha256};
use tonic::{Code, Status};

use crate::index::{Cursor, Generation};

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

/// Resumes a watch.
pub(super) struct ResumeToken;

/// Continues a list of audit entries with its next page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AuditToken {
    /// The offset where the page begins.
    pub(super) next: i64,
    /// Where the time of the first page begins.
    pub(super) from: Timestamp,
}

/// The first byte of a token.
const PAGE_TAG: u8 = 3;
const RESUME_TAG: u8 = 4;
const AUDIT_TAG: u8 = 5;
/// The first bytes and the length of the tokens of a former version, which contain the row of an index that does not exist any more.
const FORMER_TAGS: [u8; 2] = [1, 2];
const FORMER_LENGTH: usize = 33;

impl PageToken {
    const FIELD: &str = "page_token";

    pub(super) fn encode(query: QueryHash, cursor: Cursor) -> String {
        encode(
            PAGE_TAG,
            [query, cursor.dead_at.to_be_bytes(), cursor.id_hash.to_be_bytes()],
        )
    }

    /// The cursor in a token; `None` for an empty token.
    pub(super) fn decode(query: QueryHash, token: &str) -> Result<Option<Cursor>, Status> {
        let Some([of_query, dead_at, id_hash]) = decode(Self::FIELD, PAGE_TAG, token)? else {
            return Ok(None);
        };
        check_query(Self::FIELD, of_query, query)?;
        Ok(Some(Cursor {
            dead_at: i64::from_be_bytes(dead_at),
            id_hash: u64::from_be_bytes(id_hash),
        }))
    }
}

impl AuditToken {
    pub(super) fn encode(self, query: QueryHash) -> String {
        let from = self.from.as_millis();
        encode(AUDIT_TAG, [query, self.next.to_be_bytes(), from.to_be_bytes()])
    }

    /// `None` for an empty token.
    pub(super) fn decode(query: QueryHash, token: &str) -> Result<Option<Self>, Status> {
        let Some([of_query, next, from]) = decode(PageToken::FIELD, AUDIT_TAG, token)? else {
            return Ok(None);
        };
        check_query(PageToken::FIELD, of_query, query)?;
        Ok(Some(Self {
            next: i64::from_be_bytes(next),
            from: Timestamp::from_millis(i64::from_be_bytes(from)),
        }))
    }
}

impl ResumeToken {
    const FIELD: &str = "resume_token";

    pub(super) fn encode(generation: Generation, query: QueryHash, sequence: i64) -> String {
        encode(
            RESUME_TAG,
            [generation.to_be_bytes(), query, sequence.to_be_bytes()],
        )
    }

    /// The number of the dead letter in a token; `None` for an empty token. `last` is the last number of the index.
    pub(super) fn decode(
        generation: Generation,
        last: i64,
        query: QueryHash,
        token: &str,
    ) -> Result<Option<i64>, Status> {
        let Some([of_generation, of_query, sequence]) = decode(Self::FIELD, RESUME_TAG, token)? else {
            return Ok(None);
        };
        if i64::from_be_bytes(of_generation) != generation {
            return Err(Self::expired());
        }
        check_query(Self::FIELD, of_query, query)?;
        let sequence = i64::from_be_bytes(sequence);
        // The data directory is an older copy.
        if sequence > last {
            return Err(Self::expired());
        }
        Ok(Some(sequence))
    }

    /// The status for a token of another build of the index.
    pub(super) fn expired() -> Status {
        expired(Self::FIELD)
    }
}

fn expired(field: &str) -> Status {
    let text = format!("{field}: expired, because the index was rebuilt; start again without a token");
    status(Code::FailedPrecondition, text, "TOKEN_EXPIRED", [])
}

fn check_query(field: &str, found: QueryHash, expected: QueryHash) -> Result<(), Status> {
    if found == expected {
        return Ok(());
    }
    let problem = "belongs to a query with another filter or order";
    Err(invalid(field, problem, "TOKEN_OF_ANOTHER_QUESTION", []))
}

/// The numbers of a token.
type Numbers = [[u8; 8]; 3];

fn encode(tag: u8, numbers: Numbers) -> String {
    let bytes: Vec<u8> = [tag].into_iter().chain(numbers.into_iter().flatten()).collect();
    URL_SAFE_NO_PAD.encode(bytes)
}

/// The numbers of a token; `None` for an empty token.
fn decode(field: &str, tag: u8, token: &str) -> Result<Option<Numbers>, Status> {
    if token.is_empty() {
        return Ok(None);
    }
    let unknown = || invalid(field, "is not a token of this service", "TOKEN_INVALID", []);
    let bytes = URL_SAFE_NO_PAD.decode(token).map_err(|_| unknown())?;
    let (found, rest) = bytes.split_first().ok_or_else(unknown)?;
    if FORMER_TAGS.contains(found) && bytes.len() == FORMER_LENGTH {
        return Err(expired(field));
    }
    let numbers = match rest.as_chunks::<8>() {
        (numbers, []) => Numbers::try_from(numbers).ok(),
        _ => None,
    };
    numbers.filter(|_| *found == tag).ok_or_else(unknown).map(Some)
}

#[cfg(test)]
mod tests {
    use redeliver_proto::error::reason;
    use redeliver_testkit::fuzz::fuzz;

    use super::*;

    fn refused<T: std::fmt::Debug>(result: Result<T, Status>) -> (Code, String) {
        let refused = result.unwrap_err();
        (refused.code(), reason(&refused).unwrap())
    }

    #[test]
    fn a_page_token_is_valid_for_its_query_in_every_index() {
        let cursor = Cursor {
            dead_at: -5,
            id_hash: u64::MAX,
        };
        let query = query_hash(&["list", "a = b", ""]);
        let token = PageToken::encode(query, cursor);
        assert_eq!(PageToken::decode(query, &token).unwrap(), Some(cursor));
        assert_eq!(PageToken::decode(query, "").unwrap(), None);
        let invalid = (Code::InvalidArgument, "TOKEN_INVALID".to_owned());
        for other in ["nonsense", &token[1..], &ResumeToken::encode(3, query, 7)] {
            assert_eq!(refused(PageToken::decode(query, other)), invalid, "{other}");
        }
        let other = query_hash(&["list", "a = ", "b"]);
        let other_query = (Code::InvalidArgument, "TOKEN_OF_ANOTHER_QUESTION".to_owned());
        assert_eq!(refused(PageToken::decode(other, &token)), other_query);
    }

    #[test]
    fn a_resume_token_is_valid_for_its_query_and_generation() {
        let query = query_hash(&["watch", ""]);
        let token = ResumeToken::encode(3, query, 7);
        assert_eq!(ResumeToken::decode(3, 7, query, &token).unwrap(), Some(7));
        let expired = (Code::FailedPrecondition, "TOKEN_EXPIRED".to_owned());
        assert_eq!(refused(ResumeToken::decode(4, 7, query, &token)), expired);
        assert_eq!(refused(ResumeToken::decode(3, 6, query, &token)), expired);
        for tag in FORMER_TAGS {
            let former = URL_SAFE_NO_PAD.encode([&[tag][..], &[0; FORMER_LENGTH - 1]].concat());
            assert_eq!(refused(ResumeToken::decode(3, 7, query, &former)), expired);
            assert_eq!(refused(PageToken::decode(query, &former)), expired);
        }
        let cursor = Cursor {
            dead_at: 0,
            id_hash: 0,
        };
        let invalid = (Code::InvalidArgument, "TOKEN_INVALID".to_owned());
        assert_eq!(
            refused(ResumeToken::decode(
                3,
                7,
                query,
                &PageToken::encode(query, cursor)
            )),
            invalid
        );
    }

    fn damaged_tokens(count: u32) {
        let query = query_hash(&["list"]);
        let cursor = Cursor {
            dead_at: 1_700_000_000_000,
            id_hash: 7,
        };
        let audit = AuditToken {
            next: 7,
            from: Timestamp::from_millis(1_700_000_000_000),
        };
        let valid = [
            PageToken::encode(query, cursor),
            ResumeToken::encode(1, query, 7),
            audit.encode(query),
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
            if let Ok(Some(sequence)) = ResumeToken::decode(1, i64::MAX, query, &token) {
                assert_eq!(ResumeToken::encode(1, query, sequence), token);
            }
        });
    }

    #[test]
    fn a_damaged_token_is_refused_or_is_another_position() {
        damaged_tokens(10_000);
    }

    #[test]
    #[ignore = "long"]
    fn many_damaged_tokens_are_refused_or_are_other_positions() {
        damaged_tokens(1_000_000);
    }
}
