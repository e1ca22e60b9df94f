//! A Kafka record in memory. Key, value and user headers are never changed.
//!
//! As in Kafka, headers are an ordered list in which names can repeat and values can be null. All headers of a record
//! are stored in three buffers instead of one allocation each, because a retry tier holds many thousands of records in
//! memory.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::time::Timestamp;

/// The position of a record in Kafka, displayed as `topic/partition/offset`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Position {
    /// The name of the topic.
    pub topic: Arc<str>,
    /// The partition, from 0.
    pub partition: i32,
    /// The offset in the partition, from 0.
    pub offset: i64,
}

impl fmt::Debug for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.topic, self.partition, self.offset)
    }
}

/// A record that was read from Kafka.
#[derive(Clone, Debug)]
pub struct Record {
    /// The position at which the record was read.
    pub position: Position,
    /// The timestamp of the producer or the broker; `None` for records older than message format 1.
    pub timestamp: Option<Timestamp>,
    /// The key; `None` is a null key, which differs from an empty one.
    pub key: Option<Bytes>,
    /// The value; `None` is a null value (a tombstone), which differs from an empty one.
    pub value: Option<Bytes>,
    /// The headers in order.
    pub headers: Headers,
    /// The number of headers that were not read, because their names are not UTF-8.
    /// If it is not 0, the record is malformed.
    pub unreadable_headers: usize,
}

/// Who has set the timestamp of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TimestampType {
    /// The producer.
    CreateTime,
    /// The broker, when it stored the record.
    LogAppendTime,
}

/// A record to write to Kafka.
#[derive(Clone, Debug)]
pub struct Output {
    /// The topic to write to.
    pub topic: Arc<str>,
    /// The partition to write to; `None` chooses it by the key.
    pub partition: Option<i32>,
    /// The key. Without `partition`, its murmur2 hash chooses the partition; a null key chooses a random one.
    pub key: Option<Bytes>,
    /// The value; `None` is a null value.
    pub value: Option<Bytes>,
    /// The headers in order.
    pub headers: Headers,
}

impl Record {
    /// The approximate size in memory, in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        let of = |bytes: &Option<Bytes>| bytes.as_ref().map_or(0, Bytes::len);
        size_of::<Self>() + of(&self.key) + of(&self.value) + self.headers.byte_len()
    }
}

impl Output {
    /// The size in bytes of an uncompressed batch that contains only this record. Kafka compares `max.message.bytes`
    /// with the size of a batch. The format is described in Kafka's documentation, "Record Batch".
    #[must_use]
    pub fn size(&self) -> usize {
        const BATCH: usize = 61;
        const ATTRIBUTES_AND_DELTAS: usize = 3;
        let bytes = |len: Option<usize>| len.map_or(1, |len| varint_size(len) + len);
        let headers = self.headers.iter();
        let headers = headers.map(|(name, value)| bytes(Some(name.len())) + bytes(value.map(<[u8]>::len)));
        let record = ATTRIBUTES_AND_DELTAS
            + bytes(self.key.as_ref().map(Bytes::len))
            + bytes(self.value.as_ref().map(Bytes::len))
            + varint_size(self.headers.len())
            + headers.sum::<usize>();
        BATCH + varint_size(record) + record
    }
}

/// The encoded size of a length: a zigzag varint with seven bits per byte.
fn varint_size(length: usize) -> usize {
    let bits = usize::BITS - (length << 1).leading_zeros();
    bits.div_ceil(7).max(1) as usize
}

/// An ordered list of headers. Names can repeat, and values can be null.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Headers {
    /// All names, one after the other. A `String`, so that reading a name does not validate it again.
    names: String,
    /// All values, one after the other.
    values: Vec<u8>,
    /// Where each header ends in `names` and `values`. It starts where the one before it ends.
    ends: Vec<HeaderEnd>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct HeaderEnd {
    name: u32,
    value: u32,
    is_null: bool,
}

/// A header that is allowed once occurs more than once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Duplicate;

impl Headers {
    /// An empty list.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty list with capacity for `count` headers, whose names have `names` and whose values have `values` bytes in
    /// total.
    #[must_use]
    pub fn with_capacity(count: usize, names: usize, values: usize) -> Self {
        Self {
            names: String::with_capacity(names),
            values: Vec::with_capacity(values),
            ends: Vec::with_capacity(count),
        }
    }

