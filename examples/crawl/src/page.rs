//! The links of an HTML page.

use std::collections::HashSet;

use html5gum::{DefaultEmitter, Token, Tokenizer};
use reqwest::Url;

/// The scheduler's limit for an idempotency key.
const MAX_URL: usize = 512;
/// The result of a page must fit into a Kafka message, by default 1 MB. JSON can double the length of a URL.
const MAX_LINKS: usize = 900;

/// The links of a page that was fetched from `url` to hosts in `within`: absolute, without fragments and duplicates.
pub(crate) fn links(html: &str, url: &Url, within: &[String]) -> Vec<Url> {
    let mut emitter = DefaultEmitter::default();
    // Otherwise `<a` within a script or title would be read as a link.
    emitter.naively_switch_states(true);
    let (mut links, mut known) = (Vec::new(), HashSet::new());
    for Ok(token) in Tokenizer::new_with_emitter(html, emitter) {
        let Token::StartTag(tag) = token else { continue };
        let attribute = |name: &[u8]| {
            tag.attributes
                .get(name)
                .map(|value| String::from_utf8_lossy(value))
        };
        let rel = attribute(b"rel").unwrap_or_default().to_ascii_lowercase();
        if &**tag.name != b"a" || rel.split_ascii_whitespace().any(|word| word == "nofollow") {
            continue;
        }
        let link = attribute(b"href").and_then(|href| url.join(href.trim()).ok());
        let link = link.and_then(crawlable).filter(|link| is_within(link, within));
        links.extend(link.filter(|link| known.insert(link.clone())));
        if links.len() == MAX_LINKS {
            break;
        }
    }
    links
}

/// Parses the URL of a page that can become a job.
pub(crate) fn parse(text: &str) -> Result<Url, String> {
    let url = Url::parse(text).ok().and_then(crawlable);
    url.ok_or_else(|| "must be an http or https URL of at most 512 bytes".to_owned())
}

/// The URL of a page that can become a job, without the fragment, which is never sent to a server.
pub(crate) fn crawlable(mut url: Url) -> Option<Url> {
    url.set_fragment(None);
    let is_web = matches!(url.scheme(), "http" | "https") && url.has_host();
    (is_web && url.as_str().len() <= MAX_URL).then_some(url)
}

/// Whether the host of a page may be crawled. A crawler that follows every link never ends.
pub(crate) fn is_within(page: &Url, within: &[String]) -> bool {
    let host = page.host_str().unwrap_or_default();
    within.iter().any(|name| name.eq_ignore_ascii_case(host))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_absolute_unique_and_limited() {
        let (url, within) = (
            "http://a.test/dir/page".parse().unwrap(),
            ["a.test", "b.test"].map(String::from),
        );
        let found = links(
            "<!doctype html><title>Fish &amp; <a href=/no>chips</title>
             <a href=next>1</a> <A HREF=' /top#here '>2</A> <a href='/top#there'>3</a> <a name=x>4</a>
             <a href=//b.test/x?y=1&amp;z=2>5</a> <a href=mailto:a@b.test>6</a><a href='http://'>7</a><a href=//c.test>8</a>
             <a rel='me NoFollow' href=/hidden>9</a><script>'<a href=/script>'</script><!-- <a href=/c> -->",
            &url,
            &within,
        );
        let expected = [
            "http://a.test/dir/next",
            "http://a.test/top",
            "http://b.test/x?y=1&z=2",
        ];
        assert_eq!(found, expected.map(|link| link.parse().unwrap()));
        let many: String = (0..2_000).map(|number| format!("<a href={number}>")).collect();
        assert_eq!(links(&many, &url, &within).len(), MAX_LINKS);
        assert!(crawlable(format!("http://a.test/{}", "x".repeat(MAX_URL)).parse().unwrap()).is_none());
    }
}
