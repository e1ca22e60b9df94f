//! Page tokens and resume tokens. They contain row numbers, so that they are valid for one generation of the index and one
//! query. They are not signed: a forged token only selects another position in the same list.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
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

/// A kind of token, and the request field that contains it.
#[derive(Clone, Copy)]
pub(super) struct TokenKind {
    field: &'static str,
    tag: u8,
}

/// Continues a list with its next page.
pub(super) const PAGE: TokenKind = TokenKind {
    field: "page_token",
    tag: 1,
};

/// Resumes a watch.
pub(super) const RESUME: TokenKind = TokenKind {
    field: "resume_token",
    tag: 2,
};

const LENGTH: usize = 1 + 8 + 8 + 8 + 8;

impl TokenKind {
    pub(super) fn encode(self, generation: Generation, query: QueryHash, cursor: Cursor) -> String {
        let mut bytes = Vec::with_capacity(LENGTH);
        bytes.push(self.tag);
        bytes.extend(generation.to_be_bytes());
        bytes.extend(query);
        bytes.extend(cursor.dead_at.to_be_bytes());
        bytes.extend(cursor.row.to_be_bytes());
        URL_SAFE_NO_PAD.encode(bytes)
    }

    /// The cursor in a token; `None` for an empty token.
    pub(super) fn decode(
        self,
        generation: Generation,
        query: QueryHash,
        token: &str,
    ) -> Result<Option<Cursor>, Status> {
        if token.is_empty() {
            return Ok(None);
        }
        let Some(decoded) = decode(token).filter(|decoded| decoded.tag == self.tag) else {
            return Err(self.invalid("is not a token of this service", "TOKEN_INVALID"));
        };
        if decoded.generation != generation {
            return Err(self.expired());
        }
        if decoded.query != query {
            return Err(self.invalid(
                "belongs to a query with another filter or order",
                "TOKEN_OF_ANOTHER_QUESTION",
            ));
        }
        Ok(Some(decoded.cursor))
    }

    /// The status for a token of another build of the index.
    pub(super) fn expired(self) -> Status {
        let text = format!(
            "{}: expired, because the index was rebuilt; start again without a token",
            self.field
        );
        status(Code::FailedPrecondition, text, "TOKEN_EXPIRED", [])
    }

    fn invalid(self, problem: &str, reason: &str) -> Status {
        invalid(self.field, problem, reason, [])
    }
}

struct DecodedToken {
    tag: u8,
    generation: Generation,
    query: QueryHash,
    cursor: Cursor,
}

fn decode(token: &str) -> Option<DecodedToken> {
    let bytes = URL_SAFE_NO_PAD.decode(token).ok()?;
    let (tag, rest) = bytes.split_first()?;
    let (numbers, []) = rest.as_chunks::<8>() else {
        return None;
    };
    let [generation, query, dead_at, row] = numbers else {
        return None;
    };
    Some(DecodedToken {
        tag: *tag,
        generation: i64::from_be_bytes(*generation),
        query: *query,
        cursor: Cursor {
            dead_at: i64::from_be_bytes(*dead_at),
            row: i64::from_be_bytes(*row),
        },
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use redeliver_proto::error::reason;

    use super::*;

    #[test]
    fn a_token_is_valid_for_its_query_and_generation() {
        let cursor = Cursor { dead_at: -5, row: 7 };
        let query = query_hash(&["list", "a = b", ""]);
        let token = PAGE.encode(3, query, cursor);
        assert_eq!(PAGE.decode(3, query, &token).unwrap(), Some(cursor));
        assert_eq!(PAGE.decode(3, query, "").unwrap(), None);
        let refused = |kind: TokenKind, generation, query, token: &str| {
            let refused = kind.decode(generation, query, token).unwrap_err();
            (refused.code(), reason(&refused).unwrap())
        };
        let invalid = (Code::InvalidArgument, "TOKEN_INVALID".to_owned());
        assert_eq!(refused(RESUME, 3, query, &token), invalid);
        assert_eq!(refused(PAGE, 3, query, "nonsense"), invalid);
        assert_eq!(refused(PAGE, 3, query, &token[1..]), invalid);
        let expired = (Code::FailedPrecondition, "TOKEN_EXPIRED".to_owned());
        assert_eq!(refused(PAGE, 4, query, &token), expired);
        let other = query_hash(&["list", "a = ", "b"]);
        let other_query = (Code::InvalidArgument, "TOKEN_OF_ANOTHER_QUESTION".to_owned());
        assert_eq!(refused(PAGE, 3, other, &token), other_query);
    }

    proptest! {
        #[test]
        fn arbitrary_tokens_never_panic(token in "[-_a-zA-Z0-9=]{0,60}") {
            let _ = PAGE.decode(1, QueryHash::default(), &token);
        }
    }
}
