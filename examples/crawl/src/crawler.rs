//! The handler: from a job to what its page says, and to the jobs of the pages it links to.
//!
//! | code | class | meaning |
//! |---|---|---|
//! | `crawl.turn` | throttled | the host is not free soon; burns no attempt |
//! | `crawl.job` | permanent | the job names no page |
//! | `crawl.out-of-bounds` | permanent | the page is outside of what may be crawled |
//! | `robots.disallowed` | permanent | the host does not want the page to be crawled |
//! | `robots.<status>`, `robots.timeout`, ... | as the answer | what the host wants is not known, so nothing of it is crawled |

use std::convert::Infallible;
use std::sync::Arc;

use redeliver_core::headers::ERROR_CODE;
use redeliver_core::{Clock, ErrorClass, Failure, Outcome};
use redeliver_worker::{Attempt, Handler};
use reqwest::Url;
use tower::service_fn;

use crate::fetch::{Answer, Fetcher, Limits};
use crate::hosts::{self, Host, Hosts, Turn, TurnedAway};
use crate::job::{CrawlJob, CrawlResult, Scheduling, host_name, produced};
use crate::page;
use crate::robots::Robots;

/// The code of a job that waits for its turn.
pub const TURN: &str = "crawl.turn";

/// How to crawl.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Politeness.
    pub hosts: hosts::Settings,
    /// The limits of one request.
    pub limits: Limits,
    /// How found pages are scheduled.
    pub scheduling: Scheduling,
    /// The names of hosts that may be crawled, without port: a crawler that follows every link ends nowhere.
    pub within: Vec<String>,
}

/// What all attempts share.
pub struct Crawler {
    hosts: Hosts,
    fetcher: Fetcher,
    scheduling: Scheduling,
    within: Vec<String>,
    clock: Arc<dyn Clock>,
}

impl Crawler {
    /// A crawler that has asked nobody yet.
    ///
    /// # Errors
    /// When the HTTP client cannot be set up.
    pub fn new(settings: Settings, clock: Arc<dyn Clock>) -> anyhow::Result<Self> {
        Ok(Self {
            hosts: Hosts::new(clock.clone(), settings.hosts),
            fetcher: Fetcher::new(settings.limits)?,
            scheduling: settings.scheduling,
            within: settings.within,
            clock,
        })
    }

    /// The crawler as a worker's handler.
    pub fn handler(self) -> impl Handler {
        let crawler = Arc::new(self);
        service_fn(move |attempt: Attempt| {
            let crawler = crawler.clone();
            async move { Ok::<_, Infallible>(crawler.crawl(&attempt).await) }
        })
    }

    async fn crawl(&self, attempt: &Attempt) -> Outcome {
        match self.visit(attempt).await {
            Ok(result) => {
                let links = result.links.iter().filter_map(|link| Url::parse(link).ok());
                let found = links.filter(|link| self.may_crawl(link));
                // The result and the jobs it leads to are one transaction with the offset of this job: no link
                // is lost, and none is scheduled for a page that is then crawled again.
                let jobs = found.map(|link| self.scheduling.request(&link));
                Outcome::Success(std::iter::once(produced(&result)).chain(jobs).collect())
            }
            Err(failure) => Outcome::Failed(failure),
        }
    }

    async fn visit(&self, attempt: &Attempt) -> Result<CrawlResult, Failure> {
        let page = self.page_of(attempt)?;
        let name = host_name(&page);
        let host = self.hosts.host(&name);
        let has_promise = attempt.record.headers.last(ERROR_CODE) == Some(TURN.as_bytes());
        let turn = || async {
            let turn = host.turn(has_promise).await;
            turn.map_err(|TurnedAway { until }| {
                let wait = self.clock.until(until);
                Failure::throttled(wait, TURN, format!("{name} is not free before {until}"))
            })
        };
        let mut mine = None;
        let robots = match host.robots() {
            Some(robots) => robots,
            None => {
                let first = turn().await?;
                match host.robots() {
                    // Whoever stood before us has asked.
                    Some(robots) => {
                        mine = Some(first);
                        robots
                    }
                    None => self.ask_for_robots(&host, first, &page).await?,
                }
            }
        };
        let path = match page.query() {
            Some(query) => format!("{}?{query}", page.path()),
            None => page.path().to_owned(),
        };
        if !robots.allows(&path) {
            let message = format!("the robots.txt of {name} does not allow {path}");
            return Err(Failure::permanent("robots.disallowed", message));
        }
        let mine = match mine {
            Some(mine) => mine,
            None => turn().await?,
        };
        let answer = self.ask(mine, &page).await?;
        Ok(result(&page, answer))
    }

    fn page_of(&self, attempt: &Attempt) -> Result<Url, Failure> {
        let value = attempt.record.value.as_deref().unwrap_or_default();
        let job: CrawlJob = serde_json::from_slice(value)
            .map_err(|error| Failure::permanent("crawl.job", format!("not a crawl job: {error}")))?;
        let page = Url::parse(&job.url).ok().and_then(page::crawlable);
        let page = page.ok_or_else(|| Failure::permanent("crawl.job", "the url is no web address"))?;
        if self.may_crawl(&page) {
            Ok(page)
        } else {
            let message = format!("{} is not to be crawled", host_name(&page));
            Err(Failure::permanent("crawl.out-of-bounds", message))
        }
    }

    fn may_crawl(&self, page: &Url) -> bool {
        page.host_str()
            .is_some_and(|host| self.within.iter().any(|name| name == host))
    }

    /// One request, in the turn that is used up by it.
    async fn ask(&self, mut turn: Turn, page: &Url) -> Result<Answer, Failure> {
        turn.ask();
        let answer = self.fetcher.get(page).await;
        if let Err(Failure {
            retry_after: Some(wait),
            ..
        }) = &answer
        {
            // It is the host that cannot keep up and not only this page, so all its jobs wait.
            turn.rest_for(*wait);
        }
        answer
    }

    /// Asks for the rules of a host (RFC 9309, section 2.3.1).
    async fn ask_for_robots(&self, host: &Host, turn: Turn, page: &Url) -> Result<Arc<Robots>, Failure> {
        let address = page
            .join("/robots.txt")
            .map_err(|error| Failure::permanent("crawl.job", format!("{page}: {error}")))?;
        let answer = self.ask(turn, &address).await;
        let robots = match answer {
            Ok(Answer {
                status: 300..=399, ..
            }) => {
                let message = format!("{address} leads elsewhere, which is not followed");
                return Err(Failure::permanent("robots.redirect", message));
            }
            Ok(Answer { text, .. }) => Robots::read(&text.unwrap_or_default()),
            // There is none, so all is allowed.
            Err(failure) if failure.class == ErrorClass::Permanent && failure.code.starts_with("http.4") => {
                Robots::default()
            }
            // What is not known must be taken for a no, for the moment.
            Err(failure) => {
                host.rest_without_robots();
                let code = failure.code.replacen("http.", "robots.", 1);
                return Err(Failure { code, ..failure });
            }
        };
        Ok(host.learn(robots))
    }
}

fn result(page: &Url, answer: Answer) -> CrawlResult {
    let read = answer
        .text
        .map(|text| page::read(&text, page))
        .unwrap_or_default();
    // Where a redirect leads to is a page of its own, with a job and a turn of its own.
    let links = read
        .links
        .into_iter()
        .chain(answer.location.and_then(page::crawlable));
    CrawlResult {
        url: page.to_string(),
        status: answer.status,
        title: read.title,
        links: links.map(String::from).collect(),
    }
}
