//! What the commands `topics render` and `acls render` have in common: they print what an administrator of Kafka applies.

use clap::ValueEnum;
use sha2::{Digest as _, Sha256};

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    Strimzi,
    Script,
}

/// The name of a Kubernetes object.
pub(crate) fn object_name(text: &str) -> Result<String, String> {
    if text.len() <= 63 && object_name_of(text) == text {
        Ok(text.to_owned())
    } else {
        Err("write the name of a Kubernetes object: up to 63 of a-z 0-9 -".to_owned())
    }
}

/// A name for the object of a topic. Names of objects allow fewer characters than names of topics; a hash keeps them unique.
pub(crate) fn object_name_of(topic: &str) -> String {
    let is_allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    let replaced: String = topic
        .to_ascii_lowercase()
        .chars()
        .map(|c| if is_allowed(c) { c } else { '-' })
        .collect();
    // Each part between dots begins and ends with a letter or a digit.
    let parts: Vec<&str> = replaced
        .split('.')
        .map(|part| part.trim_matches('-'))
        .filter(|part| !part.is_empty())
        .collect();
    let name = parts.join(".");
    if name == topic {
        return name;
    }
    let hash = Sha256::digest(topic);
    let separator = if name.is_empty() { "topic-" } else { "-" };
    format!(
        "{name}{separator}{:02x}{:02x}{:02x}{:02x}",
        hash[0], hash[1], hash[2], hash[3]
    )
}

/// A YAML string. A plain `1` or `on` would not be one. JSON strings are YAML strings.
pub(crate) fn quoted(text: &str) -> String {
    serde_json::json!(text).to_string()
}

/// A word of a shell.
pub(crate) fn shell_word(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_names_stay_one_word() {
        for (name, word, string) in [
            ("jobs.group-1", "jobs.group-1", r#""jobs.group-1""#),
            ("$(id) x", "'$(id) x'", r#""$(id) x""#),
            ("it's", r"'it'\''s'", r#""it's""#),
            (r#"a"b\"#, r#"'a"b\'"#, r#""a\"b\\""#),
        ] {
            assert_eq!((shell_word(name).as_str(), quoted(name).as_str()), (word, string));
        }
    }

    #[test]
    fn invalid_object_names_get_a_hash() {
        for name in ["crawl-jobs-retry-5s", "a.b-c.1"] {
            assert_eq!(object_name_of(name), name);
        }
        assert_eq!(object_name_of("Crawl_Jobs"), "crawl-jobs-e52dd44b");
        for topic in [
            "Crawl_Jobs",
            "crawl_jobs",
            "crawl-Jobs",
            "_",
            "...",
            "-a.-b-",
            "redeliver_",
        ] {
            let name = object_name_of(topic);
            let is_valid = name
                .split('.')
                .all(|part| !part.is_empty() && !part.starts_with('-') && !part.ends_with('-'));
            assert!(is_valid && !name.contains('_'), "{topic}: {name}");
            assert_ne!(name, topic);
        }
        assert_ne!(object_name_of("Crawl_Jobs"), object_name_of("crawl_jobs"));
    }
}
