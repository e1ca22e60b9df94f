//! `connections`: the connections to an endpoint, how long they are used, and the proxy on the way.

use redeliver_core::HumanDuration;
use serde::{Deserialize, Serialize};

use super::error::Findings;
use super::http_request::{ProxyChoice, proxy_choice};
use super::secret::Url;

/// `pipelines.<name>.http.connections`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ConnectionsConfig {
    /// The version of HTTP.
    pub version: HttpVersion,
    /// For how long a connection that is not used stays open. It should be shorter than the endpoint's own limit, because a
    /// request on a connection that the endpoint closes at this moment fails.
    pub idle_timeout: HumanDuration,
    /// For how long a connection is used, so that new processes of the endpoint get their share of the calls.
    pub max_age: HumanDuration,
    /// The URL of a proxy, or `none`. `None`: as the environment says.
    pub proxy: Option<Url>,
}

/// A version of HTTP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HttpVersion {
    /// HTTP/2 if the endpoint offers it when a TLS connection is established, otherwise HTTP/1.1.
    Auto,
    /// HTTP/1.1. The default, because each call in progress has a connection of its own: they are not limited by the number of
    /// streams that the endpoint permits, and a load balancer can distribute them.
    #[default]
    Http1,
    /// HTTP/2, without TLS too.
    Http2,
}

impl Default for ConnectionsConfig {
    fn default() -> Self {
        Self {
            version: HttpVersion::default(),
            // Node.js and Uvicorn close idle connections after 5 s.
            idle_timeout: HumanDuration::from_secs(4),
            max_age: HumanDuration::from_secs(300),
            proxy: None,
        }
    }
}

impl ConnectionsConfig {
    /// Which proxy is used. Loading has rejected invalid ones.
    #[must_use]
    pub fn proxy(&self) -> ProxyChoice {
        let choice = self.proxy.as_ref().map(|proxy| proxy_choice(proxy.expose()));
        choice.and_then(Result::ok).unwrap_or(ProxyChoice::Environment)
    }

    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        let (milli, day) = (HumanDuration::from_millis(1), HumanDuration::from_secs(86_400));
        findings.range("idle_timeout", self.idle_timeout, milli..=day);
        findings.seconds("max_age", self.max_age, 1..=86_400);
        if let Some(Err(problem)) = self.proxy.as_ref().map(|proxy| proxy_choice(proxy.expose())) {
            findings.report("proxy", problem);
        }
    }
}
