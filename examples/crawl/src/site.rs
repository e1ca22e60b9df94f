//! A site to be crawled: several hosts on loopback, each on a port of its own, with pages that link to each other
//! and behave badly in planned ways. It keeps a log of all requests, which is what politeness is measured by.
//!
//! All paths begin with a word that differs from run to run, because the scheduler remembers for a day which
//! addresses it has had.

mod log;
mod plan;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, LOCATION, RETRY_AFTER};
use axum::response::{Html, IntoResponse, Response};
use futures::future::try_join_all;
use reqwest::Url;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

pub use self::log::{HostSummary, Log};
pub use self::plan::{Behaviour, HostPlan, Link, PagePlan, Plan, RobotsPlan};

/// A site whose ports are taken.
pub struct Site {
    listeners: Vec<TcpListener>,
    map: SiteMap,
    log: Arc<Log>,
}

const CLOSING: &str = "closing";

/// Where the pages of a site are.
#[derive(Clone, Debug)]
pub struct SiteMap {
    plan: Arc<Plan>,
    word: String,
    addresses: Vec<SocketAddr>,
}

/// What must become of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// A result with this status.
    Crawled(u16),
    /// A dead letter with this code.
    Dead(&'static str),
}

impl Site {
    /// Takes a port for each host of the plan: free ones, or `first_port` and those that follow.
    ///
    /// # Errors
    /// When a port is taken already.
    pub async fn bind(plan: Plan, first_port: Option<u16>) -> io::Result<Self> {
        let mut listeners = Vec::new();
        for index in 0..plan.hosts.len() {
            let index = u16::try_from(index).unwrap_or(u16::MAX);
            let port = first_port.map_or(0, |first| first.saturating_add(index));
            listeners.push(TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?);
        }
        let addresses = listeners
            .iter()
            .map(TcpListener::local_addr)
            .collect::<io::Result<_>>()?;
        let map = SiteMap {
            plan: Arc::new(plan),
            word: format!("{:08x}", fastrand::u32(..)),
            addresses,
        };
        Ok(Self {
            listeners,
            log: Arc::new(Log::default()),
            map,
        })
    }

    /// Where its pages are.
    #[must_use]
    pub fn map(&self) -> &SiteMap {
        &self.map
    }

    /// What it was asked.
    #[must_use]
    pub fn log(&self) -> Arc<Log> {
        self.log.clone()
    }

    /// Serves all hosts until the token is cancelled.
    ///
    /// # Errors
    /// When a listener fails.
    pub async fn serve(self, shutdown: CancellationToken) -> io::Result<()> {
        let serving = self.listeners.into_iter().enumerate().map(|(host, listener)| {
            let state = Arc::new(Serving {
                host,
                map: self.map.clone(),
                log: self.log.clone(),
                shutdown: shutdown.clone(),
            });
            let app = Router::new().fallback(answer).with_state(state);
            let shutdown = shutdown.clone();
            async move {
                axum::serve(listener, app)
                    .with_graceful_shutdown(shutdown.cancelled_owned())
                    .await
            }
        });
        try_join_all(serving).await.map(drop)
    }
}

impl SiteMap {
    /// Where a crawl begins.
    #[must_use]
    pub fn seeds(&self) -> Vec<Url> {
        vec![self.address(Link { host: 0, page: 0 })]
    }

    /// The hosts' names and what they ask for.
    #[must_use]
    pub fn hosts(&self) -> &[HostPlan] {
        &self.plan.hosts
    }

    /// The word with which all paths of this site begin.
    #[must_use]
    pub fn word(&self) -> &str {
        &self.word
    }

    /// Every page that a crawler finds, and what must become of it.
    #[must_use]
    pub fn reachable(&self) -> BTreeMap<String, Fate> {
        let mut found = BTreeMap::new();
        let mut open = VecDeque::from([Link { host: 0, page: 0 }]);
        while let Some(link) = open.pop_front() {
            let address = String::from(self.address(link));
            if found.contains_key(&address) {
                continue;
            }
            let host = &self.plan.hosts[link.host];
            let page = &host.pages[link.page];
            let fate = match page.behaviour {
                _ if page.is_private => Fate::Dead("robots.disallowed"),
                Behaviour::Fine | Behaviour::Asks { .. } => Fate::Crawled(200),
                Behaviour::Busy(times) | Behaviour::Hangs(times) if times != u32::MAX => Fate::Crawled(200),
                Behaviour::Busy(_) => Fate::Dead("http.503"),
                Behaviour::Hangs(_) => Fate::Dead("http.timeout"),
                Behaviour::Missing => Fate::Dead("http.404"),
                Behaviour::Gone => Fate::Dead("http.410"),
                Behaviour::Moved(_) => Fate::Crawled(301),
            };
            match (&fate, page.behaviour) {
                (Fate::Dead(_), _) => {}
                (Fate::Crawled(_), Behaviour::Moved(to)) => open.push_back(to),
                (Fate::Crawled(_), _) => open.extend(page.links.iter().copied()),
            }
            found.insert(address, fate);
        }
        found
    }

    /// The address of a page.
    #[must_use]
    pub fn address(&self, link: Link) -> Url {
        let address = format!("{}{}", self.host(link.host), self.path(link));
        address.parse().expect("a number and plain words are an address")
    }

