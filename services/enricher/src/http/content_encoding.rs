//! The header `Content-Encoding` (RFC 9110, section 8.4): a response that is compressed is not its content.
//!
//! No request asks for an encoding unless its configured headers do. Some servers and proxies compress nevertheless.

use std::io::Read as _;

use bytes::Bytes;
use flate2::bufread::MultiGzDecoder;
use redeliver_core::failure::bounded_text;
use reqwest::header::{CONTENT_ENCODING, HeaderMap};

/// Why a response cannot be decoded.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Undecodable {
    /// It is larger than the limit.
    TooLarge,
    /// What is wrong with it.
    Invalid(String),
}

/// The content of a response with these headers, at most `limit` bytes. It is `body` if that is not encoded.
pub(super) fn decode(headers: &HeaderMap, body: Bytes, limit: usize) -> Result<Bytes, Undecodable> {
    let named = headers.get_all(CONTENT_ENCODING).iter();
    let named: Vec<String> = named
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
        .map(|name| name.trim_ascii().escape_ascii().to_string().to_lowercase())
        .filter(|name| !["", "identity"].contains(&&**name))
        .collect();
    if named.is_empty() || body.is_empty() {
        return Ok(body);
    }
    if !matches!(&named[..], [name] if ["gzip", "x-gzip"].contains(&&**name)) {
        let named = bounded_text(&named.join(", "), 60);
        return Err(Undecodable::Invalid(format!(
            "has the content encoding `{named}`; only gzip can be decoded"
        )));
    }
    let mut decoded = Vec::new();
    let one_more = u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1);
    MultiGzDecoder::new(&body[..])
        .take(one_more)
        .read_to_end(&mut decoded)
        .map_err(|error| Undecodable::Invalid(format!("is not valid gzip: {error}")))?;
    match decoded.len() > limit {
        true => Err(Undecodable::TooLarge),
        false => Ok(decoded.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use proptest::prelude::*;
    use reqwest::header::HeaderValue;

    use super::*;

    fn gzip(content: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(content).unwrap();
        encoder.finish().unwrap()
    }

    fn decoded(encodings: &[&str], body: Vec<u8>, limit: usize) -> Result<Bytes, Undecodable> {
        let values = encodings
            .iter()
            .map(|value| HeaderValue::from_str(value).unwrap());
        let headers = values.map(|value| (CONTENT_ENCODING, value)).collect();
        decode(&headers, body.into(), limit)
    }

    #[test]
    fn encoded_content_is_decoded() {
        let plain: &[&[&str]] = &[&[], &[""], &["identity"], &["Identity, identity"]];
        for encodings in plain {
            assert_eq!(
                decoded(encodings, b"text".to_vec(), 4).as_deref(),
                Ok(&b"text"[..])
            );
        }
        for encodings in [&["gzip"][..], &["X-GZIP "], &["identity", "gzip"]] {
            assert_eq!(decoded(encodings, gzip(b"text"), 4).as_deref(), Ok(&b"text"[..]));
        }
        // Of two members, as some servers write them.
        let two = [gzip(b"te"), gzip(b"xt")].concat();
        assert_eq!(decoded(&["gzip"], two, 4).as_deref(), Ok(&b"text"[..]));
        assert_eq!(decoded(&["br"], Vec::new(), 4).as_deref(), Ok(&b""[..]));
    }

    #[test]
    fn invalid_encodings_are_refused() {
        for encodings in [
            &["br"][..],
            &["zstd"],
            &["deflate"],
            &["gzip, gzip"],
            &["gzip", "br"],
            &["\u{e9}"],
        ] {
            let result = decoded(encodings, gzip(b"text"), 100);
            let Err(Undecodable::Invalid(problem)) = result else {
                panic!("{encodings:?}: {result:?}");
            };
            assert!(problem.contains("only gzip"), "{problem}");
        }
        let whole = gzip(b"text");
        let mut changed = whole.clone();
        changed[whole.len() - 5] ^= 1;
        for damaged in [b"text".to_vec(), whole[..whole.len() - 1].to_vec(), changed] {
            let result = decoded(&["gzip"], damaged, 100);
            assert!(matches!(result, Err(Undecodable::Invalid(_))), "{result:?}");
        }
    }

    #[test]
    fn bomb_does_not_exceed_the_limit() {
        let bomb = gzip(&vec![0; 1 << 24]);
        assert!(bomb.len() < 1 << 15);
        assert_eq!(decoded(&["gzip"], bomb, 1_000), Err(Undecodable::TooLarge));
    }

    proptest! {
        #[test]
        fn decoded_content_is_limited(content in proptest::collection::vec(any::<u8>(), 0..200), limit in 0_usize..200) {
            let expected = match content.len() > limit {
                true => Err(Undecodable::TooLarge),
                false => Ok(Bytes::from(content.clone())),
            };
            prop_assert_eq!(decoded(&["gzip"], gzip(&content), limit), expected);
        }

        #[test]
        fn damaged_content_never_panics(mut body in proptest::collection::vec(any::<u8>(), 0..200), has_header in any::<bool>()) {
            if has_header {
                let header = &gzip(b"")[..10];
                body.splice(..0, header.iter().copied());
            }
            if let Ok(content) = decoded(&["gzip"], body, 1_000) {
                prop_assert!(content.len() <= 1_000);
            }
        }
    }
}
