//! Client certificates, by their names. The listener has verified the chain.

use std::fmt::Write as _;
use std::sync::Arc;

use redeliver_core::pattern;
use redeliver_runtime::config::{ClientCertificateConfig, Scope, caller_name};
use rustls::pki_types::CertificateDer;
use x509_parser::prelude::{FromDer as _, GeneralName, X509Certificate};

use super::refusal::{Reason, Refusal, shown};
use super::{CallerName, Identity};

/// The maximum number of names of a certificate that are compared.
const MAX_NAMES: usize = 100;

/// `auth.client_certificates`.
#[derive(Debug)]
pub(super) struct Certificates(Vec<Entry>);

#[derive(Debug)]
struct Entry {
    kind: Kind,
    pattern: String,
    scopes: Arc<[Scope]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    CommonName,
    Dns,
    Uri,
}

impl Kind {
    fn as_str(self) -> &'static str {
        match self {
            Self::CommonName => "CN",
            Self::Dns => "DNS",
            Self::Uri => "URI",
        }
    }
}

impl Certificates {
    pub(super) fn new(entries: &[ClientCertificateConfig]) -> Self {
        let entry = |entry: &ClientCertificateConfig| {
            let ClientCertificateConfig { cn, dns, uri, scopes } = entry;
            // The configuration sets exactly one.
            let patterns = [(Kind::CommonName, cn), (Kind::Dns, dns), (Kind::Uri, uri)];
            let (kind, pattern) = patterns
                .into_iter()
                .find_map(|(kind, pattern)| Some((kind, pattern.clone()?)))?;
            Some(Entry {
                kind,
                pattern,
                scopes: scopes.as_slice().into(),
            })
        };
        Self(entries.iter().filter_map(entry).collect())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The client with this certificate. The first entry that matches one of its names applies.
    pub(super) fn identify(&self, leaf: &CertificateDer<'_>) -> Result<Identity, Refusal> {
        let names = names(leaf);
        for entry in &self.0 {
            let matching = names
                .iter()
                .filter(|(kind, name)| *kind == entry.kind && pattern::matches(&entry.pattern, name));
            if let Some(name) = usable(matching) {
                return Ok(Identity::new(caller(Some(name))?, entry.scopes.clone()));
            }
        }
        let mut message =
            "the client certificate matches no entry of auth.client_certificates; its names are".to_owned();
        for (kind, name) in names.iter().take(5) {
            // Writing to a String cannot fail.
            let _ = write!(message, " {}={}", kind.as_str(), shown(name));
        }
        if names.is_empty() {
            message.push_str(" none");
        }
        Err(Refusal::of(Reason::CertificateUnknown, message))
    }
}

/// The name of a client of which only the certificate is known.
pub(super) fn name(leaf: &CertificateDer<'_>) -> Result<CallerName, Refusal> {
    caller(usable(names(leaf).iter()))
}

/// The first name that can be the name of a caller, or the first one.
fn usable<'n>(mut names: impl Iterator<Item = &'n (Kind, String)> + Clone) -> Option<&'n (Kind, String)> {
    let first = names.clone().next();
    names.find(|(_, name)| caller_name(name).is_ok()).or(first)
}

fn caller(name: Option<&(Kind, String)>) -> Result<CallerName, Refusal> {
    let name = name.map(|(kind, name)| (kind.as_str(), name.as_str()));
    CallerName::certificate(name).map_err(|problem| {
        let (kind, name) = name.unwrap_or_default();
        let message = format!(
            "the client certificate has an unusable name {kind}={}: it {problem}",
            shown(name)
        );
        Refusal::of(Reason::CertificateUnknown, message)
    })
}

/// The common name, DNS names and URIs of a certificate.
fn names(leaf: &CertificateDer<'_>) -> Vec<(Kind, String)> {
    let Ok((_, certificate)) = X509Certificate::from_der(leaf) else {
        return Vec::new();
    };
    let mut names = Vec::new();
    let mut common = certificate.subject().iter_common_name();
    // With several common names, it is unclear which one the issuer has verified.
    if let (Some(name), None) = (common.next(), common.next())
        && let Ok(name) = name.as_str()
    {
        names.push((Kind::CommonName, name.to_owned()));
    }
    if let Ok(Some(alternatives)) = certificate.subject_alternative_name() {
        for name in alternatives.value.general_names.iter().take(MAX_NAMES) {
            match name {
                GeneralName::DNSName(name) => names.push((Kind::Dns, (*name).to_owned())),
                GeneralName::URI(uri) => names.push((Kind::Uri, (*uri).to_owned())),
                _ => {}
            }
        }
    }
    names
}
