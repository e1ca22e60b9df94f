//! Why a request is refused.

use std::fmt::Write as _;

use redeliver_runtime::config::{Area, Scope, Verb};

use super::{CallerName, Identity};
use crate::control::ControlName;

/// The kind of a refusal, for programs and metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The request has no token.
    TokenMissing,
    /// The header is not `Bearer <token>`, or the token is not a JWT.
    TokenMalformed,
    /// The token is unknown, or a check of the JWT failed.
    TokenWrong,
    /// The JWT has expired.
    TokenExpired,
    /// The client presented no certificate.
    CertificateMissing,
    /// The names of the certificate match no entry of the configuration.
    CertificateUnknown,
    /// The keys of the issuer have not been fetched yet, or for too long. The same request may succeed later.
    KeysUnavailable,
    /// The scopes of the caller do not permit the request.
    PermissionDenied,
}

/// A refused request: what the caller is told, and what is written to the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    reason: Reason,
    message: String,
    denied: Option<Denied>,
}

/// What the caller lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Denied {
    pub(super) identity: CallerName,
    pub(super) scope: Scope,
}

impl Reason {
    /// All kinds.
    pub const ALL: [Self; 8] = [
        Self::TokenMissing,
        Self::TokenMalformed,
        Self::TokenWrong,
        Self::TokenExpired,
        Self::CertificateMissing,
        Self::CertificateUnknown,
        Self::KeysUnavailable,
        Self::PermissionDenied,
    ];

    /// The name in metrics and in the `code` of REST errors.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::TokenMissing => "token_missing",
            Self::TokenMalformed => "token_malformed",
            Self::TokenWrong => "token_wrong",
            Self::TokenExpired => "token_expired",
            Self::CertificateMissing => "certificate_missing",
            Self::CertificateUnknown => "certificate_unknown",
            Self::KeysUnavailable => "keys_unavailable",
            Self::PermissionDenied => "permission_denied",
        }
    }
}

impl Refusal {
    pub(super) fn of(reason: Reason, message: impl Into<String>) -> Self {
        Self {
            reason,
            message: message.into(),
            denied: None,
        }
    }

    pub(super) fn denied(identity: &Identity, area: Area, verb: Verb, name: Option<&str>) -> Self {
        let what = match (area, name) {
            (Area::Jobs, Some(app)) => format!("jobs of the application `{}`", shown(app)),
            (Area::Jobs, None) => "jobs of all applications".to_owned(),
            // Scopes name everything but applications with its kind.
            (Area::Control, Some(name)) if name.parse::<ControlName>().is_ok() => {
                format!("the control of `{}`", shown(name))
            }
            (Area::Control, Some(app)) => format!("the control of the application `{}`", shown(app)),
            (Area::Control, None) => "the control of everything".to_owned(),
            (Area::DeadLetters, Some(topic)) => format!("dead letters of the topic `{}`", shown(topic)),
            (Area::DeadLetters, None) => "dead letters of all topics".to_owned(),
            (Area::Audit, _) => "the audit log".to_owned(),
        };
        let (does, what) = match verb {
            Verb::Payload => ("see", format!("keys, values and headers of {what}")),
            Verb::Operate => ("decide about", what),
            Verb::Unmasked => ("see", format!("what is masked in {what}")),
            Verb::Read | Verb::Write | Verb::Edit => (verb.as_str(), what),
        };
        let scope = Scope::needed(area, verb, name.map(shown).as_deref());
        Self {
            reason: Reason::PermissionDenied,
            message: format!(
                "`{}` may not {does} {what}; it needs the scope {scope}",
                identity.name(),
            ),
            denied: Some(Denied {
                identity: identity.name.clone(),
                scope,
            }),
        }
    }

    /// The kind.
    #[must_use]
    pub fn reason(&self) -> Reason {
        self.reason
    }

    /// For the caller. Contains no token.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    pub(super) fn lacks(&self) -> Option<&Denied> {
        self.denied.as_ref()
    }

    /// The missing scope, if the caller is known.
    #[must_use]
    pub fn missing_scope(&self) -> Option<String> {
        self.denied.as_ref().map(|denied| denied.scope.to_string())
    }

    /// The value of the header `WWW-Authenticate` (RFC 6750), if a token could help.
    #[must_use]
    pub fn challenge(&self) -> Option<String> {
        let error = match self.reason {
            Reason::TokenMissing => return Some("Bearer".to_owned()),
            Reason::TokenMalformed => "invalid_request",
            Reason::TokenWrong | Reason::TokenExpired => "invalid_token",
            Reason::PermissionDenied => "insufficient_scope",
            Reason::CertificateMissing | Reason::CertificateUnknown | Reason::KeysUnavailable => return None,
        };
        let mut challenge = format!("Bearer error=\"{error}\"");
        // The characters that the RFC allows in a scope.
        let is_allowed = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\\');
        if let Some(scope) = self.missing_scope().filter(|scope| scope.bytes().all(is_allowed)) {
            // Writing to a String cannot fail.
            let _ = write!(challenge, ", scope=\"{scope}\"");
        }
        Some(challenge)
    }
}

/// A name from a request, as it appears in messages and logs: one line of bounded length.
pub(super) fn shown(name: &str) -> String {
    const MAX: usize = 100;
    let escaped = name.chars().take(MAX).flat_map(char::escape_debug);
    let mut shown: String = escaped.collect();
    if name.chars().nth(MAX).is_some() {
        shown.push('…');
    }
    shown
}
