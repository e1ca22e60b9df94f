//! Edits of records: what differs from a record in Kafka. No IO.
//!
//! The rest is read from Kafka when the record is written, so that an edit never contains what its author has not seen.

use bytes::Bytes;
use redeliver_core::Record;
use redeliver_core::failure::bounded_text;
use redeliver_core::kept::is_editable;
use redeliver_proto::v1;

/// The maximum number of headers that an edit sets, and of names that it removes.
pub const MAX_HEADERS: usize = 100;
/// The maximum length of the name of a header that an edit sets or removes, in bytes.
pub const MAX_NAME: usize = 1_000;
/// The maximum length of a name in an audit entry or a problem, in bytes.
const SHOWN_NAME: usize = 100;

/// A valid edit.
#[derive(Clone, Debug, PartialEq)]
pub struct Edit(v1::RedriveEdit);

/// Why an edit is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidEdit {
    /// It does nothing.
    #[error("changes nothing; set a value, a key or headers")]
    Nothing,
    /// It has too many headers.
    #[error("sets or removes more than {MAX_HEADERS} headers")]
    TooMany,
    /// A header cannot have this name.
    #[error(
        "the header `{0}` has an invalid name: it is empty, longer than {MAX_NAME} bytes, or has control characters"
    )]
    Name(String),
    /// A header is not one of the user.
    #[error("the header `{0}` cannot be set or removed: Redeliver or another framework sets it")]
    NotOfUser(String),
    /// A header is both set and removed.
    #[error("the header `{0}` is set and removed")]
    Both(String),
}

impl Edit {
    /// Checks an edit.
    ///
    /// # Errors
    /// If it changes nothing, or a header that is none of the user.
    pub fn read(edit: v1::RedriveEdit) -> Result<Self, InvalidEdit> {
        if edit.set_headers.len() > MAX_HEADERS || edit.removed_headers.len() > MAX_HEADERS {
            return Err(InvalidEdit::TooMany);
        }
        let set = edit.set_headers.iter().map(|header| &header.name);
        for name in set.chain(&edit.removed_headers) {
            let shown = || bounded_text(name, SHOWN_NAME);
            if name.is_empty() || name.len() > MAX_NAME || name.contains(char::is_control) {
                return Err(InvalidEdit::Name(shown()));
            }
            if !is_editable(name) {
                return Err(InvalidEdit::NotOfUser(shown()));
            }
        }
        let mut removed = edit.removed_headers.iter();
        if let Some(name) = removed.find(|name| edit.set_headers.iter().any(|header| header.name == **name)) {
            return Err(InvalidEdit::Both(bounded_text(name, SHOWN_NAME)));
        }
        let edit = Self(edit);
        if edit.parts().is_empty() {
            return Err(InvalidEdit::Nothing);
        }
        Ok(edit)
    }

    /// As it is stored.
    #[must_use]
    pub fn to_record(&self) -> v1::RedriveEdit {
        self.0.clone()
    }

    /// What it changes: `value`, `key` and `headers`.
    #[must_use]
    pub fn parts(&self) -> Vec<&'static str> {
        let edit = &self.0;
        let has_headers = !edit.set_headers.is_empty() || !edit.removed_headers.is_empty();
        [
            ("value", edit.value.is_some()),
            ("key", edit.key.is_some()),
            ("headers", has_headers),
        ]
        .into_iter()
        .filter_map(|(part, is_edited)| is_edited.then_some(part))
        .collect()
    }

    /// What it changes, with the names of headers and without contents.
    #[must_use]
    pub fn names(&self) -> String {
        let parts = self.parts().into_iter().filter(|part| *part != "headers");
        let mut names: Vec<String> = parts.map(str::to_owned).collect();
        for (does, headers) in [
            (
                "sets",
                self.0.set_headers.iter().map(|header| &header.name).collect(),
            ),
            ("removes", self.0.removed_headers.iter().collect::<Vec<_>>()),
        ] {
            for name in headers {
                names.push(format!("{does} header `{}`", bounded_text(name, SHOWN_NAME)));
            }
        }
        names.dedup();
        format!("edits {}", names.join(", "))
    }

    /// The edited record.
    #[must_use]
    pub fn apply(&self, record: &Record) -> Record {
        let edit = &self.0;
        let is_replaced = |name: &str| {
            edit.removed_headers.iter().any(|removed| removed == name)
                || edit.set_headers.iter().any(|header| header.name == name)
        };
        let mut headers = record.headers.filtered(|name| !is_replaced(name));
        for header in &edit.set_headers {
            headers.push(&header.name, header.value.as_deref());
        }
        Record {
            key: edited(edit.key.as_ref(), record.key.as_ref()),
            value: edited(edit.value.as_ref(), record.value.as_ref()),
            headers,
            ..record.clone()
        }
    }
}

fn edited(edited: Option<&v1::EditedBytes>, unedited: Option<&Bytes>) -> Option<Bytes> {
    match edited {
        Some(edited) => edited.bytes.clone(),
        None => unedited.cloned(),
    }
}
