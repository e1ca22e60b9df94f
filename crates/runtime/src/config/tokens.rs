//! The file with the hashes of tokens.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::str::FromStr;

use redeliver_core::serde_as_text;
use serde::{Deserialize, Serialize};

use super::scope::{Scope, check_scopes};
use super::{deserialize, yaml};

/// The maximum size of a tokens file, in bytes.
const MAX_BYTES: usize = 1 << 20;
/// The maximum number of tokens. All of them are compared with the token of each request.
const MAX_TOKENS: usize = 1_000;
/// The maximum size of the name of a caller, in bytes.
pub const MAX_CALLER_NAME: usize = 512;

/// A tokens file: YAML or JSON.
///
/// ```yaml
/// tokens:
///   - name: billing
///     sha256: 1b81868015cb8a7bd5aa5b997d3f3c7d231b7f50c0e84316a8143687361f5f1a
///     scopes: [jobs:read, "jobs:write:billing-*"]
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokensFile {
    /// The tokens. Empty: no caller has access.
    pub tokens: Vec<TokenConfig>,
}

/// A token by its hash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenConfig {
    /// The name of its holder, for messages and logs.
    pub name: String,
    /// The SHA-256 of the token.
    pub sha256: Sha256,
    /// What its holder may do.
    pub scopes: Vec<Scope>,
}

/// A SHA-256, written as 64 hexadecimal digits.
///
/// A slow hash, as for passwords, would protect nothing: a token with 256 random bits cannot be guessed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Sha256(pub [u8; 32]);

serde_as_text!(Sha256);

impl TokensFile {
    /// Reads a file.
    ///
    /// # Errors
    /// What is wrong, with the path.
    pub fn read(path: &Path) -> Result<Self, String> {
        let bytes =
            std::fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        Self::parse(&bytes, path)
    }

    /// Parses the contents of a file. `path` is for messages.
    ///
    /// # Errors
    /// What is wrong, with the path and the field.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, String> {
        let path = path.display();
        if bytes.len() > MAX_BYTES {
            return Err(format!("{path} is larger than {MAX_BYTES} bytes"));
        }
        let text = std::str::from_utf8(bytes).map_err(|_| format!("{path} is not UTF-8"))?;
        let tree = yaml::parse(text, &path.to_string()).map_err(|error| error.to_string())?;
        let file: Self = deserialize::from_tree(tree).map_err(|problems| {
            let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
            format!("{path} is not valid: {}", problems.join("; "))
        })?;
        file.check()
            .map_err(|problem| format!("{path} is not valid: {problem}"))?;
        Ok(file)
    }

    fn check(&self) -> Result<(), String> {
        if self.tokens.len() > MAX_TOKENS {
            let count = self.tokens.len();
            return Err(format!("tokens has {count} entries; the maximum is {MAX_TOKENS}"));
        }
        let (mut names, mut hashes) = (BTreeSet::new(), BTreeSet::new());
        for (index, token) in self.tokens.iter().enumerate() {
            let field = |field: &str, problem: &str| Err(format!("tokens[{index}].{field} {problem}"));
            caller_name(&token.name).or_else(|problem| field("name", &problem))?;
            check_scopes(&token.scopes).or_else(|problem| field("scopes:", &problem))?;
            if !names.insert(&token.name) {
                return field("name", "is used by an earlier entry; choose another name");
            }
            if !hashes.insert(token.sha256) {
                return field(
                    "sha256",
                    "is that of an earlier entry; each token can have one entry",
                );
            }
        }
        Ok(())
    }
}

/// Checks the name of a caller: of the holder of a token, in a JWT, or in a client certificate. It appears in answers, logs and the
/// audit log, so it must neither hide nor imitate another one.
///
/// # Errors
/// What is valid.
pub fn caller_name(name: &str) -> Result<(), String> {
    if name.is_empty() || name.len() > MAX_CALLER_NAME || name.contains(is_unreadable) || name.trim() != name
    {
        return Err(format!(
            "must have 1 to {MAX_CALLER_NAME} bytes, no control or invisible characters, and no space at its ends"
        ));
    }
    Ok(())
}

