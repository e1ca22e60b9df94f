//! What a crawl of the example's site came to: as a table, and as a verdict.

use std::fmt;
use std::time::Duration;

use comfy_table::{Table, presets};

use crate::ledger::Ledger;
use crate::site::{Log, SiteMap, pause_of};

/// What a crawl came to.
#[derive(Clone, Debug)]
pub struct Report {
    hosts: Vec<HostRow>,
    /// Everything that is not as it must be.
    pub problems: Vec<String>,
}

#[derive(Clone, Debug)]
struct HostRow {
    host: String,
    crawled: usize,
    dead: usize,
    retries: u32,
    trips: u32,
    requests: usize,
    pause: Duration,
    least_distance: Option<Duration>,
    most_at_once: u32,
}

impl Report {
    /// Compares what the topics hold and what the site was asked with what must be. `pause`: what the worker
    /// keeps at a host that asks for none. `closing`: the pages
    /// that were crawled after all others had ended.
    #[must_use]
    pub fn new(map: &SiteMap, log: &Log, ledger: &Ledger, pause: Duration, closing: &[String]) -> Self {
        let reachable = map.reachable();
        let mut expected = reachable.clone();
        expected.extend(
            closing
                .iter()
                .map(|page| (page.clone(), crate::site::Fate::Crawled(200))),
        );
        let mut problems = ledger.problems(&expected, map.word());
        let mut hosts = Vec::new();
        for (index, plan) in map.hosts().iter().enumerate() {
            let address = map.host(index);
            let of_host = || {
                let pages = ledger.pages().filter(|(page, _)| reachable.contains_key(*page));
                pages.filter(|(page, _)| page.starts_with(&format!("{address}/")))
            };
            let summary = log.summary(index);
            let row = HostRow {
                host: format!("{} ({})", plan.name, address.trim_start_matches("http://")),
                crawled: of_host().filter(|(_, seen)| !seen.results.is_empty()).count(),
                dead: of_host().filter(|(_, seen)| !seen.dead.is_empty()).count(),
                retries: of_host().map(|(_, seen)| seen.retries).sum(),
                trips: of_host().map(|(_, seen)| seen.trips).sum(),
                requests: summary.requests,
                pause: pause_of(plan, pause),
                least_distance: summary.least_distance,
                most_at_once: summary.most_at_once,
            };
            problems.extend(row.problems());
            hosts.push(row);
        }
        Self { hosts, problems }
    }
}

impl HostRow {
    fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if self.requests == 0 {
            problems.push(format!("{} was never asked", self.host));
        }
        if self.most_at_once > 1 {
            problems.push(format!(
                "{} was asked {} times at once",
                self.host, self.most_at_once
            ));
        }
        if let Some(distance) = self.least_distance
            && distance < self.pause
        {
            problems.push(format!(
                "{} was asked after {} ms and wants {} ms",
                self.host,
                distance.as_millis(),
                self.pause.as_millis()
            ));
        }
        problems
    }

    fn cells(&self) -> Vec<String> {
        let distance = self
            .least_distance
            .map(|distance| format!("{} ms", distance.as_millis()));
        vec![
            self.host.clone(),
            self.crawled.to_string(),
            self.dead.to_string(),
            self.retries.to_string(),
            self.trips.to_string(),
            self.requests.to_string(),
            self.most_at_once.to_string(),
            format!("{} ms", self.pause.as_millis()),
            distance.unwrap_or_default(),
        ]
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_header([
            "host",
            "crawled",
            "dead",
            "retries",
            "waits for a turn",
            "requests",
            "at once",
            "asks for",
            "least distance",
        ]);
        for host in &self.hosts {
            table.add_row(host.cells());
        }
        writeln!(f, "{table}\n")?;
        let pages: usize = self.hosts.iter().map(|host| host.crawled + host.dead).sum();
        if self.problems.is_empty() {
            return write!(
                f,
                "All {pages} pages were crawled or given up exactly once, each host was asked one at a time and \
                 never sooner than it wants."
            );
        }
        write!(f, "Not as it must be:")?;
        self.problems
            .iter()
            .try_for_each(|problem| write!(f, "\n  {problem}"))
    }
}
