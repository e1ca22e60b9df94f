//! What became of each page, from nothing but the topics: what any observer could see. Pure.

use std::collections::BTreeMap;

use redeliver_core::headers::{ERROR_CODE, ERROR_MESSAGE, ReservedHeaders};
use redeliver_core::pipeline::TopicRole;
use redeliver_core::{Pipeline, Record};

use crate::crawler::TURN;
use crate::job::{CrawlJob, CrawlResult};
use crate::site::Fate;

/// What was seen, by page.
#[derive(Debug, Default)]
pub struct Ledger {
    pages: BTreeMap<String, Seen>,
}

/// What was seen of one page.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Jobs, retries not counted.
    pub jobs: u32,
    /// The status of each result.
    pub results: Vec<u16>,
    /// The code of each dead letter.
    pub dead: Vec<String>,
    /// Failed attempts that waited for another.
    pub retries: u32,
    /// How often it waited in a tier for its turn.
    pub trips: u32,
}

impl Seen {
    /// Whether nothing more is to come.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        !self.results.is_empty() || !self.dead.is_empty()
    }
}

impl Ledger {
    /// Takes a record of the pipeline into account. Gives the page and what happened to it in plain words, if
    /// that is worth telling.
    pub fn observe(
        &mut self,
        pipeline: &Pipeline,
        role: TopicRole,
        record: &Record,
    ) -> Option<(String, String)> {
        let value = record.value.as_deref().unwrap_or_default();
        if role == TopicRole::Output {
            let result: CrawlResult = serde_json::from_slice(value).ok()?;
            let told = match &result.title {
                Some(title) => format!("{}: \"{title}\" with {} links", result.status, result.links.len()),
                None => format!("{} with {} links", result.status, result.links.len()),
            };
            self.page(&result.url).results.push(result.status);
            return Some((result.url, told));
        }
        let CrawlJob { url } = serde_json::from_slice(value).ok()?;
        let header =
            |name| String::from_utf8_lossy(record.headers.last(name).unwrap_or_default()).into_owned();
        let seen = self.page(&url);
        match role {
            TopicRole::Source => {
                let is_retry =
                    ReservedHeaders::read(record).is_ok_and(|ours| ours.is_retry_of(&pipeline.name));
                seen.jobs += u32::from(!is_retry);
                None
            }
            TopicRole::Tier(_) if header(ERROR_CODE) == TURN => {
                seen.trips += 1;
                None
            }
            TopicRole::Tier(tier) => {
                seen.retries += 1;
                let told = format!("{}; waits in the tier of {tier}", header(ERROR_CODE));
                Some((url, told))
            }
            TopicRole::DeadLetter => {
                let code = header(ERROR_CODE);
                let told = format!("dead ({code}): {}", header(ERROR_MESSAGE));
                seen.dead.push(code);
                Some((url, told))
            }
            TopicRole::Output | TopicRole::Due => None,
        }
    }

    /// What was seen of a page.
    #[must_use]
    pub fn seen(&self, page: &str) -> Seen {
        self.pages.get(page).cloned().unwrap_or_default()
    }

    /// All pages with what was seen of them.
    pub fn pages(&self) -> impl Iterator<Item = (&str, &Seen)> {
        self.pages.iter().map(|(page, seen)| (page.as_str(), seen))
    }

    /// Everything that is not as it must be: each of these pages exactly once where it belongs, and no other with
    /// this word in its address.
    #[must_use]
    pub fn problems(&self, expected: &BTreeMap<String, Fate>, word: &str) -> Vec<String> {
        let mut problems = Vec::new();
        for (page, fate) in expected {
            let seen = self.seen(page);
            if seen.jobs != 1 {
                problems.push(format!("{page} was {} jobs", seen.jobs));
            }
            let right = match fate {
                Fate::Crawled(status) => seen.results == [*status] && seen.dead.is_empty(),
                Fate::Dead(code) => seen.results.is_empty() && seen.dead == [*code],
            };
            if !right {
                problems.push(format!(
                    "{page} must be {fate:?} once, and has the results {:?} and the dead letters {:?}",
                    seen.results, seen.dead
                ));
            }
        }
        for (page, _) in self.pages() {
            if page.contains(word) && !expected.contains_key(page) {
                problems.push(format!("{page} is linked nowhere"));
            }
        }
        problems
    }

    fn page(&mut self, page: &str) -> &mut Seen {
        self.pages.entry(page.to_owned()).or_default()
    }
}
