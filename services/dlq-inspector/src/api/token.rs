//! Page tokens and resume tokens. They are not signed: a forged token only selects another position in the same list.
//!
//! A page token contains the time and the hash of the id of the last dead letter, which are the same in every index: it is
//! valid on every replica, and after the index was rebuilt. A resume token contains a number in the order of indexing, which is valid for one
//! generation of the index, and what the watch has passed, for other indexes. A token of the audit log contains an offset. All are valid for one
//! query.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use redeliver_core::Timestamp;
use redeliver_proto::error::{invalid, status};
use sha2::{Digest as _, Sha256};
use tonic::{Code, Status};

use super::passed::Passed;
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

/// Where a watch goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Resume {
    /// After this number of the index.
    After {
        sequence: i64,
        /// Not known if it does not fit in a token.
        passed: Option<Passed>,
        /// Whether the index may contain what was passed after this number, because the watch has begun in another one.
        skips_passed: bool,
    },
    /// The token is one of another index: with everything that the watch has not passed.
    Elsewhere(Passed),
}

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
/// Of a former version, which knew no other indexes.
const FORMER_RESUME_TAG: u8 = 4;
const AUDIT_TAG: u8 = 5;
const RESUME_TAG: u8 = 6;
/// Followed by what was passed.
const PORTABLE_RESUME_TAG: u8 = 7;
/// The same of a watch that skips it.
const SKIPPING_RESUME_TAG: u8 = 8;
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

    /// `passed` is `None` if it is not known.
    pub(super) fn encode(
        generation: Generation,
        query: QueryHash,
        sequence: i64,
        passed: Option<&Passed>,
        skips_passed: bool,
    ) -> String {
        let passed = passed.and_then(Passed::encode);
        let tag = match &passed {
            None => RESUME_TAG,
            Some(_) if skips_passed => SKIPPING_RESUME_TAG,
            Some(_) => PORTABLE_RESUME_TAG,
        };
        let numbers = [generation.to_be_bytes(), query, sequence.to_be_bytes()];
        encode_with(tag, numbers, &passed.unwrap_or_default())
    }

    /// `None` for an empty token. `last` is the last number of the index.
    pub(super) fn decode(
        generation: Generation,
        last: i64,
        query: QueryHash,
        token: &str,
    ) -> Result<Option<Resume>, Status> {
        let tags = [
            RESUME_TAG,
            PORTABLE_RESUME_TAG,
            SKIPPING_RESUME_TAG,
            FORMER_RESUME_TAG,
        ];
        let Some((tag, [of_generation, of_query, sequence], rest)) = decode_any(Self::FIELD, &tags, token)?
        else {
            return Ok(None);
        };
        let passed = match (tag, rest.as_slice()) {
            (PORTABLE_RESUME_TAG | SKIPPING_RESUME_TAG, bytes) => {
                Some(Passed::decode(bytes).ok_or_else(|| unknown(Self::FIELD))?)
            }
            (_, []) => None,
            _ => return Err(unknown(Self::FIELD)),
        };
        check_query(Self::FIELD, of_query, query)?;
        let sequence = i64::from_be_bytes(sequence);
        // With a number beyond the last one, the data directory is an older copy.
        if tag != FORMER_RESUME_TAG && i64::from_be_bytes(of_generation) == generation && sequence <= last {
            return Ok(Some(Resume::After {
                sequence,
                passed,
                skips_passed: tag == SKIPPING_RESUME_TAG,
            }));
        }
        match passed {
            Some(passed) => Ok(Some(Resume::Elsewhere(passed))),
            None => Err(expired(Self::FIELD)),
        }
    }
}

fn expired(field: &str) -> Status {
    let text = format!("{field}: expired, because it belongs to another index; start again without a token");
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
    encode_with(tag, numbers, &[])
}

fn encode_with(tag: u8, numbers: Numbers, rest: &[u8]) -> String {
    URL_SAFE_NO_PAD.encode([&[tag][..], numbers.as_flattened(), rest].concat())
}

