//! The documents of a topic, by key.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use redeliver_core::Record;
use redeliver_core::failure::bounded_text;

/// The maximum size of a reported key, in bytes. Longer ones are cut off, so that the memory is bounded.
const MAX_KEY: usize = 600;

/// A versioned document.
pub trait Document: Clone + fmt::Debug + PartialEq + Send + Sync + 'static {
    /// Identifies a document.
    type Key: Clone + Ord + fmt::Debug + Send + Sync + 'static;
    /// Why a value cannot be read.
    type Invalid: Copy + fmt::Debug + fmt::Display + PartialEq + Send + Sync + 'static;

    /// What follows from a value that cannot be read, as the end of a sentence.
    const IF_UNREADABLE: &'static str;
    /// What follows if [`Document::is_newer`], as the end of a sentence.
    const IF_NEWER: &'static str = "";

    /// The key in a record; `None` if it is of an unknown kind.
    fn parse_key(key: &str) -> Option<Self::Key>;

    /// The key of a record; `None` if it is of an unknown kind.
    fn key_of(record: &Record) -> Option<Self::Key> {
        let key = std::str::from_utf8(record.key.as_deref()?).ok()?;
        Self::parse_key(key)
    }

    /// The key as a record has it.
    fn record_key(key: &Self::Key) -> String;

    /// Reads the value of a record.
    ///
    /// # Errors
    /// If the value cannot be read.
    fn decode(key: &Self::Key, value: &Bytes) -> Result<Self, Self::Invalid>;

    /// Increases by 1 with each change.
    fn revision(&self) -> u64;

    /// The [`ChangeId`](crate::ChangeId) of the last change.
    fn change_id(&self) -> &Bytes;

    /// Whether a newer version has written something that this one does not know, and would drop with a change.
    fn is_newer(&self) -> bool {
        false
    }

    /// Whether a value with this problem needs attention at once, because no version can read it.
    fn is_damaged(_invalid: Self::Invalid) -> bool {
        true
    }
}

/// Why a record is not, or not completely, used as it was written.
#[derive(Clone, Debug, PartialEq)]
pub enum DocumentProblem<D: Document> {
    /// Its key is of an unknown kind.
    Key,
    /// It cannot be read.
    Unreadable(D::Invalid),
    /// See [`Document::is_newer`].
    Newer,
}

impl<D: Document> DocumentProblem<D> {
    fn of(entry: &Result<Arc<D>, D::Invalid>) -> Option<Self> {
        match entry {
            Ok(document) => document.is_newer().then_some(Self::Newer),
            Err(invalid) => Some(Self::Unreadable(*invalid)),
        }
    }

    /// See [`Document::is_damaged`].
    #[must_use]
    pub fn is_damaged(&self) -> bool {
        matches!(self, Self::Unreadable(invalid) if D::is_damaged(*invalid))
    }
}

impl<D: Document> fmt::Display for DocumentProblem<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key => f.write_str("is of an unknown kind, and ignored"),
            Self::Unreadable(invalid) => write!(f, "{invalid}{}", D::IF_UNREADABLE),
            Self::Newer => write!(f, "was written by a newer version{}", D::IF_NEWER),
        }
    }
}

/// All documents of a topic. The newest record of each key counts.
#[derive(Clone, Debug, PartialEq)]
pub struct Table<D: Document> {
    entries: BTreeMap<D::Key, Result<Arc<D>, D::Invalid>>,
    /// Keys of unknown kinds.
    unknown: BTreeSet<String>,
}

impl<D: Document> Default for Table<D> {
    fn default() -> Self {
        Self {
            entries: BTreeMap::new(),
            unknown: BTreeSet::new(),
        }
    }
}

