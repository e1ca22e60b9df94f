//! Pages of lists.

use prost::Message;

/// A page ends before it exceeds this many bytes, unless a single message does, because gRPC clients reject messages over 4 MiB by default.
pub const PAGE_BYTES: usize = 3 << 20;

/// The first messages of a list, each of which comes with its place in the list: at most `most` messages and [`PAGE_BYTES`], but at least
/// one message. If there are more, the place of the last one is returned as well: the next page follows it.
pub fn fitting<P, M: Message>(
    messages: impl IntoIterator<Item = (P, M)>,
    most: usize,
) -> (Vec<M>, Option<P>) {
    let (mut page, mut bytes, mut last) = (Vec::new(), 0, None);
    for (place, message) in messages {
        bytes += message.encoded_len();
        if page.len() == most || (bytes > PAGE_BYTES && !page.is_empty()) {
            return (page, last);
        }
        page.push(message);
        last = Some(place);
    }
    (page, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_size_is_limited() {
        let page = |most, count: usize, bytes: usize| {
            let messages = (0..count).map(|place| (place, "x".repeat(bytes)));
            let (page, last) = fitting(messages, most);
            (page.len(), last)
        };
        assert_eq!(page(50, 0, 1), (0, None));
        assert_eq!(page(50, 50, 1), (50, None));
        assert_eq!(page(50, 51, 1), (50, Some(49)));
        assert_eq!(page(50, 51, 1 << 20), (2, Some(1)));
        assert_eq!(page(50, 2, PAGE_BYTES), (1, Some(0)));
        assert_eq!(page(50, 1, PAGE_BYTES), (1, None));
    }
}