    /// Appends a header. A value of `None` is a null value.
    ///
    /// # Panics
    /// If the names or the values together exceed 4 GiB. A Kafka record is smaller, because its size is an int32.
    pub fn push(&mut self, name: &str, value: Option<&[u8]>) {
        let end = |len: usize| u32::try_from(len).expect("a Kafka record is smaller than 2 GiB");
        self.names.push_str(name);
        self.values.extend_from_slice(value.unwrap_or_default());
        self.ends.push(HeaderEnd {
            name: end(self.names.len()),
            value: end(self.values.len()),
            is_null: value.is_none(),
        });
    }

    /// Appends a header with a text value.
    pub fn push_text(&mut self, name: &str, value: &str) {
        self.push(name, Some(value.as_bytes()));
    }

    /// The number of headers.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether the list is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The size of the list in memory, in bytes.
    #[must_use]
    pub fn byte_len(&self) -> usize {
        self.names.len() + self.values.len() + self.ends.len() * size_of::<HeaderEnd>()
    }

    /// All headers in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (&str, Option<&[u8]>)> {
        (0..self.ends.len()).map(|index| {
            let start = index
                .checked_sub(1)
                .map_or_else(HeaderEnd::default, |before| self.ends[before]);
            let end = self.ends[index];
            let value = &self.values[start.value as usize..end.value as usize];
            let name = &self.names[start.name as usize..end.name as usize];
            (name, (!end.is_null).then_some(value))
        })
    }

    /// The value of the header with this name; `None` if there is no such header.
    ///
    /// # Errors
    /// [`Duplicate`] if the name occurs more than once.
    pub fn single(&self, name: &str) -> Result<Option<Option<&[u8]>>, Duplicate> {
        let mut found = self
            .iter()
            .filter(|(other, _)| *other == name)
            .map(|(_, value)| value);
        let first = found.next();
        if found.next().is_some() {
            Err(Duplicate)
        } else {
            Ok(first)
        }
    }

    /// The value of the last header with this name; `None` if there is no such header, or its value is null.
    #[must_use]
    pub fn last(&self, name: &str) -> Option<&[u8]> {
        self.iter().rfind(|(other, _)| *other == name)?.1
    }

    /// A copy with only those headers for whose name `keep` returns true.
    #[must_use]
    pub fn filtered(&self, keep: impl Fn(&str) -> bool) -> Self {
        // Room for the reserved headers that callers append, so that usually no other allocation is needed.
        let mut kept = Self::with_capacity(
            self.ends.len() + 12,
            self.names.len() + 192,
            self.values.len() + 192,
        );
        for (name, value) in self.iter().filter(|(name, _)| keep(name)) {
            kept.push(name, value);
        }
        kept
    }
}

impl fmt::Debug for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = self
            .iter()
            .map(|(name, value)| (name, value.map(String::from_utf8_lossy)));
        f.debug_map().entries(shown).finish()
    }
}

impl<'a> FromIterator<(&'a str, Option<&'a [u8]>)> for Headers {
    fn from_iter<I: IntoIterator<Item = (&'a str, Option<&'a [u8]>)>>(headers: I) -> Self {
        let mut list = Self::new();
        for (name, value) in headers {
            list.push(name, value);
        }
        list
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn headers_are_stored_unchanged(
            list in proptest::collection::vec((".{0,20}", proptest::option::of(proptest::collection::vec(any::<u8>(), 0..40))), 0..30),
        ) {
            let headers: Headers = list.iter().map(|(n, v)| (n.as_str(), v.as_deref())).collect();
            let out: Vec<_> = headers.iter().map(|(n, v)| (n.to_owned(), v.map(<[u8]>::to_vec))).collect();
            prop_assert_eq!(list, out);
        }
    }

    #[test]
    fn null_and_empty_values_differ() {
        let headers: Headers = [("a", None), ("b", Some(&b""[..])), ("a", Some(&b"x"[..]))]
            .into_iter()
            .collect();
        assert_eq!(headers.single("a"), Err(Duplicate));
        assert_eq!(headers.single("b"), Ok(Some(Some(&b""[..]))));
        assert_eq!(headers.single("c"), Ok(None));
        assert_eq!(headers.last("a"), Some(&b"x"[..]));
        assert_eq!(headers.filtered(|name| name == "a").len(), 2);
    }
}