/// The numbers of a token; `None` for an empty token.
fn decode(field: &str, tag: u8, token: &str) -> Result<Option<Numbers>, Status> {
    match decode_any(field, &[tag], token)? {
        None => Ok(None),
        Some((_, numbers, rest)) if rest.is_empty() => Ok(Some(numbers)),
        Some(_) => Err(unknown(field)),
    }
}

/// The tag, which must be one of these, the numbers, and what follows them.
fn decode_any(field: &str, tags: &[u8], token: &str) -> Result<Option<(u8, Numbers, Vec<u8>)>, Status> {
    if token.is_empty() {
        return Ok(None);
    }
    let bytes = URL_SAFE_NO_PAD.decode(token).map_err(|_| unknown(field))?;
    let (tag, rest) = bytes.split_first().ok_or_else(|| unknown(field))?;
    if FORMER_TAGS.contains(tag) && bytes.len() == FORMER_LENGTH {
        return Err(expired(field));
    }
    let (numbers, rest) = rest.split_first_chunk::<24>().ok_or_else(|| unknown(field))?;
    let numbers = Numbers::try_from(numbers.as_chunks::<8>().0).map_err(|_| unknown(field))?;
    if !tags.contains(tag) {
        return Err(unknown(field));
    }
    Ok(Some((*tag, numbers, rest.to_vec())))
}

fn unknown(field: &str) -> Status {
    invalid(field, "is not a token of this service", "TOKEN_INVALID", [])
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
        for other in [
            "nonsense",
            &token[1..],
            &ResumeToken::encode(3, query, 7, None, false),
        ] {
            assert_eq!(refused(PageToken::decode(query, other)), invalid, "{other}");
        }
        let other = query_hash(&["list", "a = ", "b"]);
        let other_query = (Code::InvalidArgument, "TOKEN_OF_ANOTHER_QUESTION".to_owned());
        assert_eq!(refused(PageToken::decode(other, &token)), other_query);
    }

    #[test]
    fn a_resume_token_is_valid_for_its_query_and_says_in_another_index_what_was_passed() {
        let query = query_hash(&["watch", ""]);
        let mut passed = Passed::default();
        passed.pass([9; 8], 2, 300);
        for skips_passed in [false, true] {
            let token = ResumeToken::encode(3, query, 7, Some(&passed), skips_passed);
            let here = Resume::After {
                sequence: 7,
                passed: Some(passed.clone()),
                skips_passed,
            };
            assert_eq!(ResumeToken::decode(3, 7, query, &token).unwrap(), Some(here));
            for (generation, last) in [(4, 7), (3, 6)] {
                let elsewhere = ResumeToken::decode(generation, last, query, &token).unwrap();
                assert_eq!(elsewhere, Some(Resume::Elsewhere(passed.clone())));
            }
        }
        assert_eq!(ResumeToken::decode(3, 7, query, "").unwrap(), None);
        let token = ResumeToken::encode(3, query, 7, None, false);
        let here = Resume::After {
            sequence: 7,
            passed: None,
            skips_passed: false,
        };
        assert_eq!(ResumeToken::decode(3, 7, query, &token).unwrap(), Some(here));
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
        let mut passed = Passed::default();
        passed.pass([9; 8], 2, 300);
        passed.pass([8; 8], 1, 3);
        let valid = [
            PageToken::encode(query, cursor),
            ResumeToken::encode(1, query, 7, None, false),
            ResumeToken::encode(1, query, 7, Some(&passed), false),
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
            let read = ResumeToken::decode(1, i64::MAX, query, &token);
            if let Ok(Some(Resume::After {
                sequence,
                passed,
                skips_passed,
            })) = &read
            {
                let again = ResumeToken::encode(1, query, *sequence, passed.as_ref(), *skips_passed);
                let again = ResumeToken::decode(1, i64::MAX, query, &again);
                assert_eq!(again.unwrap(), read.unwrap());
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
