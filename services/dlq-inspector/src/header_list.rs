//! The binary encoding of headers in the index. It keeps the order, duplicates and null values.
//!
//! A header is encoded as the length of its name, the name, and then either 0 for a null value or the length of the value
//! plus 1 and the value. Lengths are encoded as LEB128.

use redeliver_core::Headers;

/// The maximum size of the two lengths of a header.
const MAX_LENGTHS: usize = 10;

/// Encodes headers.
#[must_use]
pub fn encode(headers: &Headers) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(headers.byte_len());
    for (name, value) in headers.iter() {
        push_length(&mut bytes, name.len());
        bytes.extend_from_slice(name.as_bytes());
        push_length(&mut bytes, value.map_or(0, |value| value.len() + 1));
        bytes.extend_from_slice(value.unwrap_or_default());
    }
    bytes
}

/// The ranks of headers, from 0.
const RANKS: usize = 3;

/// Encodes as many headers as have at most this many bytes together, in their order. Those of a lower rank have precedence.
#[must_use]
pub fn encode_some(headers: &Headers, most: usize, rank: impl Fn(&str) -> usize) -> Vec<u8> {
    if headers.byte_len() <= most {
        return encode(headers);
    }
    let (mut left, mut kept) = (most, vec![false; headers.len()]);
    for wanted in 0..RANKS {
        for ((name, value), kept) in headers.iter().zip(&mut kept) {
            let size = name.len() + value.map_or(0, <[u8]>::len) + MAX_LENGTHS;
            if size <= left && rank(name) == wanted {
                left -= size;
                *kept = true;
            }
        }
    }
    let kept = headers.iter().zip(kept).filter(|(_, kept)| *kept);
    encode(&kept.map(|(header, _)| header).collect())
}

/// Decodes headers, up to the first invalid byte.
#[must_use]
pub fn decode(bytes: &[u8]) -> Headers {
    iter(bytes).collect()
}

/// Iterates over encoded headers without copying, up to the first invalid byte.
pub fn iter(bytes: &[u8]) -> impl Iterator<Item = (&str, Option<&[u8]>)> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let name = std::str::from_utf8(take(&mut rest)?).ok()?;
        let Some(size) = length(&mut rest)?.checked_sub(1) else {
            return Some((name, None));
        };
        let (value, remaining) = rest.split_at_checked(size)?;
        rest = remaining;
        Some((name, Some(value)))
    })
}

fn take<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let size = length(rest)?;
    let (taken, remaining) = rest.split_at_checked(size)?;
    *rest = remaining;
    Some(taken)
}

fn push_length(bytes: &mut Vec<u8>, mut length: usize) {
    loop {
        let [low, ..] = length.to_le_bytes();
        length >>= 7;
        if length == 0 {
            bytes.push(low);
            return;
        }
        bytes.push(low | 0x80);
    }
}

fn length(rest: &mut &[u8]) -> Option<usize> {
    let mut length = 0_u64;
    // A record is smaller than 2 GiB, so that a length has at most five bytes.
    for shift in 0..5 {
        let (byte, remaining) = rest.split_first()?;
        *rest = remaining;
        length |= u64::from(byte & 0x7f) << (7 * shift);
        if byte & 0x80 == 0 {
            return usize::try_from(length).ok();
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn headers_survive_a_round_trip(
            list in proptest::collection::vec((".{0,5}", proptest::option::of(proptest::collection::vec(any::<u8>(), 0..300))), 0..10)
        ) {
            let headers: Headers = list.iter().map(|(name, value)| (name.as_str(), value.as_deref())).collect();
            prop_assert_eq!(decode(&encode(&headers)), headers);
        }

        #[test]
        fn some_headers_are_those_that_fit(
            list in proptest::collection::vec((".{0,5}", proptest::option::of(proptest::collection::vec(any::<u8>(), 0..60))), 0..30),
            most in 0_usize..500
        ) {
            let headers: Headers = list.iter().map(|(name, value)| (name.as_str(), value.as_deref())).collect();
            let needed = |name: &str| name.len() % 2 == 1;
            let rank = |name: &str| usize::from(!needed(name));
            let encoded = encode_some(&headers, most, rank);
            prop_assert!(encoded.len() <= most);
            // In their order.
            let (some, mut all) = (decode(&encoded), headers.iter());
            prop_assert!(some.iter().all(|header| all.any(|other| other == header)));
            // Needed ones do not depend on the others.
            let only = |headers: &Headers| headers.filtered(needed);
            if headers.byte_len() > most {
                prop_assert_eq!(only(&some), decode(&encode_some(&only(&headers), most, rank)));
            } else {
                prop_assert_eq!(&some, &headers);
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = decode(&bytes);
        }
    }
}
