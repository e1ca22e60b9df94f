//! Reads the headers of a message byte for byte.
//!
//! librdkafka keeps the length of a header's name, but returns the name as a C string. So rdkafka cuts a name off at a NUL
//! byte, and panics if it is not UTF-8. In librdkafka's allocation of a header, the value follows the name and a NUL byte
//! (`rd_kafka_header_add`), so the distance between the two is the length of the name. That layout is not part of
//! librdkafka's API: it is verified once per process. A header without a value lacks this distance, so its name ends at the
//! first NUL byte.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::OnceLock;

use rdkafka::bindings as rd;
use rdkafka::error::IsError as _;
use rdkafka::message::BorrowedHeaders;

/// A header with the bytes that the broker returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawHeader<'h> {
    /// The name. Kafka prescribes UTF-8, but the broker does not check it.
    pub name: &'h [u8],
    /// The value; `None` for null.
    pub value: Option<&'h [u8]>,
}

/// The headers of a message, in order. The name of a header without a value ends at its first NUL byte.
pub fn raw_headers(headers: &BorrowedHeaders) -> impl Iterator<Item = RawHeader<'_>> {
    // `rdkafka` creates a `&BorrowedHeaders` by a cast of this pointer.
    let native = ptr::from_ref(headers).cast::<rd::rd_kafka_headers_t>();
    // SAFETY: the headers are borrowed, so they are live.
    let count = unsafe { rd::rd_kafka_header_cnt(native) };
    let has_known_layout = has_known_layout();
    (0..count).map(move |index| {
        let header = Native::get(native, index).expect("the index is below the count");
        header.borrow(headers, has_known_layout)
    })
}

/// The pointers of a header.
struct Native {
    name: NonNull<c_char>,
    value: Option<NonNull<c_void>>,
    value_len: usize,
}

impl Native {
    fn get(headers: *const rd::rd_kafka_headers_t, index: usize) -> Option<Self> {
        let (mut name, mut value, mut value_len) = (ptr::null(), ptr::null(), 0);
        // SAFETY: the caller passes live headers; the pointers are valid for the call, which checks the index.
        let error = unsafe {
            rd::rd_kafka_header_get_all(
                headers,
                index,
                ptr::from_mut(&mut name),
                ptr::from_mut(&mut value),
                ptr::from_mut(&mut value_len),
            )
        };
        if error.is_error() {
            return None;
        }
        Some(Self {
            name: NonNull::new(name.cast_mut())?,
            value: NonNull::new(value.cast_mut()),
            value_len,
        })
    }

    /// The number of bytes from the name to the NUL byte before the value.
    fn distance(&self) -> Option<usize> {
        let value = self.value?.as_ptr().addr();
        value.checked_sub(self.name.as_ptr().addr())?.checked_sub(1)
    }

    /// The header, which lives as long as its list.
    fn borrow(self, _list: &BorrowedHeaders, has_known_layout: bool) -> RawHeader<'_> {
        // SAFETY: a name ends with NUL and lives as long as its list, which is borrowed.
        let until_nul = unsafe { CStr::from_ptr(self.name.as_ptr()) }.to_bytes();
        let name = match self.distance().filter(|_| has_known_layout) {
            // SAFETY: with the layout that was verified, the name occupies the bytes up to the NUL byte before the value, in the
            // same allocation, which lives as long as the list.
            Some(length) => unsafe { slice::from_raw_parts(self.name.as_ptr().cast::<u8>(), length) },
            None => until_nul,
        };
        let value = self.value.map(|value| {
            // SAFETY: the value has this length and lives as long as the list.
            unsafe { slice::from_raw_parts(value.as_ptr().cast::<u8>(), self.value_len) }
        });
        RawHeader { name, value }
    }
}

/// A list of headers that this process has created.
struct OwnList(NonNull<rd::rd_kafka_headers_t>);

impl Drop for OwnList {
    fn drop(&mut self) {
        // SAFETY: created by `rd_kafka_headers_new`, freed once.
        unsafe { rd::rd_kafka_headers_destroy(self.0.as_ptr()) }
    }
}

/// Whether the value of a header follows its name and a NUL byte.
fn has_known_layout() -> bool {
    static KNOWN: OnceLock<bool> = OnceLock::new();
    *KNOWN.get_or_init(|| {
        let names: [&[u8]; 3] = [b"a\0b", b"", b"\0"];
        let values: [&[u8]; 2] = [b"", b"value"];
        let cases = names
            .iter()
            .flat_map(|name| values.iter().map(move |value| (*name, *value)));
        cases
            .into_iter()
            .all(|(name, value)| distance_of(name, value) == Some(name.len()))
    })
}

/// The distance of a header with this name and value.
fn distance_of(name: &[u8], value: &[u8]) -> Option<usize> {
    // SAFETY: no preconditions.
    let list = OwnList(NonNull::new(unsafe { rd::rd_kafka_headers_new(1) })?);
    // SAFETY: the list is live; name and value have the given lengths, and the call copies them.
    let error = unsafe {
        rd::rd_kafka_header_add(
            list.0.as_ptr(),
            name.as_ptr().cast(),
            name.len().cast_signed(),
            value.as_ptr().cast(),
            value.len().cast_signed(),
        )
    };
    if error.is_error() {
        return None;
    }
    Native::get(list.0.as_ptr(), 0)?.distance()
}

#[cfg(test)]
mod tests {
    use rdkafka::message::{Header, OwnedHeaders};

    use super::*;

    #[test]
    fn headers_are_read_byte_for_byte() {
        assert!(has_known_layout());
        let headers: [(&str, Option<&[u8]>); 7] = [
            ("plain", Some(b"value")),
            ("user\0name", Some(b"1")),
            ("\0", Some(b"")),
            ("", Some(b"\0")),
            ("ends\0", Some(b"\0\0")),
            ("\u{fc}", None),
            ("", None),
        ];
        let list = headers.iter().fold(OwnedHeaders::new(), |list, (key, value)| {
            list.insert(Header { key, value: *value })
        });
        let read: Vec<_> = raw_headers(list.as_borrowed()).collect();
        let expected: Vec<_> = headers
            .iter()
            .map(|(name, value)| RawHeader {
                name: name.as_bytes(),
                value: *value,
            })
            .collect();
        assert_eq!(read, expected);
        assert_eq!(raw_headers(OwnedHeaders::new().as_borrowed()).count(), 0);
    }

    /// A limit of librdkafka's API, which the documentation states.
    #[test]
    fn name_without_value_ends_at_nul() {
        let header: Header<'_, &[u8]> = Header {
            key: "user\0name",
            value: None,
        };
        let list = OwnedHeaders::new().insert(header);
        let name: Vec<_> = raw_headers(list.as_borrowed())
            .map(|header| header.name.to_vec())
            .collect();
        assert_eq!(name, [b"user"]);
    }
}
