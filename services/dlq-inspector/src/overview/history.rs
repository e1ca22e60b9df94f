//! Rates, what grows, and since when something is wrong, from several surveys.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::Timestamp;
use redeliver_proto::v1;

use super::survey::{Letters, Reading, Survey, Topics};

/// Rates are those of at least this time, once there are surveys that are so old.
const WINDOW: Duration = Duration::from_secs(10);
/// Surveys nearer than this to the one before are not kept.
const SPACING: Duration = Duration::from_secs(2);
/// A survey that is older than this tells nothing about now.
const MAX_WINDOW: Duration = Duration::from_secs(60);

/// What is remembered of earlier surveys.
#[derive(Debug, Default)]
pub(crate) struct History {
    /// The oldest one first. As many as fit into the window, and one before.
    samples: VecDeque<Sample>,
    /// Since when topics are missing.
    missing: BTreeMap<Arc<str>, Missing>,
    /// The last one of them of which Kafka was asked by name.
    last_asked: Option<Arc<str>>,
    /// Since when parts are incomplete.
    incomplete: BTreeMap<v1::OverviewPart, Timestamp>,
}

#[derive(Debug)]
struct Sample {
    uptime: Duration,
    topics: Arc<Topics>,
    waiting: Option<Arc<Reading>>,
    letters: Option<Arc<Letters>>,
}

#[derive(Clone, Copy, Debug)]
struct Missing {
    since: Timestamp,
    /// Whether Kafka was asked by name, too: otherwise, the topic may exist without being visible.
    is_confirmed: bool,
}

/// What has changed since an earlier survey.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Changes<'h> {
    before: &'h Sample,
    now: &'h Survey,
    pub(crate) window: Duration,
}

impl History {
    /// Remembers a survey, after [`History::changes`] was asked about it.
    pub(crate) fn add(&mut self, survey: &Survey) {
        let last = self.samples.back().map(|sample| sample.uptime);
        let is_far = last.is_none_or(|last| survey.uptime.saturating_sub(last) >= SPACING);
        let Some(topics) = survey.topics.clone().filter(|_| is_far) else {
            return;
        };
        self.samples.push_back(Sample {
            uptime: survey.uptime,
            topics,
            waiting: survey.waiting.clone(),
            letters: survey.letters.clone(),
        });
        let is_old = |sample: &Sample| survey.uptime.saturating_sub(sample.uptime) >= WINDOW;
        while self.samples.get(1).is_some_and(is_old) {
            self.samples.pop_front();
        }
    }

    /// Takes note of which of these topics a survey lacks, and what is incomplete. Kafka was asked by name of the topics in `asked`.
    pub(crate) fn note<'t>(
        &mut self,
        survey: &Survey,
        needed: impl Iterator<Item = &'t Arc<str>>,
        asked: &BTreeSet<Arc<str>>,
    ) {
        let at = survey.at;
        if let Some(topics) = &survey.topics {
            let mut missing = BTreeMap::new();
            for topic in needed.filter(|topic| topics.lacks(topic)) {
                let before = self.missing.get(topic);
                let noted = Missing {
                    since: before.map_or(at, |before| before.since),
                    is_confirmed: before.is_some_and(|before| before.is_confirmed || asked.contains(topic)),
                };
                missing.insert(topic.clone(), noted);
            }
            self.missing = missing;
        }
        self.incomplete
            .retain(|part, _| survey.incomplete.contains_key(part));
        for part in survey.incomplete.keys() {
            self.incomplete.entry(*part).or_insert(at);
        }
    }

    /// What has changed since an earlier survey; `None` without a recent one.
    pub(crate) fn changes<'h>(&'h self, now: &'h Survey) -> Option<Changes<'h>> {
        let since = |sample: &Sample| now.uptime.checked_sub(sample.uptime);
        let is_recent = |sample: &&Sample| since(sample).is_some_and(|window| window <= MAX_WINDOW);
        let before = self.samples.iter().find(is_recent)?;
        let window = since(before)?;
        (!window.is_zero()).then_some(Changes { before, now, window })
    }

    /// Since when a topic is missing; `None` also if this survey does not know it. One survey does not count: the topic may be about to be created, or a
    /// broker is starting.
    pub(crate) fn missing_since(&self, survey: &Survey, topic: &str) -> Option<Timestamp> {
        survey.topics.as_ref()?;
        let missing = self.missing.get(topic)?;
        missing.is_confirmed.then_some(missing.since)
    }

    /// Of which missing topics Kafka is asked by name in the next survey, since they may exist without being visible: at most this number, and each
    /// of them in turn.
    pub(crate) fn ask(&mut self, count: usize) -> BTreeSet<Arc<str>> {
        let last = self.last_asked.as_deref();
        let after = last.map_or(Bound::Unbounded, Bound::Excluded);
        let rest = self.missing.range::<str, _>((after, Bound::Unbounded));
        // After the last one, it begins again.
        let asked = rest.chain(&self.missing).take(count.min(self.missing.len()));
        let asked: Vec<Arc<str>> = asked.map(|(topic, _)| topic.clone()).collect();
        self.last_asked = asked.last().cloned();
        asked.into_iter().collect()
    }

    /// Since when a part is incomplete.
    pub(crate) fn incomplete_since(&self, part: v1::OverviewPart) -> Option<Timestamp> {
        self.incomplete.get(&part).copied()
    }
}

impl Changes<'_> {
    /// The offsets per second that these topics have got, rounded to 3 significant digits; `None` if unknown.
    #[expect(clippy::cast_precision_loss, reason = "a rate is rounded anyway")]
    pub(crate) fn rate<'t>(&self, topics: impl IntoIterator<Item = &'t Arc<str>>) -> Option<f64> {
        let now = self.now.topics.as_ref()?;
        let mut sum = 0;
        for topic in topics {
            let (now, before) = (now.ends.get(topic)?, self.before.topics.ends.get(topic)?);
            let offsets = now.offsets - before.offsets;
            // Without ids, a topic that was created again has fewer offsets or partitions at first.
            let is_same = now.id == before.id && offsets >= 0 && now.partitions >= before.partitions;
            if !is_same || !now.is_whole || !before.is_whole {
                return None;
            }
            sum += offsets;
        }
        Some(rounded(sum as f64 / self.window.as_secs_f64()))
    }

    /// Whether more records wait in a topic than before; `None` if the two numbers cannot be compared.
    pub(crate) fn waits_more(&self, pipeline: &str, topic: &str) -> Option<bool> {
        let (now, before) = (self.now.waiting.as_ref()?, self.before.waiting.as_ref()?);
        if Arc::ptr_eq(now, before) {
            return None;
        }
        let backlog = |reading: &Reading| {
            let waiting = reading.of_topic(pipeline, topic)?;
            waiting.unreachable.is_empty().then_some(waiting.backlog)
        };
        let (now, before) = (backlog(now)?, backlog(before)?);
        (now.is_exact == before.is_exact).then_some(now.records > before.records)
    }

    /// Whether a topic has more open dead letters than before.
    pub(crate) fn has_more_letters(&self, topic: &str) -> Option<bool> {
        let count = |letters: Option<&Arc<Letters>>| {
            let letters = letters.filter(|letters| letters.has_states)?;
            Some(letters.open.get(topic).map_or(0, |open| open.count))
        };
        Some(count(self.now.letters.as_ref())? > count(self.before.letters.as_ref())?)
    }
}

/// Has 3 significant digits, so that a steady rate is the same in windows of different lengths.
fn rounded(rate: f64) -> f64 {
    format!("{rate:.2e}").parse().unwrap_or(rate)
}
