//! The handler: fetches a job's page and schedules the pages that it links to.

use std::convert::Infallible;
use std::sync::Arc;

use redeliver_core::headers::ERROR_CODE;
use redeliver_core::json::{Scalar, scalar_at};
use redeliver_core::outcome::Produced;
use redeliver_core::{Failure, Outcome};
use redeliver_worker::{Attempt, Handler};
use reqwest::{Client, Url};
use serde_json::json;
use tokio::time::{Instant, sleep};
use tower::service_fn;

use crate::robots::Robots;
use crate::sites::{MAX_LOCAL_WAIT, Sites};
use crate::worker::Crawl;
use crate::{fetch, page};

pub(crate) const TURN: &str = "crawl.turn";

pub(crate) struct Crawler {
    pub(crate) crawl: Crawl,
    pub(crate) client: Client,
    /// Names of hosts, without ports.
    pub(crate) within: Vec<String>,
    pub(crate) sites: Sites,
}

impl Crawler {
    pub(crate) fn handler(self) -> impl Handler {
        let crawler = Arc::new(self);
        service_fn(move |attempt: Attempt| {
            let crawler = crawler.clone();
            async move {
                let result = crawler.crawl(&attempt).await;
                Ok::<_, Infallible>(result.unwrap_or_else(Outcome::Failed))
            }
        })
    }

    async fn crawl(&self, attempt: &Attempt) -> Result<Outcome, Failure> {
        let url = self.url_of(attempt)?;
        let site = self.sites.get(&origin(&url));
        // `Retry-After` is for the whole site, not only for this page.
        let rest = |failure: &Failure| site.rest_for(failure.retry_after.unwrap_or_default());
        if let Some(rules) = site.rules() {
            // A page that is disallowed needs no turn.
            check(&rules, &url)?;
        }
        let has_slot = attempt.record.headers.last(ERROR_CODE) == Some(TURN.as_bytes());
        let busy = |slot: Instant| {
            let wait = slot.saturating_duration_since(Instant::now());
            Failure::throttled(wait, TURN, "the site is busy")
        };
        let turn = site.turn(has_slot).await.map_err(busy)?;
        // Another job may have fetched the rules while this one waited.
        if let Some(rules) = site.rules() {
            check(&rules, &url)?;
        } else {
            let mut robots = url.clone();
            robots.set_path("/robots.txt");
            robots.set_query(None);
            let rules = fetch::robots(&self.client, &robots).await.inspect_err(rest)?;
            let rules = Arc::new(rules);
            let delay = site.set_rules(rules.clone());
            check(&rules, &url)?;
            if delay > MAX_LOCAL_WAIT {
                drop(turn);
                return Err(busy(site.reserve()));
            }
            // The same turn continues with the page, after the delay.
            sleep(delay).await;
        }
        let page = fetch::page(&self.client, &url).await.inspect_err(rest)?;
        drop(turn);
        let mut links = page::links(&page.html, &url, &self.within);
        // The target of a redirect is a page with its own job.
        let target = page.location.and_then(page::crawlable);
        links.extend(target.filter(|target| page::is_within(target, &self.within)));
        let result = json!({
            "url": url.as_str(),
            "status": page.status,
            "links": links.iter().map(Url::as_str).collect::<Vec<_>>(),
        });
        let result = Produced {
            key: Some(Some(String::from(url).into())),
            ..Produced::value(Some(result.to_string().into()))
        };
        let jobs = links.iter().map(|link| {
            let request = self.crawl.request(link);
            Produced {
                topic: Some(request.topic),
                key: Some(request.key),
                value: Some(request.value),
                headers: request.headers,
            }
        });
        // One transaction writes the result, the requests for the links, and the offset of this job. So a crash
        // neither loses a link nor writes the result twice.
        let results = std::iter::once(result).chain(jobs);
        Ok(Outcome::Success(results.collect()))
    }

    fn url_of(&self, attempt: &Attempt) -> Result<Url, Failure> {
        let value = attempt.record.value.as_deref().unwrap_or_default();
        let url = field(value, "/url").and_then(|url| page::parse(&url).ok());
        let url = url.filter(|url| page::is_within(url, &self.within));
        url.ok_or_else(|| Failure::permanent("crawl.job", "`url` is not a URL that may be crawled"))
    }
}

/// A string or number of a JSON document.
pub(crate) fn field(document: &[u8], pointer: &str) -> Option<String> {
    let text = scalar_at(document, pointer).ok()?.map(Scalar::into_text)?;
    String::from_utf8(text.into_owned()).ok()
}

fn check(robots: &Robots, page: &Url) -> Result<(), Failure> {
    let query = page.query().map(|query| format!("?{query}")).unwrap_or_default();
    if robots.allows(&format!("{}{query}", page.path())) {
        return Ok(());
    }
    let message = format!("{page} is disallowed by robots.txt");
    Err(Failure::permanent("robots.disallowed", message))
}

pub(crate) fn origin(page: &Url) -> String {
    page.origin().ascii_serialization()
}
