//! What a site asks of crawlers in its `/robots.txt`: RFC 9309, and the `Crawl-delay` that many sites add.

use std::time::Duration;

/// Our name as sites write it in `User-agent` lines.
pub const PRODUCT: &str = "redeliver-crawl";

/// What one site asks of us. The default asks for nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Robots {
    rules: Vec<Rule>,
    crawl_delay: Option<Duration>,
}

#[derive(Clone, Debug, PartialEq)]
struct Rule {
    pattern: String,
    allows: bool,
}

/// The rules that belong to some user agents.
#[derive(Default)]
struct Group {
    agents: Vec<String>,
    rules: Vec<Rule>,
    crawl_delay: Option<Duration>,
}

impl Robots {
    /// Reads a file. Lines that cannot be understood are passed over, as the standard asks.
    #[must_use]
    pub fn read(text: &str) -> Self {
        let groups = groups(text);
        let named = |name: &str| groups.iter().any(|group| group.is_for(name));
        // All groups that name us count together; those for everybody count only when none does.
        let name = if named(PRODUCT) { PRODUCT } else { "*" };
        let mut robots = Self::default();
        for group in groups.into_iter().filter(|group| group.is_for(name)) {
            robots.rules.extend(group.rules);
            robots.crawl_delay = robots.crawl_delay.max(group.crawl_delay);
        }
        robots
    }

    /// Whether a path, with its query, may be fetched: the longest rule that matches decides, and when an
    /// `Allow` is as long as a `Disallow`, it wins.
    #[must_use]
    pub fn allows(&self, path: &str) -> bool {
        let matching = self.rules.iter().filter(|rule| matches(&rule.pattern, path));
        matching
            .max_by_key(|rule| (rule.pattern.len(), rule.allows))
            .is_none_or(|rule| rule.allows)
    }

    /// The pause between two requests that the site asks for.
    #[must_use]
    pub fn crawl_delay(&self) -> Option<Duration> {
        self.crawl_delay
    }
}

impl Group {
    fn is_for(&self, name: &str) -> bool {
        self.agents.iter().any(|agent| agent.eq_ignore_ascii_case(name))
    }
}

fn groups(text: &str) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    // Whether the line before named a user agent too: then both share what follows.
    let mut naming = false;
    for line in text.trim_start_matches('\u{feff}').lines() {
        let line = line.split('#').next().unwrap_or_default();
        let Some((key, value)) = line.split_once(':') else {
            continue;
        };
        let (key, value) = (key.trim().to_ascii_lowercase(), value.trim());
        if key == "user-agent" {
            if !naming {
                groups.push(Group::default());
            }
            naming = true;
            if let Some(group) = groups.last_mut() {
                group.agents.push(value.to_owned());
            }
            continue;
        }
        // Rules before the first user agent belong to nobody.
        let Some(group) = groups.last_mut() else { continue };
        match key.as_str() {
            "allow" | "disallow" => {
                naming = false;
                // An empty pattern matches nothing.
                if !value.is_empty() {
                    group.rules.push(Rule {
                        pattern: encoded(value),
                        allows: key == "allow",
                    });
                }
            }
            "crawl-delay" => {
                naming = false;
                let seconds = value.parse().ok();
                group.crawl_delay = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
            }
            // Others, such as Sitemap, belong to no group and end none.
            _ => {}
        }
    }
    groups
}

/// A pattern as it stands in addresses: what is not ASCII is percent-encoded there.
fn encoded(pattern: &str) -> String {
    let mut encoded = String::with_capacity(pattern.len());
    for byte in pattern.bytes() {
        if byte.is_ascii() {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

/// Whether a path begins with the pattern, in which `*` is any text and `$` at the end is the path's end.
fn matches(pattern: &str, path: &str) -> bool {
    let (pattern, to_the_end) = match pattern.strip_suffix('$') {
        Some(pattern) => (pattern, true),
        None => (pattern, false),
    };
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = path.strip_prefix(first) else {
        return false;
    };
    let mut parts: Vec<&str> = parts.collect();
    let last = if to_the_end { parts.pop() } else { None };
    for part in parts {
        // The earliest place leaves the most for the parts that follow.
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    match last {
        Some(last) => rest.ends_with(last),
        None => !to_the_end || rest.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_group_that_names_us_stands_over_the_one_for_everybody() {
        let robots = Robots::read(
            "User-agent: *\nDisallow: /\n\nUser-agent: Redeliver-Crawl # us\nUser-agent: other\nDisallow: /private/\n\
             Crawl-delay: 1.5\nSitemap: http://a/s.xml\nAllow: /private/door\n\nUser-agent: redeliver-crawl\nDisallow: /tmp",
        );
        for (path, allowed) in [
            ("/", true),
            ("/private", true),
            ("/private/", false),
            ("/private/door", true),
            ("/tmp/x?y=1", false),
        ] {
            assert_eq!(robots.allows(path), allowed, "{path}");
        }
        assert_eq!(robots.crawl_delay(), Some(Duration::from_millis(1_500)));
    }

    #[test]
    fn a_site_that_says_nothing_allows_all() {
        for text in [
            "",
            "Disallow: /",
            "<html>not found</html>",
            "User-agent: *\nDisallow:",
        ] {
            assert!(Robots::read(text).allows("/any"), "{text}");
            assert_eq!(Robots::read(text).crawl_delay(), None);
        }
    }

    #[test]
    fn delays_that_are_no_time_are_none() {
        for delay in ["-1", "soon", "NaN", "inf", "1e300", ""] {
            let robots = Robots::read(&format!("User-agent: *\nCrawl-delay: {delay}"));
            assert_eq!(robots.crawl_delay(), None, "{delay}");
        }
    }

    #[test]
    fn patterns_match_as_the_standard_says() {
        for (pattern, path, expected) in [
            ("/fish", "/fish", true),
            ("/fish", "/fishheads/yummy.html", true),
            ("/fish", "/Fish", false),
            ("/fish*", "/fish.html?id=1", true),
            ("/fish/", "/fish", false),
            ("/*.php", "/folder/any.php?x", true),
            ("/*.php", "/windows.PHP", false),
            ("/*.php$", "/a.php", true),
            ("/*.php$", "/a.php.php", true),
            ("/*.php$", "/a.php?x", false),
            ("/a$", "/a", true),
            ("/a$", "/ab", false),
            ("/a*b*c", "/a1b2c3", true),
            ("/a*b*c", "/a1c2b3", false),
            ("/ü", "/%C3%BC/x", true),
        ] {
            assert_eq!(matches(&encoded(pattern), path), expected, "{pattern} {path}");
        }
    }

    #[test]
    fn of_rules_of_the_same_length_the_one_that_allows_wins() {
        let robots = Robots::read("User-agent: *\nAllow: /page\nDisallow: /page\nDisallow: /*.html");
        assert!(robots.allows("/page"));
        assert!(!robots.allows("/page.html"));
    }

    proptest! {
        #[test]
        fn arbitrary_files_and_paths_never_panic(text in "([uU]ser-agent: ?[*a-z]{0,3}\n|Disallow: ?[/*$aü]{0,6}\n|.{0,20}\n){0,8}", path in "/[a/%üß]{0,10}") {
            let _ = Robots::read(&text).allows(&path);
        }
    }
}
