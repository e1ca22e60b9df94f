//! Sites to crawl on loopback, with pages that fail in known ways. Each site checks how polite its crawler is.

use std::collections::BTreeMap;
use std::future::{IntoFuture as _, pending};
use std::io;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::http::header::{LOCATION, RETRY_AFTER};
use axum::http::{StatusCode, Uri};
use axum::response::{Html, IntoResponse, Response};
use futures::future::try_join_all;
use tokio::net::TcpListener;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

use crate::sites::DEFAULT_DELAY;

/// The sites: their `Crawl-delay` in milliseconds (`None`: no `/robots.txt`), and a letter for each page.
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
const SITES: [(Option<u64>, &str); 4] = [
    (Some(250), "..u.g.h..."),
    (Some(500), ".t.m.u.."),
    (None, "..U..."),
    (Some(1_500), "..p."),
];

/// The sites, while they are served. A crawl starts at `/0` of the first.
pub(crate) struct DemoSites(pub(crate) Vec<Arc<DemoSite>>);

pub(crate) struct DemoSite {
    pub(crate) origin: String,
    pub(crate) delay: Duration,
    has_robots: bool,
    pages: &'static [u8],
    /// The origin of the next site, to which every page links.
    next: String,
    /// The arrival and the path of each request. Locked during a request.
    visits: Mutex<Vec<(Instant, String)>>,
}

impl DemoSites {
    /// Binds all sites to free ports. The future serves them until the token is cancelled.
    pub(crate) async fn bind(
        shutdown: &CancellationToken,
    ) -> io::Result<(Self, impl Future<Output = io::Result<()>> + Send + use<>)> {
        let listeners = SITES.map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)));
        let listeners = try_join_all(listeners).await?;
        let origin = |listener: &TcpListener| Ok(format!("http://{}", listener.local_addr()?));
        let origins = listeners.iter().map(origin).collect::<io::Result<Vec<_>>>()?;
        let (mut sites, mut servers) = (Vec::new(), Vec::new());
        for (index, listener) in listeners.into_iter().enumerate() {
            let (delay, pages) = SITES[index];
            let site = Arc::new(DemoSite {
                origin: origins[index].clone(),
                delay: delay.map_or(DEFAULT_DELAY, Duration::from_millis),
                has_robots: delay.is_some(),
                pages: pages.as_bytes(),
                next: origins[(index + 1) % SITES.len()].clone(),
                visits: Mutex::default(),
            });
            let app = Router::new().fallback(respond).with_state(site.clone());
            let server = axum::serve(listener, app);
            let server = server.with_graceful_shutdown(shutdown.clone().cancelled_owned());
            servers.push(server.into_future());
            sites.push(site);
        }
        Ok((Self(sites), async { try_join_all(servers).await.map(drop) }))
    }

    /// How each page must end: once, with the status of its result or with the error code of its dead letter.
    pub(crate) fn expected(&self) -> BTreeMap<String, Vec<String>> {
        let end = |letter| match letter {
            b'U' => "http.503",
            b'g' => "http.410",
            b'm' => "301",
            b'p' => "robots.disallowed",
            _ => "200",
        };
        let pages = |site: &Arc<DemoSite>| {
            let (origin, letters) = (site.origin.clone(), site.pages.iter().enumerate());
            letters.map(move |(page, letter)| (format!("{origin}/{page}"), vec![end(*letter).to_owned()]))
        };
        self.0.iter().flat_map(pages).collect()
    }
}

impl DemoSite {
    /// How many requests there were, and the shortest interval between the arrivals of two.
    pub(crate) fn visits(&self) -> (usize, Duration) {
        let visits = self.visits.blocking_lock();
        let intervals = visits.windows(2).map(|pair| pair[1].0 - pair[0].0);
        (visits.len(), intervals.min().unwrap_or(Duration::MAX))
    }

    /// A page links to the next three of its site, twice each, and to the first page of the next site.
    fn html(&self, page: usize) -> String {
        let mut html = format!("<title>{page}</title><a href=\"{}/0\">next site</a>", self.next);
        for next in (page + 1..self.pages.len()).take(3) {
            html += &format!("\n<a href=\"/{next}\">page {next}</a> <a href=\"{next}#end\">its end</a>");
        }
        html
    }
}

async fn respond(State(site): State<Arc<DemoSite>>, uri: Uri) -> Response {
    // Overlapping requests make the demonstration fail: no page is expected to end with this status.
    let Ok(mut visits) = site.visits.try_lock() else {
        return StatusCode::CONFLICT.into_response();
    };
    let is_first = visits.iter().all(|(_, path)| path != uri.path());
    visits.push((Instant::now(), uri.path().to_owned()));
    if uri.path() == "/robots.txt" && site.has_robots {
        let disallowed = site.pages.iter().position(|letter| *letter == b'p');
        if is_first && disallowed.is_some() {
            return StatusCode::SERVICE_UNAVAILABLE.into_response();
        }
        let delay = site.delay.as_secs_f64();
        let rule = disallowed.map_or(String::new(), |page| format!("Disallow: /{page}$"));
        // With the content type of an unknown file, as some servers send it.
        return format!("User-agent: *\nCrawl-delay: {delay}\n{rule}")
            .into_bytes()
            .into_response();
    }
    let page = uri.path()[1..].parse().unwrap_or(usize::MAX);
    let Some(letter) = site.pages.get(page) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    match letter {
        // If zero counted as throttling, which uses up no attempt, this page would never end.
        b'U' => (StatusCode::SERVICE_UNAVAILABLE, [(RETRY_AFTER, "0")]).into_response(),
        b'u' if is_first => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        b't' if is_first => (StatusCode::TOO_MANY_REQUESTS, [(RETRY_AFTER, "2")]).into_response(),
        b'h' if is_first => pending().await,
        b'g' => StatusCode::GONE.into_response(),
        b'm' => (StatusCode::MOVED_PERMANENTLY, [(LOCATION, "/0")]).into_response(),
        _ => Html(site.html(page)).into_response(),
    }
}
