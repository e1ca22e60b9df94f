//! What a caller is called.

use std::fmt;
use std::sync::Arc;

use redeliver_runtime::config::caller_name;

/// The name of a caller, with what it was proved by: it is recorded, compared and shown as one text, so that
/// no caller is named like one whom another mechanism has identified. The first colon ends the mechanism, and
/// the first `#` the issuer.
///
/// | text | caller |
/// |---|---|
/// | `token:NAME` | the holder of a token of `auth.tokens_file` |
/// | `token_file` | the holder of the token of `token_file` |
/// | `jwt:ISSUER#NAME` | the subject of a token of an issuer |
/// | `certificate:KIND=NAME` | a client with a certificate; the kind is `CN`, `DNS` or `URI` |
/// | `certificate` | a client with a certificate without such a name |
/// | `anonymous` | any client, because callers need no credentials |
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallerName(Arc<str>);

const ANONYMOUS: &str = "anonymous";

impl CallerName {
    /// A caller without credentials.
    #[must_use]
    pub fn anonymous() -> Self {
        Self(ANONYMOUS.into())
    }

    /// A caller whose name was recorded earlier, and was checked then.
    #[must_use]
    pub fn recorded(text: &str) -> Self {
        Self(text.into())
    }

    pub(super) fn token_file() -> Self {
        Self("token_file".into())
    }

    /// The holder of a token of `auth.tokens_file`, whose names the configuration has checked.
    pub(super) fn token(name: &str) -> Self {
        Self(format!("token:{name}").into())
    }

    /// Errors say what a valid name is.
    pub(super) fn jwt(issuer: &str, name: &str) -> Result<Self, String> {
        caller_name(name)?;
        Ok(Self(format!("jwt:{issuer}#{name}").into()))
    }

    /// `None`: the certificate has no name. Errors say what a valid name is.
    pub(super) fn certificate(name: Option<(&str, &str)>) -> Result<Self, String> {
        let Some((kind, name)) = name else {
            return Ok(Self("certificate".into()));
        };
        caller_name(name)?;
        Ok(Self(format!("certificate:{kind}={name}").into()))
    }

    /// Whether the caller is unknown.
    #[must_use]
    pub fn is_anonymous(&self) -> bool {
        &*self.0 == ANONYMOUS
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for CallerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