/// Whether a character is invisible, or changes how others are shown, such as those for the direction of
/// text.
fn is_unreadable(c: char) -> bool {
    let is_format = matches!(
        c,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}'
            | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{2800}' | '\u{3164}'
            | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff9}'..='\u{fffb}' | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}'
    );
    c.is_control() || is_format || (c.is_whitespace() && c != ' ')
}

impl FromStr for Sha256 {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        // The text is not repeated: it may be a token by mistake.
        const INVALID: &str = "is not the SHA-256 of a token: write 64 hexadecimal digits, as `redeliver tokens new` prints them";
        let digits = text.as_bytes();
        let mut hash = [0; 32];
        if digits.len() != 2 * hash.len() {
            return Err(INVALID);
        }
        let (pairs, _) = digits.as_chunks::<2>();
        for (byte, [high, low]) in hash.iter_mut().zip(pairs) {
            let digit = |digit: u8| {
                char::from(digit)
                    .to_digit(16)
                    .and_then(|digit| u8::try_from(digit).ok())
            };
            let (Some(high), Some(low)) = (digit(*high), digit(*low)) else {
                return Err(INVALID);
            };
            *byte = high << 4 | low;
        }
        Ok(Self(hash))
    }
}

impl fmt::Display for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae";

    fn parse(text: &str) -> Result<TokensFile, String> {
        TokensFile::parse(text.as_bytes(), Path::new("tokens.yaml"))
    }

    #[test]
    fn tokens_file_is_yaml_or_json() {
        let yaml = format!("tokens:\n  - {{ name: a, sha256: {HASH}, scopes: [jobs:read] }}\n");
        let json = format!(r#"{{"tokens": [{{"name": "a", "sha256": "{HASH}", "scopes": ["jobs:read"]}}]}}"#);
        let file = parse(&yaml).unwrap();
        assert_eq!(file, parse(&json).unwrap());
        assert_eq!(file.tokens[0].sha256.to_string(), HASH);
        assert!(parse("tokens: []").unwrap().tokens.is_empty());
    }

    #[test]
    fn invalid_tokens_file_names_the_field() {
        let entry = |name: &str, hash: &str, scopes: &str| {
            format!("  - {{ name: {name}, sha256: {hash}, scopes: [{scopes}] }}\n")
        };
        let other = HASH.replace('2', "3");
        for (text, says) in [
            (String::new(), "tokens: is missing"),
            ("tokens: [".to_owned(), "tokens.yaml"),
            (
                format!("tokens:\n{}", entry("a", "s3cret", "jobs:read")),
                "tokens[0].sha256",
            ),
            (
                format!("tokens:\n{}", entry("a", HASH, "jobs:rite")),
                "tokens[0].scopes[0]",
            ),
            (
                format!("tokens:\n{}", entry("a", HASH, "")),
                "tokens[0].scopes: scopes is empty",
            ),
            (
                format!("tokens:\n{}", entry("''", HASH, "jobs:read")),
                "tokens[0].name must have",
            ),
            (
                format!(
                    "tokens:\n{}{}",
                    entry("a", HASH, "jobs:read"),
                    entry("a", &other, "jobs:read")
                ),
                "tokens[1].name is used",
            ),
            (
                format!(
                    "tokens:\n{}{}",
                    entry("a", HASH, "jobs:read"),
                    entry("b", HASH, "jobs:read")
                ),
                "tokens[1].sha256 is that of an earlier entry",
            ),
            ("token: []".to_owned(), "did you mean `tokens`?"),
        ] {
            let error = parse(&text).unwrap_err();
            assert!(
                error.contains(says) && error.contains("tokens.yaml"),
                "{text}: {error}"
            );
            assert!(!error.contains("s3cret"), "{error}");
        }
    }
}
