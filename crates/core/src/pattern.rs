//! Patterns of names, in which `*` matches any text.

/// Whether a name matches a pattern. `*` matches any text, including none; everything else matches itself.
#[must_use]
pub fn matches(pattern: &str, name: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let Some(mut name) = name.strip_prefix(head) else {
        return false;
    };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let tail = parts.pop().unwrap_or_default();
    // The leftmost match of each part leaves the longest rest for the parts after it.
    for part in parts {
        let Some(at) = name.find(part) else {
            return false;
        };
        name = &name[at + part.len()..];
    }
    name.ends_with(tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_matches_any_text() {
        for (pattern, name, expected) in [
            ("*-dlq", "crawl-dlq", true),
            ("*-dlq", "-dlq", true),
            ("*-dlq", "crawl-dlq-2", false),
            ("scheduler.jobs.dlq", "scheduler.jobs.dlq", true),
            ("scheduler.jobs.dlq", "schedulerxjobsxdlq", false),
            ("dlq.*", "dlq.orders", true),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c-b", false),
            ("a*a", "a", false),
            ("*", "anything", true),
            ("", "anything", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }
}
