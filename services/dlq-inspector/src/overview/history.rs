//! Rates, what grows, and since when something is wrong, from several surveys.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::Timestamp;
use redeliver_proto::v1;

use super::survey::{Letters, Reading, Survey, Topics};

/// Rates are those of at least this time, once there are surveys that are so old.
const WINDOW: Duration = Duration::from_secs(10);
/// Surveys nearer than this to the one before are not kept.
const SPACING: Duration = Duration::from_secs(2);

/// What is remembered of earlier surveys.
#[derive(Debug, Default)]
pub(crate) struct History {
    /// The oldest one first. As many as fit into the window, and one before.
    samples: VecDeque<Sample>,
    /// Since when topics are missing.
    missing: BTreeMap<Arc<str>, Missing>,
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
    surveys: u32,
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

    /// Takes note of which of these topics a survey lacks, and what is incomplete.
    pub(crate) fn note<'t>(&mut self, survey: &Survey, needed: impl Iterator<Item = &'t Arc<str>>) {
        let at = survey.at;
        if let Some(topics) = &survey.topics {
            let mut missing = BTreeMap::new();
            for topic in needed.filter(|topic| topics.lacks(topic)) {
                let before = self.missing.get(topic);
                let noted = before.map_or(
                    Missing {
                        since: at,
                        surveys: 1,
                    },
                    |before| Missing {
                        surveys: before.surveys.saturating_add(1),
                        ..*before
                    },
                );
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

    /// What has changed since an earlier survey; `None` without one.
    pub(crate) fn changes<'h>(&'h self, now: &'h Survey) -> Option<Changes<'h>> {
        let before = self.samples.front()?;
        let window = now.uptime.checked_sub(before.uptime)?;
        (!window.is_zero()).then_some(Changes { before, now, window })
    }

    /// Since when a topic is missing. One survey does not count: the topic may be about to be created, or a broker is starting.
    pub(crate) fn missing_since(&self, topic: &str) -> Option<Timestamp> {
        let missing = self.missing.get(topic)?;
        (missing.surveys > 1).then_some(missing.since)
    }

    /// The topics that the last survey lacks, some of which may exist without being visible.
    pub(crate) fn missing(&self) -> impl Iterator<Item = &Arc<str>> {
        self.missing.keys()
    }

    /// Since when a part is incomplete.
    pub(crate) fn incomplete_since(&self, part: v1::OverviewPart) -> Option<Timestamp> {
        self.incomplete.get(&part).copied()
    }
}

impl Changes<'_> {
    /// The offsets per second that these topics have got; `None` if unknown.
    #[expect(clippy::cast_precision_loss, reason = "a rate is rounded anyway")]
    pub(crate) fn rate<'t>(&self, topics: impl IntoIterator<Item = &'t Arc<str>>) -> Option<f64> {
        let now = self.now.topics.as_ref()?;
        let mut sum = 0;
        for topic in topics {
            let (now, before) = (now.ends.get(topic)?, self.before.topics.ends.get(topic)?);
            let offsets = now.offsets - before.offsets;
            // A topic loses offsets or partitions only if it is created again.
            if !now.is_whole || !before.is_whole || offsets < 0 || now.partitions < before.partitions {
                return None;
            }
            sum += offsets;
        }
        Some(sum as f64 / self.window.as_secs_f64())
    }

    /// Whether more records wait in a topic than before.
    pub(crate) fn waits_more(&self, pipeline: &str, topic: &str) -> Option<bool> {
        let records =
            |reading: Option<&Arc<Reading>>| Some(reading?.of_topic(pipeline, topic)?.backlog.records);
        let before = self.before.waiting.as_ref();
        Some(records(self.now.waiting.as_ref())? > records(before)?)
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
