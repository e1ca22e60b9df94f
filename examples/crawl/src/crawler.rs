//! The handler: fetches a job's page and schedules the pages that it links to.
//!
//! | code | class | meaning |
//! |---|---|---|
//! | `http.<status>` | transient, throttled or permanent, as in the enricher | the response's status |
//! | `http.timeout`, `http.connect`, `http.broken` | transient | no complete response |
//! | `http.too-large` | permanent | the page exceeds 1 MiB |
//! | `crawl.turn` | throttled | the host is busy; uses up no attempt |
//! | `crawl.job` | permanent | the job has no usable URL |
//! | `crawl.out-of-bounds` | permanent | the host may not be crawled |
//! | `robots.disallowed` | permanent | `/robots.txt` disallows the page |
//! | `robots.<status>`, `robots.timeout`, ... | as for pages | `/robots.txt` could not be fetched, so nothing of the host is crawled |

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::headers::ERROR_CODE;
use redeliver_core::outcome::Produced;
use redeliver_core::{ErrorClass, Failure, Outcome};
use redeliver_worker::{Attempt, Handler};
use reqwest::{Client, Url};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use tower::service_fn;

use crate::fetch::{self, Fetched};
use crate::hosts::{Host, Hosts};
use crate::page;
use crate::robots::Robots;
use crate::worker::Crawl;

pub(crate) const TURN: &str = "crawl.turn";
/// How long nothing is requested from a host whose `/robots.txt` could not be fetched.
const ROBOTS_RETRY: Duration = Duration::from_secs(5);

pub(crate) struct Crawler {
    pub(crate) crawl: Crawl,
    pub(crate) client: Client,
    /// Hosts without ports. A crawler that follows every link never ends.
    pub(crate) allowed: Vec<String>,
    pub(crate) hosts: Hosts,
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
        let page = self.page_of(attempt)?;
        let host = self.hosts.get(&origin(&page));
        if let Some(robots) = host.robots() {
            // A page that is disallowed needs no turn.
            check(&robots, &page)?;
        }
        let has_slot = attempt.record.headers.last(ERROR_CODE) == Some(TURN.as_bytes());
        let turn = host.turn(has_slot).await.map_err(|slot| {
            let wait = slot.saturating_duration_since(Instant::now());
            Failure::throttled(wait, TURN, "the host is busy")
        })?;
        // Another job may have fetched the rules while this one waited.
        if let Some(robots) = host.robots() {
            check(&robots, &page)?;
        } else {
            let (robots, delay) = host.set_robots(self.fetch_robots(&host, &page).await?);
            check(&robots, &page)?;
            // The same turn continues with the page, after the delay.
            sleep(delay).await;
        }
        let fetched = self.fetch(&host, &page).await?;
        drop(turn);
        let mut links = page::links(&fetched.text, &page);
        // The target of a redirect is a page with its own job.
        links.extend(fetched.location.and_then(page::crawlable));
        links.retain(|link| self.may_crawl(link));
        let result = json!({
            "url": page.as_str(),
            "status": fetched.status,
            "links": links.iter().map(Url::as_str).collect::<Vec<_>>(),
        });
        let result = Produced {
            key: Some(Some(String::from(page).into())),
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

    fn page_of(&self, attempt: &Attempt) -> Result<Url, Failure> {
        let value = attempt.record.value.as_deref().unwrap_or_default();
        let job: Value = serde_json::from_slice(value).unwrap_or_default();
        let page = job["url"].as_str().and_then(|url| Url::parse(url).ok());
        let Some(page) = page.and_then(page::crawlable) else {
            return Err(Failure::permanent(
                "crawl.job",
                "`url` must be an http or https URL",
            ));
        };
        if self.may_crawl(&page) {
            return Ok(page);
        }
        let message = format!("{} may not be crawled", origin(&page));
        Err(Failure::permanent("crawl.out-of-bounds", message))
    }

    fn may_crawl(&self, page: &Url) -> bool {
        let is_allowed = |host| self.allowed.iter().any(|allowed| allowed == host);
        page.host_str().is_some_and(is_allowed)
    }

    async fn fetch(&self, host: &Host, url: &Url) -> Result<Fetched, Failure> {
        let fetched = fetch::get(&self.client, url).await;
        if let Some(wait) = fetched.as_ref().err().and_then(|failure| failure.retry_after) {
            // The whole host is overloaded, not only this page.
            host.rest_until(Instant::now() + wait);
        }
        fetched
    }

    /// RFC 9309, section 2.3.1.
    async fn fetch_robots(&self, host: &Host, page: &Url) -> Result<Robots, Failure> {
        let mut url = page.clone();
        url.set_path("/robots.txt");
        url.set_query(None);
        match self.fetch(host, &url).await {
            Ok(fetched) if (300..400).contains(&fetched.status) => {
                let message = format!("{url} redirects, which is not supported");
                Err(Failure::permanent("robots.redirect", message))
            }
            Ok(fetched) => Ok(Robots::parse(&fetched.text)),
            // A host without the file allows everything.
            Err(failure) if failure.class == ErrorClass::Permanent && failure.code.starts_with("http.4") => {
                Ok(Robots::default())
            }
            // As long as the rules are unknown, nothing is allowed.
            Err(failure) => {
                host.rest_until(Instant::now() + ROBOTS_RETRY);
                let code = failure.code.replacen("http.", "robots.", 1);
                Err(Failure { code, ..failure })
            }
        }
    }
}

fn check(robots: &Robots, page: &Url) -> Result<(), Failure> {
    let query = page.query().map(|query| format!("?{query}")).unwrap_or_default();
    if robots.allows(&format!("{}{query}", page.path())) {
        return Ok(());
    }
    let message = format!("{page} is disallowed by robots.txt");
    Err(Failure::permanent("robots.disallowed", message))
}

/// Scheme, name and port: the scope of a `/robots.txt`.
pub(crate) fn origin(page: &Url) -> String {
    page.origin().ascii_serialization()
}