    /// A page that nothing links to, on the first host. There are as many as one may want.
    #[must_use]
    pub fn closing_page(&self, number: u64) -> Url {
        let address = format!("{}/{}/{CLOSING}/{number}", self.host(0), self.word);
        address.parse().expect("a number and plain words are an address")
    }

    /// A page as people call it; `None` when it is none of this site.
    #[must_use]
    pub fn name_of(&self, page: &str) -> Option<String> {
        let host = (0..self.addresses.len()).find(|host| page.starts_with(&self.host(*host)))?;
        let (_, path) = page.split_once(&format!("/{}/", self.word))?;
        Some(format!("{} {path}", self.plan.hosts[host].name))
    }

    /// The name of a host as the worker knows it.
    #[must_use]
    pub fn host(&self, host: usize) -> String {
        format!("http://{}", self.addresses[host])
    }

    fn path(&self, Link { host, page }: Link) -> String {
        let folder = if self.plan.hosts[host].pages[page].is_private {
            "private"
        } else {
            "public"
        };
        format!("/{}/{folder}/{page}", self.word)
    }

    fn page_at(&self, host: usize, path: &str) -> Option<Link> {
        let page = path.rsplit('/').next()?.parse().ok()?;
        let link = Link { host, page };
        let exists = page < self.plan.hosts[host].pages.len();
        (exists && self.path(link) == path).then_some(link)
    }

    fn robots(&self, host: usize) -> String {
        let host = &self.plan.hosts[host];
        let mut text = format!("User-agent: *\nDisallow: /{}/private/\n", self.word);
        if let Some(delay) = host.crawl_delay {
            text.push_str(&format!("Crawl-delay: {}\n", delay.as_secs_f64()));
        }
        text
    }

    /// A page as HTML. Half of the links are relative and some stand twice, as on real pages.
    fn html(&self, link: Link) -> String {
        let host = &self.plan.hosts[link.host];
        let mut html = format!(
            "<!doctype html>\n<html><head><title>{}, page {}</title></head>\n<body>\n",
            host.name, link.page
        );
        for to in &host.pages[link.page].links {
            let address = if to.host == link.host {
                self.path(*to)
            } else {
                String::from(self.address(*to))
            };
            html.push_str(&format!(
                "<p><a href=\"{address}\">{}, page {}</a> <a href=\"{address}#end\">its end</a></p>\n",
                self.plan.hosts[to.host].name, to.page
            ));
        }
        html.push_str("</body></html>\n");
        html
    }
}

/// One host that is being served.
struct Serving {
    host: usize,
    map: SiteMap,
    log: Arc<Log>,
    shutdown: CancellationToken,
}

async fn answer(State(serving): State<Arc<Serving>>, request: Request) -> Response {
    let path = request.uri().path();
    // Ends when this future is dropped, so also when the client hangs up.
    let mut entry = serving.log.arrived(serving.host, path);
    let response = serving.response_to(path, entry.earlier()).await;
    entry.answered(response.status().as_u16());
    response
}

impl Serving {
    /// `earlier`: how often the same was asked before.
    async fn response_to(&self, path: &str, earlier: u32) -> Response {
        let host = &self.map.plan.hosts[self.host];
        if path == "/robots.txt" {
            return match host.robots {
                RobotsPlan::Missing => StatusCode::NOT_FOUND.into_response(),
                RobotsPlan::Busy(times) if earlier < times => StatusCode::SERVICE_UNAVAILABLE.into_response(),
                RobotsPlan::Busy(_) => {
                    ([(CONTENT_TYPE, "text/plain")], self.map.robots(self.host)).into_response()
                }
            };
        }
        let Some(link) = self.map.page_at(self.host, path) else {
            return if path.starts_with(&format!("/{}/{CLOSING}/", self.map.word)) {
                Html("<title>the end</title>").into_response()
            } else {
                StatusCode::NOT_FOUND.into_response()
            };
        };
        let busy = StatusCode::SERVICE_UNAVAILABLE;
        match host.pages[link.page].behaviour {
            Behaviour::Busy(times) if earlier < times => busy.into_response(),
            Behaviour::Asks { times, wait } if earlier < times => {
                (busy, [(RETRY_AFTER, wait.as_secs().to_string())]).into_response()
            }
            Behaviour::Hangs(times) if earlier < times => {
                self.shutdown.cancelled().await;
                busy.into_response()
            }
            Behaviour::Missing => StatusCode::NOT_FOUND.into_response(),
            Behaviour::Gone => StatusCode::GONE.into_response(),
            Behaviour::Moved(to) => {
                let location = String::from(self.map.address(to));
                (StatusCode::MOVED_PERMANENTLY, [(LOCATION, location)]).into_response()
            }
            Behaviour::Fine | Behaviour::Busy(_) | Behaviour::Asks { .. } | Behaviour::Hangs(_) => {
                Html(self.map.html(link)).into_response()
            }
        }
    }
}

/// The pause that a crawler must keep at a host.
#[must_use]
pub fn pause_of(host: &HostPlan, default: Duration) -> Duration {
    match host.robots {
        RobotsPlan::Missing => default,
        RobotsPlan::Busy(_) => host.crawl_delay.unwrap_or(default),
    }
}
