//! A site to crawl: hosts on loopback, with pages that fail in known ways. Each host measures its crawler's delay.

use std::collections::{BTreeMap, HashSet};
use std::future::{IntoFuture as _, pending};
use std::io;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::http::header::{CONTENT_TYPE, LOCATION, RETRY_AFTER};
use axum::http::{StatusCode, Uri};
use axum::response::{Html, IntoResponse, Response};
use futures::future::try_join_all;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::hosts::DEFAULT_DELAY;

/// The hosts: their `Crawl-delay` in milliseconds (`None`: no `/robots.txt`), and a letter for each page.
///
/// | letter | page |
/// |---|---|
/// | `.` | 200 |
/// | `u`, `U` | 503 to the first request; to every request |
/// | `t` | 429 with `Retry-After` to the first request |
/// | `h` | no response to the first request |
/// | `g` | 410 |
/// | `m` | a redirect to page 0 |
/// | `p` | disallowed by `/robots.txt`, which itself answers 503 to the first request |
const HOSTS: [(Option<u64>, &str); 4] = [
    (Some(250), "..u.g.h..."),
    (Some(500), ".t.m.u.."),
    (None, "..U..."),
    (Some(1_500), "..p."),
];

/// The site, while it is served. A crawl starts at `/0` of the first host.
pub(crate) struct Site(pub(crate) Vec<Arc<Host>>);

pub(crate) struct Host {
    pub(crate) origin: String,
    pub(crate) delay: Duration,
    has_robots: bool,
    pages: &'static [u8],
    /// The origin of the next host, to which every page links.
    next: String,
    visits: Mutex<Visits>,
}

#[derive(Default)]
struct Visits {
    arrivals: Vec<Instant>,
    paths: HashSet<String>,
}

impl Site {
    /// Binds all hosts to free ports. The future serves them until the token is cancelled.
    pub(crate) async fn bind(
        shutdown: &CancellationToken,
    ) -> io::Result<(Self, impl Future<Output = io::Result<()>> + Send + use<>)> {
        let (mut listeners, mut origins) = (Vec::new(), Vec::new());
        for _ in HOSTS {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
            origins.push(format!("http://{}", listener.local_addr()?));
            listeners.push(listener);
        }
        let (mut hosts, mut servers) = (Vec::new(), Vec::new());
        for (index, listener) in listeners.into_iter().enumerate() {
            let (delay, pages) = HOSTS[index];
            let host = Arc::new(Host {
                origin: origins[index].clone(),
                delay: delay.map_or(DEFAULT_DELAY, Duration::from_millis),
                has_robots: delay.is_some(),
                pages: pages.as_bytes(),
                next: origins[(index + 1) % HOSTS.len()].clone(),
                visits: Mutex::default(),
            });
            let app = Router::new().fallback(respond).with_state(host.clone());
            let server = axum::serve(listener, app);
            let server = server.with_graceful_shutdown(shutdown.clone().cancelled_owned());
            servers.push(server.into_future());
            hosts.push(host);
        }
        Ok((Self(hosts), async { try_join_all(servers).await.map(drop) }))
    }

    /// How each page must end: once, with the status of its result or with the error code of its dead letter.
    pub(crate) fn expected(&self) -> BTreeMap<String, Vec<String>> {
        let mut expected = BTreeMap::new();
        for host in &self.0 {
            for (page, letter) in host.pages.iter().enumerate() {
                let end = match letter {
                    b'U' => "http.503",
                    b'g' => "http.410",
                    b'm' => "301",
                    b'p' => "robots.disallowed",
                    _ => "200",
                };
                expected.insert(format!("{}/{page}", host.origin), vec![end.to_owned()]);
            }
        }
        expected
    }
}

impl Host {
    /// How many requests there were, and the shortest interval between the arrivals of two.
    pub(crate) fn visits(&self) -> (usize, Duration) {
        let visits = self.lock();
        let intervals = visits.arrivals.windows(2).map(|pair| pair[1] - pair[0]);
        (visits.arrivals.len(), intervals.min().unwrap_or(Duration::MAX))
    }

    /// Counts a request, and returns whether it is the first one for its path.
    fn arrive(&self, path: &str) -> bool {
        let mut visits = self.lock();
        visits.arrivals.push(Instant::now());
        visits.paths.insert(path.to_owned())
    }

    fn lock(&self) -> MutexGuard<'_, Visits> {
        self.visits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn robots(&self) -> String {
        let mut robots = format!("User-agent: *\nCrawl-delay: {}\n", self.delay.as_secs_f64());
        for page in (0..self.pages.len()).filter(|page| self.pages[*page] == b'p') {
            robots += &format!("Disallow: /{page}$\n");
        }
        robots
    }

    /// A page links to the next three of its host, twice each, and to the first page of the next host.
    fn html(&self, page: usize) -> String {
        let mut html = format!(
            "<!doctype html><title>Page {page}</title><a href=\"{}/0\">next host</a>",
            self.next
        );
        for next in (page + 1..self.pages.len()).take(3) {
            html += &format!("\n<a href=\"/{next}\">page {next}</a> <a href=\"{next}#end\">its end</a>");
        }
        html
    }
}

async fn respond(State(host): State<Arc<Host>>, uri: Uri) -> Response {
    let is_first = host.arrive(uri.path());
    if uri.path() == "/robots.txt" && host.has_robots {
        if is_first && host.pages.contains(&b'p') {
            return StatusCode::SERVICE_UNAVAILABLE.into_response();
        }
        return ([(CONTENT_TYPE, "text/plain")], host.robots()).into_response();
    }
    let page = uri.path()[1..].parse().unwrap_or(usize::MAX);
    let Some(letter) = host.pages.get(page) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    match letter {
        b'U' => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        b'u' if is_first => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        b't' if is_first => (StatusCode::TOO_MANY_REQUESTS, [(RETRY_AFTER, "2")]).into_response(),
        b'h' if is_first => pending().await,
        b'g' => StatusCode::GONE.into_response(),
        b'm' => (StatusCode::MOVED_PERMANENTLY, [(LOCATION, "/0")]).into_response(),
        _ => Html(host.html(page)).into_response(),
    }
}
