//! What a crawler takes from an HTML page: its title and its links.

use html5gum::{DefaultEmitter, StartTag, Token, Tokenizer};
use reqwest::Url;

/// A page, read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// The text of the first `<title>`, with runs of white space as one space.
    pub title: Option<String>,
    /// Where it links to: absolute, without fragments, each once, in the order of the page.
    pub links: Vec<Url>,
}

/// Reads a page that was fetched from `address`. Broken HTML is read as far as it goes.
#[must_use]
pub fn read(html: &str, address: &Url) -> Page {
    let mut emitter = DefaultEmitter::default();
    // Without it a title or script that contains `<a` would have links in it.
    emitter.naively_switch_states(true);
    let mut page = Page::default();
    let mut base = address.clone();
    let mut title: Option<String> = None;
    for Ok(token) in Tokenizer::new_with_emitter(html, emitter) {
        match token {
            Token::StartTag(tag) => match &**tag.name {
                b"title" if page.title.is_none() => title = Some(String::new()),
                b"base" => {
                    if let Some(href) = attribute(&tag, b"href").and_then(|href| address.join(&href).ok()) {
                        base = href;
                    }
                }
                b"a" | b"area" => {
                    let link = attribute(&tag, b"href").and_then(|href| base.join(href.trim()).ok());
                    if let Some(link) = link.and_then(crawlable)
                        && is_to_be_followed(&tag)
                        && !page.links.contains(&link)
                    {
                        page.links.push(link);
                    }
                }
                _ => {}
            },
            Token::String(text) => {
                if let Some(title) = &mut title {
                    title.push_str(&String::from_utf8_lossy(&text));
                }
            }
            Token::EndTag(tag) if &**tag.name == b"title" => {
                if let Some(title) = title.take() {
                    page.title = Some(title.split_whitespace().collect::<Vec<_>>().join(" "));
                }
            }
            Token::EndTag(_) | Token::Comment(_) | Token::Doctype(_) | Token::Error(_) => {}
        }
    }
    page
}

/// An address as a crawler names a page: HTTP, and without the fragment, which never reaches a server.
#[must_use]
pub fn crawlable(mut address: Url) -> Option<Url> {
    address.set_fragment(None);
    let is_web = matches!(address.scheme(), "http" | "https") && address.has_host();
    is_web.then_some(address)
}

fn is_to_be_followed(tag: &StartTag<()>) -> bool {
    let rel = attribute(tag, b"rel").unwrap_or_default();
    !rel.split_ascii_whitespace()
        .any(|word| word.eq_ignore_ascii_case("nofollow"))
}

fn attribute(tag: &StartTag<()>, name: &[u8]) -> Option<String> {
    tag.attributes
        .get(name)
        .map(|value| String::from_utf8_lossy(value).into_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read_at(html: &str) -> (Option<String>, Vec<String>) {
        let page = read(html, &"http://a.test:81/dir/page".parse().unwrap());
        (page.title, page.links.into_iter().map(String::from).collect())
    }

    #[test]
    fn links_become_absolute_and_stand_once_each() {
        let (title, links) = read_at(
            "<!doctype html><title>\n Fish &amp; <a href=/no>\n chips</title><title>two</title>
             <a href=next>1</a> <A HREF=' /top#here '>2</A> <a href='/top#there'>3</a> <a name=x>4</a>
             <area href=//b.test/x?y=1&amp;z=2><a href=mailto:a@b.test>5</a><a href='http://'>6</a>
             <a rel='me NoFollow' href=/hidden>7</a><script>'<a href=/script>'</script><!-- <a href=/c> -->",
        );
        assert_eq!(title.as_deref(), Some("Fish & <a href=/no> chips"));
        assert_eq!(
            links,
            [
                "http://a.test:81/dir/next",
                "http://a.test:81/top",
                "http://b.test/x?y=1&z=2"
            ]
        );
    }

    #[test]
    fn a_base_moves_relative_links() {
        let (title, links) = read_at("<base href=/other/><a href=x>x</a><title>never closed");
        assert_eq!(title, None);
        assert_eq!(links, ["http://a.test:81/other/x"]);
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(html in "(<a href=|<title>|</title>|<base href='|'|>|.{0,6}){0,20}") {
            read_at(&html);
        }
    }
}
