//! Tokens to go on with. They hold numbers of rows, so they are of one making of the index, and of one
//! question. A token that was tampered with can do no more than ask for another place.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use redeliver_proto::error::{invalid, status};
use sha2::{Digest as _, Sha256};
use tonic::{Code, Status};

use crate::index::{Generation, Place};

/// What a token was given for.
pub(super) type Question = [u8; 8];

/// The question of these parts.
pub(super) fn question(parts: &[&str]) -> Question {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part.as_bytes());
    }
    let mut question = Question::default();
    question.copy_from_slice(&hash.finalize()[..8]);
    question
}

/// A token of a request: the field it stands in, and the reasons of its errors.
#[derive(Clone, Copy)]
pub(super) struct Kind {
    field: &'static str,
    tag: u8,
}

/// For the next page of a list.
pub(super) const PAGE: Kind = Kind {
    field: "page_token",
    tag: 1,
};

/// To go on watching.
pub(super) const RESUME: Kind = Kind {
    field: "resume_token",
    tag: 2,
};

const LENGTH: usize = 1 + 8 + 8 + 8 + 8;

impl Kind {
    pub(super) fn write(self, generation: Generation, question: Question, place: Place) -> String {
        let mut bytes = Vec::with_capacity(LENGTH);
        bytes.push(self.tag);
        bytes.extend(generation.to_be_bytes());
        bytes.extend(question);
        bytes.extend(place.dead_at.to_be_bytes());
        bytes.extend(place.row.to_be_bytes());
        URL_SAFE_NO_PAD.encode(bytes)
    }

    /// The place of a token; `None` for the empty one.
    pub(super) fn read(
        self,
        generation: Generation,
        question: Question,
        token: &str,
    ) -> Result<Option<Place>, Status> {
        if token.is_empty() {
            return Ok(None);
        }
        let parts = parts(token).filter(|parts| parts.tag == self.tag);
        let Some(parts) = parts else {
            return Err(self.wrong("is not one that this service has given", "TOKEN_INVALID"));
        };
        if parts.generation != generation {
            let text = format!(
                "{}: the index was built again since it was given; begin anew",
                self.field
            );
            return Err(status(Code::FailedPrecondition, text, "TOKEN_EXPIRED", []));
        }
        if parts.question != question {
            return Err(self.wrong(
                "was given for another filter or order",
                "TOKEN_OF_ANOTHER_QUESTION",
            ));
        }
        Ok(Some(parts.place))
    }

    fn wrong(self, problem: &str, reason: &str) -> Status {
        invalid(self.field, problem, reason, [])
    }
}

struct Parts {
    tag: u8,
    generation: Generation,
    question: Question,
    place: Place,
}

fn parts(token: &str) -> Option<Parts> {
    let bytes = URL_SAFE_NO_PAD.decode(token).ok()?;
    let (tag, rest) = bytes.split_first()?;
    let (numbers, []) = rest.as_chunks::<8>() else {
        return None;
    };
    let [generation, question, dead_at, row] = numbers else {
        return None;
    };
    Some(Parts {
        tag: *tag,
        generation: i64::from_be_bytes(*generation),
        question: *question,
        place: Place {
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
    fn a_token_is_good_for_its_question_and_its_index() {
        let place = Place { dead_at: -5, row: 7 };
        let asked = question(&["list", "a = b", ""]);
        let token = PAGE.write(3, asked, place);
        assert_eq!(PAGE.read(3, asked, &token).unwrap(), Some(place));
        assert_eq!(PAGE.read(3, asked, "").unwrap(), None);
        let refused = |kind: Kind, generation, asked, token: &str| {
            let refused = kind.read(generation, asked, token).unwrap_err();
            (refused.code(), reason(&refused).unwrap())
        };
        let invalid = (Code::InvalidArgument, "TOKEN_INVALID".to_owned());
        assert_eq!(refused(RESUME, 3, asked, &token), invalid);
        assert_eq!(refused(PAGE, 3, asked, "nonsense"), invalid);
        assert_eq!(refused(PAGE, 3, asked, &token[1..]), invalid);
        let expired = (Code::FailedPrecondition, "TOKEN_EXPIRED".to_owned());
        assert_eq!(refused(PAGE, 4, asked, &token), expired);
        let other = question(&["list", "a = ", "b"]);
        let another = (Code::InvalidArgument, "TOKEN_OF_ANOTHER_QUESTION".to_owned());
        assert_eq!(refused(PAGE, 3, other, &token), another);
    }

    proptest! {
        #[test]
        fn arbitrary_tokens_never_panic(token in "[-_a-zA-Z0-9=]{0,60}") {
            let _ = PAGE.read(1, Question::default(), &token);
        }
    }
}
