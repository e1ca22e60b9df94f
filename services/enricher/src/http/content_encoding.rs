//! The header `Content-Encoding` (RFC 9110, section 8.4): a response that is compressed is not its content.
//!
//! No request asks for an encoding unless its configured headers do. Some servers and proxies compress nevertheless.

use std::io::Read as _;

use bytes::Bytes;
use flate2::bufread::MultiGzDecoder;
use redeliver_core::failure::{RESPONSE_LIMIT, bounded_text};
use reqwest::header::{CONTENT_ENCODING, HeaderMap};

/// Why a response cannot be decoded.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Undecodable {
    /// It is larger than the limit.
    TooLarge,
    /// What is wrong with it.
    Invalid(String),
}

/// Whether a response with these headers is compressed with gzip.
fn is_gzip(headers: &HeaderMap) -> Result<bool, Undecodable> {
    let named = headers.get_all(CONTENT_ENCODING).iter();
    let named: Vec<String> = named
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
        .map(|name| name.trim_ascii().escape_ascii().to_string().to_lowercase())
        .filter(|name| !["", "identity"].contains(&&**name))
        .collect();
    match &named[..] {
        [] => Ok(false),
        [name] if ["gzip", "x-gzip"].contains(&&**name) => Ok(true),
        _ => {
            let named = bounded_text(&named.join(", "), 60);
            Err(Undecodable::Invalid(format!(
                "has the content encoding `{named}`; only gzip can be decoded"
            )))
        }
    }
}

/// The beginning of the content of a response with these headers, whose body begins like this, and whether it is the whole content. `None` if it
/// cannot be decoded.
pub(super) fn beginning(headers: &HeaderMap, body: Vec<u8>, is_whole: bool) -> Option<(Vec<u8>, bool)> {
    if !is_gzip(headers).ok()? {
        return Some((body, is_whole));
    }
    let mut decoded = Vec::new();
    // What comes before an error is the beginning.
    let read = MultiGzDecoder::new(&body[..])
        .take(RESPONSE_LIMIT as u64 + 1)
        .read_to_end(&mut decoded);
    Some((decoded, is_whole && read.is_ok()))
}

/// The content of a response with these headers, at most `limit` bytes. It is `body` if that is not encoded.
pub(super) fn decode(headers: &HeaderMap, body: Bytes, limit: usize) -> Result<Bytes, Undecodable> {
    if body.is_empty() || !is_gzip(headers)? {
        return Ok(body);
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
    fn beginning_is_decoded() {
        let headers =
            |encoding| HeaderMap::from_iter([(CONTENT_ENCODING, HeaderValue::from_static(encoding))]);
        let whole = gzip(b"text");
        let of = |encoding, body: &[u8], is_whole| beginning(&headers(encoding), body.to_vec(), is_whole);
        assert_eq!(of("gzip", &whole, true), Some((b"text".to_vec(), true)));
        assert_eq!(of("identity", b"te", false), Some((b"te".to_vec(), false)));
        // Without its checksum.
        let cut = &whole[..whole.len() - 8];
        assert_eq!(of("gzip", cut, false), Some((b"text".to_vec(), false)));
        assert_eq!(of("br", &whole, true), None);
        let (bomb, _) = of("gzip", &gzip(&vec![b'x'; 1 << 20]), false).unwrap();
        assert_eq!(bomb.len(), RESPONSE_LIMIT + 1);
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
