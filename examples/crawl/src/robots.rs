//! `/robots.txt`: RFC 9309, and the widespread `Crawl-delay`.

use std::time::Duration;

/// The product token that sites use for this crawler in `User-agent` lines.
pub(crate) const PRODUCT: &str = "redeliver-crawl";

/// The rules for this crawler. The default allows everything.
#[derive(Default)]
pub(crate) struct Robots {
    /// Patterns, and whether they allow.
    rules: Vec<(String, bool)>,
    pub(crate) crawl_delay: Option<Duration>,
}

impl Robots {
    /// Parses a file. Lines that are not understood are skipped, as the standard requires.
    pub(crate) fn parse(text: &str) -> Self {
        // Each agent with whether the current group applies to it, whether any group has, and its rules.
        let mut agents = [PRODUCT, "*"].map(|name| (name, false, false, Self::default()));
        let mut in_agents = false;
        for line in text.trim_start_matches('\u{feff}').split(['\r', '\n']) {
            let line = line.split('#').next().unwrap_or_default();
            let (key, value) = line.split_once(':').unwrap_or_default();
            let (key, value) = (key.trim().to_ascii_lowercase(), value.trim());
            if !["user-agent", "allow", "disallow", "crawl-delay"].contains(&key.as_str()) {
                continue;
            }
            // Consecutive `User-agent` lines share one group.
            let starts_group = key == "user-agent" && !in_agents;
            in_agents = key == "user-agent";
            for (name, applies, has_applied, robots) in &mut agents {
                *applies &= !starts_group;
                if in_agents {
                    *applies |= value.eq_ignore_ascii_case(name);
                    *has_applied |= *applies;
                } else if *applies && key == "crawl-delay" {
                    let seconds = value.parse().ok().filter(|seconds: &f64| *seconds >= 0.0);
                    let delay = seconds.map(|seconds| Duration::from_secs_f64(seconds.min(60.0)));
                    robots.crawl_delay = robots.crawl_delay.max(delay);
                } else if *applies && !value.is_empty() {
                    robots.rules.push((normalize(value), key == "allow"));
                }
            }
        }
        let [(_, _, is_named, named), (_, _, _, general)] = agents;
        if is_named { named } else { general }
    }

    /// Whether a path with its query may be fetched. The longest matching rule decides; of equally long ones, `Allow`.
    pub(crate) fn allows(&self, path: &str) -> bool {
        // In a path, these two have no special meaning.
        let path = normalize(path).replace('*', "%2A").replace('$', "%24");
        let matching = self.rules.iter().filter(|(pattern, _)| matches(pattern, &path));
        let rule = matching.max_by_key(|(pattern, allows)| (pattern.len(), *allows));
        rule.is_none_or(|(_, allows)| *allows)
    }
}

/// Percent-encodes a path or pattern so that equivalent ones are equal (RFC 9309, section 2.2.2): everything but
/// unreserved characters, which are decoded, and reserved ones, which keep their form, because `/` and `%2F` differ.
fn normalize(text: &str) -> String {
    let (mut normal, mut at) = (String::new(), 0);
    while let Some(first) = text.as_bytes().get(at) {
        let hex = text
            .get(at + 1..at + 3)
            .filter(|hex| *first == b'%' && !hex.starts_with('+'));
        let decoded = hex.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        at += if decoded.is_some() { 3 } else { 1 };
        let byte = decoded.unwrap_or(*first);
        // In a pattern, `$` is special only at the end.
        let is_reserved = b"%:/?#[]@!&'()*+,;=".contains(&byte) || (byte == b'$' && at == text.len());
        if (decoded.is_none() && is_reserved) || byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            normal.push(char::from(byte));
        } else {
            normal += &format!("%{byte:02X}");
        }
    }
    normal
}

/// Whether a path starts with a pattern, in which `*` is any text and a final `$` is the end of the path.
fn matches(pattern: &str, path: &str) -> bool {
    let is_anchored = pattern.ends_with('$');
    let mut parts = pattern.strip_suffix('$').unwrap_or(pattern).split('*').peekable();
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = path.strip_prefix(first) else {
        return false;
    };
    while let Some(part) = parts.next() {
        if is_anchored && parts.peek().is_none() {
            return rest.ends_with(part);
        }
        // The earliest match leaves the most text for the parts that follow.
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    !is_anchored || rest.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_groups_override_the_common() {
        let robots = Robots::parse(
            "User-agent: *\nDisallow: /\n\nUser-agent: Redeliver-Crawl # us\nUser-agent: other\nDisallow: /private/\n\
             Crawl-delay: 1.5\nSitemap: http://a/s.xml\nAllow: /private/door\n\nUser-agent: redeliver-crawl\nDisallow: /tmp",
        );
        assert_eq!(robots.crawl_delay, Some(Duration::from_millis(1_500)));
        let allows = |path| robots.allows(path);
        assert!(allows("/") && allows("/private") && allows("/private/door"));
        assert!(!allows("/private/") && !allows("/tmp/x?y=1"));
        let invalid = Robots::parse("Disallow: /\nUser-agent: *\nDisallow:\nCrawl-delay: -1\n<html>");
        assert!(invalid.allows("/any") && invalid.crawl_delay.is_none());
    }

    #[test]
    fn patterns_match_as_in_the_standard() {
        for (pattern, path, expected) in [
            ("/fish", "/fishheads/yummy.html", true),
            ("/fish", "/Fish", false),
            ("/fish/", "/fish", false),
            ("/*.php", "/folder/any.php?x", true),
            ("/*.php$", "/a.php.php", true),
            ("/*.php$", "/a.php?x", false),
            ("/a$", "/ab", false),
            ("/a*b*c", "/a1b2c3", true),
            ("/a*b*c", "/a1c2b3", false),
        ] {
            assert_eq!(matches(pattern, path), expected, "{pattern} {path}");
        }
        let robots = Robots::parse(
            "User-agent: *\rAllow: /page\rDisallow: /page\r\nDisallow: /*.html\rDisallow: /caf\u{e9}\rDisallow: /%7ejoe/a%2fb\r\
             Disallow: /with-a-%2A\rDisallow: /a$b",
        );
        assert!(robots.allows("/page") && !robots.allows("/page.html"));
        assert!(!robots.allows("/with-a-*") && robots.allows("/with-a-b") && !robots.allows("/a$b"));
        assert!(
            !robots.allows("/caf%c3%A9/1") && !robots.allows("/~joe/a%2Fb") && robots.allows("/~joe/a/b")
        );
        assert_eq!(normalize("/%zz %2a*$%$"), "/%zz%20%2A*%24%$");
    }
}
