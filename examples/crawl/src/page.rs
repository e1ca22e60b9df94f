//! The links of an HTML page.

use html5gum::{DefaultEmitter, Token, Tokenizer};
use reqwest::Url;

/// The links of a page that was fetched from `url`: absolute, without fragments and duplicates.
pub(crate) fn links(html: &str, url: &Url) -> Vec<Url> {
    let mut emitter = DefaultEmitter::default();
    // Otherwise `<a` within a script or title would be read as a link.
    emitter.naively_switch_states(true);
    let mut links = Vec::new();
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
        if let Some(link) = link.and_then(crawlable)
            && !links.contains(&link)
        {
            links.push(link);
        }
    }
    links
}

/// The URL of a page: http or https, without the fragment, which is never sent to a server.
pub(crate) fn crawlable(mut url: Url) -> Option<Url> {
    url.set_fragment(None);
    (matches!(url.scheme(), "http" | "https") && url.has_host()).then_some(url)
}

#[cfg(test)]
mod tests {
    #[test]
    fn links_are_absolute_and_unique() {
        let links = super::links(
            "<!doctype html><title>Fish &amp; <a href=/no>chips</title>
             <a href=next>1</a> <A HREF=' /top#here '>2</A> <a href='/top#there'>3</a> <a name=x>4</a>
             <a href=//b.test/x?y=1&amp;z=2>5</a> <a href=mailto:a@b.test>6</a><a href='http://'>7</a>
             <a rel='me NoFollow' href=/hidden>8</a><script>'<a href=/script>'</script><!-- <a href=/c> -->",
            &"http://a.test/dir/page".parse().unwrap(),
        );
        let expected = [
            "http://a.test/dir/next",
            "http://a.test/top",
            "http://b.test/x?y=1&z=2",
        ];
        assert_eq!(links, expected.map(|link| link.parse().unwrap()));
    }
}