impl<D: Document> Table<D> {
    /// Applies a record that is newer than all before.
    pub fn apply_record(&mut self, record: &Record) {
        match (D::key_of(record), &record.value) {
            (Some(key), Some(value)) => {
                let document = D::decode(&key, value).map(Arc::new);
                self.entries.insert(key, document);
            }
            (Some(key), None) => drop(self.entries.remove(&key)),
            (None, value) => {
                let key = record.key.as_deref().unwrap_or_default();
                let key = bounded_text(&String::from_utf8_lossy(key), MAX_KEY);
                if value.is_some() {
                    self.unknown.insert(key);
                } else {
                    self.unknown.remove(&key);
                }
            }
        }
    }

    /// Adds a document, as if it had been read.
    pub fn insert(&mut self, key: D::Key, document: impl Into<Arc<D>>) {
        self.entries.insert(key, Ok(document.into()));
    }

    /// A document, or why it cannot be read; `None` if there is none.
    #[must_use]
    pub fn entry<Q>(&self, key: &Q) -> Option<&Result<Arc<D>, D::Invalid>>
    where
        D::Key: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        self.entries.get(key)
    }

    /// A document; `None` if there is none, or if it cannot be read, see [`Table::problem`].
    #[must_use]
    pub fn get<Q>(&self, key: &Q) -> Option<&Arc<D>>
    where
        D::Key: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        self.entry(key)?.as_ref().ok()
    }

    /// All documents, also those that cannot be read, by key.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = (&D::Key, &Result<Arc<D>, D::Invalid>)> {
        self.entries.iter()
    }

    /// All documents that can be read, by key.
    pub fn documents(&self) -> impl DoubleEndedIterator<Item = (&D::Key, &Arc<D>)> {
        let entries = self.entries.iter();
        entries.filter_map(|(key, entry)| Some((key, entry.as_ref().ok()?)))
    }

    /// The number of documents that can be read.
    #[must_use]
    pub fn count(&self) -> usize {
        self.documents().count()
    }

    /// The problem of a document, if there is one.
    #[must_use]
    pub fn problem<Q>(&self, key: &Q) -> Option<DocumentProblem<D>>
    where
        D::Key: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        self.entry(key).and_then(DocumentProblem::of)
    }

    /// All problems, by the key of the record.
    #[must_use]
    pub fn document_problems(&self) -> BTreeMap<String, DocumentProblem<D>> {
        let entries = self.entries.iter();
        let entries =
            entries.filter_map(|(key, entry)| Some((D::record_key(key), DocumentProblem::of(entry)?)));
        let unknown = self.unknown.iter().map(|key| (key.clone(), DocumentProblem::Key));
        entries.chain(unknown).collect()
    }

    /// The documents of an earlier table that are missing or older in this one. If no change removes or replaces them like that, the topic was
    /// deleted. One that cannot be read any more is not lost.
    pub fn lost<'t>(&'t self, before: &'t Self) -> impl Iterator<Item = (&'t D::Key, &'t Arc<D>)> {
        before
            .documents()
            .filter(|(key, document)| match self.entry(key) {
                Some(Ok(now)) => now.revision() < document.revision(),
                Some(Err(_)) => false,
                None => true,
            })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use redeliver_testkit::record;

    use super::*;

    /// A note about `note/<number>`: its revision, and the id of its change.
    #[derive(Clone, Debug, PartialEq)]
    pub(crate) struct Note {
        pub(crate) revision: u8,
        pub(crate) change_id: Bytes,
    }

    #[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
    #[error("is empty")]
    pub(crate) struct Empty;

    impl Note {
        pub(crate) fn of(revision: u8) -> Self {
            Self {
                revision,
                change_id: Bytes::from_static(b"other"),
            }
        }

        pub(crate) fn encode(&self) -> Bytes {
            [&[self.revision], &*self.change_id].concat().into()
        }
    }

    impl Document for Note {
        type Key = u8;
        type Invalid = Empty;

        const IF_UNREADABLE: &'static str = ", and ignored";
        const IF_NEWER: &'static str = ", and kept";

        fn parse_key(key: &str) -> Option<u8> {
            key.strip_prefix("note/")?.parse().ok()
        }

        fn record_key(key: &u8) -> String {
            format!("note/{key}")
        }

        fn decode(_key: &u8, value: &Bytes) -> Result<Self, Empty> {
            let (revision, change_id) = value.split_first().ok_or(Empty)?;
            Ok(Self {
                revision: *revision,
                change_id: Bytes::copy_from_slice(change_id),
            })
        }

        fn revision(&self) -> u64 {
            self.revision.into()
        }

        fn change_id(&self) -> &Bytes {
            &self.change_id
        }

        fn is_newer(&self) -> bool {
            self.change_id.starts_with(b"newer")
        }
    }

    pub(crate) fn newer() -> Note {
        Note {
            change_id: Bytes::from_static(b"newer"),
            ..Note::of(1)
        }
    }

    pub(crate) fn broken() -> Option<Bytes> {
        Some(Bytes::new())
    }

    fn table(revisions: &[(u8, u8)]) -> Table<Note> {
        let mut table = Table::default();
        for (key, revision) in revisions {
            table.insert(*key, Note::of(*revision));
        }
        table
    }

    #[test]
    fn newest_record_of_key_counts() {
        let mut notes = Table::default();
        for revision in [1, 2] {
            notes.apply_record(&record("note/7", Some(Note::of(revision).encode())));
            assert_eq!(notes, table(&[(7, revision)]));
        }
        notes.apply_record(&record("note/7", broken()));
        assert!(notes.entry(&7).is_some() && notes.get(&7).is_none());
        notes.apply_record(&record("note/7", None));
        assert_eq!(notes, Table::default());
    }

    #[test]
    fn problems_are_reported_until_corrected() {
        let mut notes = table(&[(1, 1)]);
        // Not `note/` and a replacement character: the key is not text.
        let mut no_text = record("", broken());
        no_text.key = Some(Bytes::from_static(b"note/\xff"));
        // Long keys are told apart as far as they are kept.
        let long = |end: &str| record(&format!("{}{end}", "x".repeat(590)), broken());
        let mut records = [
            record("note/2", broken()),
            record("note/3", Some(newer().encode())),
            no_text,
            long("a"),
            long("b"),
        ];
        records.iter().for_each(|record| notes.apply_record(record));
        let problems: Vec<_> = notes
            .document_problems()
            .into_iter()
            .map(|(key, problem)| (key, problem.to_string(), problem.is_damaged()))
            .collect();
        let unknown = |key: &str| {
            let problem = "is of an unknown kind, and ignored".to_owned();
            (key.to_owned(), problem, false)
        };
        let newer = "was written by a newer version, and kept";
        let expected = [
            ("note/2".to_owned(), "is empty, and ignored".to_owned(), true),
            ("note/3".to_owned(), newer.to_owned(), false),
            unknown("note/\u{fffd}"),
            unknown(&format!("{}a", "x".repeat(590))),
            unknown(&format!("{}b", "x".repeat(590))),
        ];
        assert_eq!(problems, expected);
        assert_eq!(notes.count(), 2);
        for record in &mut records {
            record.value = None;
            notes.apply_record(record);
        }
        assert_eq!(notes, table(&[(1, 1)]));
    }

    #[test]
    fn missing_or_older_documents_are_lost() {
        let before = table(&[(1, 2), (2, 2), (3, 2)]);
        let now = table(&[(1, 2), (2, 1), (4, 1)]);
        let lost = |now: &Table<Note>, before| now.lost(before).map(|(key, _)| *key).collect::<Vec<_>>();
        assert_eq!(lost(&now, &before), [2, 3]);
        assert!(lost(&table(&[(1, 3), (2, 1), (4, 2)]), &now).is_empty());
        let mut unreadable = before.clone();
        unreadable.apply_record(&record("note/1", broken()));
        assert!(lost(&unreadable, &before).is_empty());
    }
}
