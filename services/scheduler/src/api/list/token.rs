//! Page tokens: the position after which a list continues, and the filters of the list.
//!
//! A token names no scheduler and no shard, so it is valid at every scheduler of an installation. It is not signed: a forged token only
//! selects another position in a list that the caller may read anyway.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use redeliver_core::Timestamp;
use sha2::{Digest as _, Sha256};

use crate::index::Cursor;
use crate::job::JobId;

/// The first byte of a token. A token with another meaning or format gets another version.
const VERSION: u8 = 1;
/// Version, hash of the filters, due time and id.
const LENGTH: usize = 1 + 8 + 8 + 16;
/// The length of a token in Base64.
const TEXT: usize = LENGTH.div_ceil(3) * 4;

/// Which jobs a list contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Filters<'a> {
    /// The application, or the pipeline of long waits.
    pub(super) app: Option<&'a str>,
    /// The first due time.
    pub(super) from: Option<Timestamp>,
    /// The end of the due times, exclusive.
    pub(super) until: Option<Timestamp>,
}

impl Filters<'_> {
    fn hash(&self) -> [u8; 8] {
        let mut digest = Sha256::new();
        for time in [self.from, self.until] {
            digest.update([u8::from(time.is_some())]);
            digest.update(time.map_or(0, Timestamp::as_millis).to_be_bytes());
        }
        // The last part, so that its length needs no mark.
        digest.update([u8::from(self.app.is_some())]);
        digest.update(self.app.unwrap_or_default());
        let mut hash = [0; 8];
        hash.copy_from_slice(&digest.finalize()[..8]);
        hash
    }
}

/// Why a token cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum TokenError {
    #[error("is not a page token of this API; start again without one")]
    Unreadable,
    #[error("is of another version of the scheduler; start again without one")]
    Version,
    #[error(
        "belongs to a list with other filters; repeat the filters of the previous page, or start again without a token"
    )]
    OtherFilters,
}

pub(super) fn encode(filters: &Filters<'_>, cursor: Cursor) -> String {
    let mut bytes = Vec::with_capacity(LENGTH);
    bytes.push(VERSION);
    bytes.extend(filters.hash());
    bytes.extend(cursor.due.as_millis().to_be_bytes());
    bytes.extend(cursor.id.to_bytes());
    URL_SAFE_NO_PAD.encode(bytes)
}

/// The position in a token; `None` for an empty token.
pub(super) fn decode(filters: &Filters<'_>, token: &str) -> Result<Option<Cursor>, TokenError> {
    if token.is_empty() {
        return Ok(None);
    }
    if token.len() > TEXT {
        return Err(TokenError::Unreadable);
    }
    let bytes = URL_SAFE_NO_PAD.decode(token);
    let bytes = bytes.map_err(|_| TokenError::Unreadable)?;
    let (version, rest) = bytes.split_first().ok_or(TokenError::Unreadable)?;
    if *version != VERSION {
        return Err(TokenError::Version);
    }
    let (hash, due, id) = parts(rest).ok_or(TokenError::Unreadable)?;
    if hash != filters.hash() {
        return Err(TokenError::OtherFilters);
    }
    Ok(Some(Cursor {
        due: Timestamp::from_millis(i64::from_be_bytes(due)),
        id: JobId::from_bytes(id),
    }))
}

fn parts(bytes: &[u8]) -> Option<([u8; 8], [u8; 8], [u8; 16])> {
    let (hash, rest) = bytes.split_first_chunk::<8>()?;
    let (due, rest) = rest.split_first_chunk::<8>()?;
    Some((*hash, *due, rest.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALL: Filters<'_> = Filters {
        app: None,
        from: None,
        until: None,
    };

    fn cursor() -> Cursor {
        Cursor {
            due: Timestamp::from_millis(-5),
            id: JobId::new(Timestamp::from_millis(7), 1, 2),
        }
    }

    #[test]
    fn token_belongs_to_its_filters() {
        let time = |millis| Some(Timestamp::from_millis(millis));
        let filters = [
            ALL,
            Filters { app: Some(""), ..ALL },
            Filters {
                app: Some("sms"),
                ..ALL
            },
            Filters { from: time(0), ..ALL },
            Filters {
                until: time(0),
                ..ALL
            },
            Filters {
                until: time(1),
                ..ALL
            },
        ];
        for (one, filter) in filters.iter().enumerate() {
            let token = encode(filter, cursor());
            assert_eq!(token.len(), TEXT);
            for (other, expected) in filters.iter().enumerate() {
                let decoded = decode(expected, &token);
                if one == other {
                    assert_eq!(decoded, Ok(Some(cursor())));
                } else {
                    assert_eq!(decoded, Err(TokenError::OtherFilters), "{filter:?} {expected:?}");
                }
            }
        }
    }

    #[test]
    fn other_texts_are_no_tokens() {
        assert_eq!(decode(&ALL, ""), Ok(None));
        let token = encode(&ALL, cursor());
        for text in [
            &token[1..],
            &token[..TEXT - 4],
            &format!("{token}AAAA"),
            "nonsense",
            "AQ==",
            "\u{e9}",
        ] {
            let error = decode(&ALL, text).unwrap_err();
            assert!(
                matches!(error, TokenError::Unreadable | TokenError::Version),
                "{text}"
            );
        }
        let mut newer = URL_SAFE_NO_PAD.decode(&token).unwrap();
        newer[0] = 2;
        assert_eq!(
            decode(&ALL, &URL_SAFE_NO_PAD.encode(newer)),
            Err(TokenError::Version)
        );
    }

    proptest! {
        #[test]
        fn arbitrary_texts_never_panic(text in "[-_a-zA-Z0-9=]{0,60}") {
            let _ = decode(&ALL, &text);
        }
    }
}
