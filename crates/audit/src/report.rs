//! What an audit found, for people and as JSON.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

/// The result of an audit.
///
/// Each source record is counted in exactly one of `output`, `dead`, `waiting`, `lost` and `uncounted`, so
/// their sum is `source`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The pipeline.
    pub pipeline: String,
    /// Records in the source topic, retries that came back to it not included.
    pub source: u64,
    /// Source records whose end is in the output.
    pub output: u64,
    /// Source records whose end is in the dead letters, those redriven and dead again included.
    pub dead: u64,
    /// The same by the class of their failure.
    pub dead_by_class: BTreeMap<String, u64>,
    /// Source records that some group has yet to read, in one topic or another.
    pub waiting: Waiting,
    /// Source records of a pipeline without output topic that are done: handled or lost, which cannot be told.
    pub uncounted: u64,
    /// Whether successes can be counted, which takes an output topic.
    pub successes_counted: bool,
    /// Source records that are nowhere any more.
    pub lost: Findings,
    /// Source records with more than one end, or with an end although some group has yet to read them.
    pub doubled: Findings,
    /// Records that came out of a tier or the scheduler before their due time.
    pub early: Findings,
    /// Source records of which not all copies are equal.
    pub altered: Findings,
    /// Records that name an origin which the source topic never had.
    pub unknown: Findings,
    /// Records of other origin, such as forged ones that a tier rejected: no error, and in no other number.
    pub foreign: Findings,
    /// Source records that the inspector has redriven at least once; what counts is their last life.
    pub redriven: u64,
    /// Origins older than what the source topic still keeps; of them it cannot be said that they are lost.
    pub source_gone: u64,
    /// Origins that ended during the audit and are newer than what it has read of the source.
    pub newer: u64,
    /// The smallest time from due to release in milliseconds; negative is early.
    pub min_margin_ms: Option<i64>,
    /// How long after their due time records were released.
    pub lateness: Option<Lateness>,
    /// How many source records ended after how many failed attempts.
    pub retries: BTreeMap<u32, u64>,
}

/// Where unfinished records wait; each is counted once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Waiting {
    /// In the source topic, not read yet.
    pub in_source: u64,
    /// In the tiers.
    pub in_tiers: u64,
    /// With the scheduler, on their way to it included.
    pub in_scheduler: u64,
    /// In the due topic, or back in the source topic.
    pub in_due: u64,
}

impl Waiting {
    /// All of them.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.in_source + self.in_tiers + self.in_scheduler + self.in_due
    }
}

/// Times from due to release in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Lateness {
    /// Half of the records took no longer.
    pub p50_ms: i64,
    /// 99 of 100 took no longer.
    pub p99_ms: i64,
    /// 999 of 1000 took no longer.
    pub p999_ms: i64,
    /// None took longer.
    pub max_ms: i64,
}

impl Lateness {
    /// From how often each time was seen.
    #[must_use]
    pub fn of(counts: &BTreeMap<i64, u64>) -> Option<Self> {
        let total: u64 = counts.values().sum();
        // Nearest rank: the smallest time that at least this share of the records did not exceed.
        let percentile = |per_mille: u64| {
            let rank = (total * per_mille).div_ceil(1000);
            let mut below = 0;
            let mut at_or_below = counts.iter().skip_while(|(_, count)| {
                below += **count;
                below < rank
            });
            at_or_below.next().map(|(millis, _)| *millis)
        };
        Some(Self {
            p50_ms: percentile(500)?,
            p99_ms: percentile(990)?,
            p999_ms: percentile(999)?,
            max_ms: *counts.keys().next_back()?,
        })
    }
}

/// Findings of one kind: all are counted, the first ones are listed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Findings {
    /// How many there are.
    pub count: u64,
    /// The first of them, at most [`Findings::LISTED`].
    pub sample: Vec<Finding>,
}

/// One record with which something is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Where it entered the pipeline, as `topic-partition@offset`.
    pub origin: String,
    /// Where the copy stands that showed it, if it was one copy.
    pub at: Option<String>,
    /// What is wrong.
    pub reason: String,
}

impl Findings {
    /// How many are listed.
    pub const LISTED: usize = 20;

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Counts one more; the words are only made for those that are listed.
    pub(crate) fn add(&mut self, finding: impl FnOnce() -> Finding) {
        self.count += 1;
        if self.sample.len() < Self::LISTED {
            self.sample.push(finding());
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.origin)?;
        if let Some(at) = self.at.as_ref().filter(|at| **at != self.origin) {
            write!(f, " at {at}")?;
        }
        write!(f, ": {}", self.reason)
    }
}

impl Report {
    /// The findings that must not be, with their names.
    #[must_use]
    pub fn defects(&self) -> [(&'static str, &Findings); 5] {
        [
            ("lost", &self.lost),
            ("doubled", &self.doubled),
            ("early", &self.early),
            ("altered", &self.altered),
            ("unknown", &self.unknown),
        ]
    }

    /// Whether nothing is wrong.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.defects().iter().all(|(_, findings)| findings.is_empty())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "pipeline {}", self.pipeline)?;
        let line = |f: &mut fmt::Formatter<'_>, name: &str, count: u64, note: &str| {
            let text = format!("  {name:<18}{count:>12}  {note}");
            writeln!(f, "{}", text.trim_end())
        };
        line(f, "source", self.source, "records came in")?;
        if self.successes_counted {
            line(f, "output", self.output, "handled")?;
        } else {
            line(
                f,
                "done",
                self.uncounted,
                "handled or lost: without an output topic successes cannot be counted",
            )?;
        }
        line(f, "dead", self.dead, &listed(&self.dead_by_class))?;
        let waiting = &self.waiting;
        let places = [
            ("source", waiting.in_source),
            ("tiers", waiting.in_tiers),
            ("scheduler", waiting.in_scheduler),
            ("due", waiting.in_due),
        ]
        .into();
        line(f, "waiting", waiting.total(), &listed(&places))?;
        writeln!(f)?;
        let meanings = [
            "nowhere any more",
            "more than one end",
            "released before due",
            "key, value or headers changed",
            "of an origin the source never had",
        ];
        for ((name, findings), meaning) in self.defects().into_iter().zip(meanings) {
            line(f, name, findings.count, meaning)?;
            list(f, findings)?;
        }
        if !self.foreign.is_empty() {
            line(
                f,
                "foreign",
                self.foreign.count,
                "of other origin; not counted, no error",
            )?;
            list(f, &self.foreign)?;
        }
        let notes = [
            ("redriven", self.redriven, "went again from the dead letters"),
            (
                "source gone",
                self.source_gone,
                "older than what the source still keeps; not judged",
            ),
            (
                "newer",
                self.newer,
                "came in and ended during the audit; not judged",
            ),
        ];
        for (name, count, note) in notes.into_iter().filter(|(_, count, _)| *count > 0) {
            line(f, name, count, note)?;
        }
        writeln!(f)?;
        if let (Some(margin), Some(late)) = (self.min_margin_ms, &self.lateness) {
            writeln!(
                f,
                "  released after due: at least {margin} ms; p50 {} ms, p99 {} ms, p99.9 {} ms, at most {} ms",
                late.p50_ms, late.p99_ms, late.p999_ms, late.max_ms
            )?;
        }
        if !self.retries.is_empty() {
            writeln!(f, "  ended after failed attempts: {}", listed(&self.retries))?;
        }
        let wrong: Vec<_> = self
            .defects()
            .into_iter()
            .filter(|(_, findings)| !findings.is_empty())
            .map(|(name, _)| name)
            .collect();
        if wrong.is_empty() && self.successes_counted {
            write!(
                f,
                "  clean: every record is exactly once in the output, dead or waiting"
            )
        } else if wrong.is_empty() {
            write!(f, "  clean, as far as can be seen without an output topic")
        } else {
            write!(f, "  NOT CLEAN: {}", wrong.join(", "))
        }
    }
}

fn list(f: &mut fmt::Formatter<'_>, findings: &Findings) -> fmt::Result {
    for finding in &findings.sample {
        writeln!(f, "      {finding}")?;
    }
    let more = findings.count - findings.sample.len() as u64;
    if more > 0 {
        writeln!(f, "      and {more} more")?;
    }
    Ok(())
}

fn listed<K: fmt::Display>(counts: &BTreeMap<K, u64>) -> String {
    let parts: Vec<_> = counts
        .iter()
        .filter(|(_, count)| **count > 0)
        .map(|(name, count)| format!("{name} {count}"))
        .collect();
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_times_that_were_seen() {
        assert_eq!(Lateness::of(&BTreeMap::new()), None);
        let even: BTreeMap<i64, u64> = (1..=1000).map(|millis| (millis, 1)).collect();
        let late = Lateness::of(&even).unwrap();
        assert_eq!(
            (late.p50_ms, late.p99_ms, late.p999_ms, late.max_ms),
            (500, 990, 999, 1000)
        );
        let late = Lateness::of(&BTreeMap::from([(-3, 1)])).unwrap();
        assert_eq!((late.p50_ms, late.max_ms), (-3, -3));
    }

    #[test]
    fn a_report_reads_like_a_table() {
        let mut report = Report {
            pipeline: "crawl-jobs".into(),
            source: 100,
            output: 90,
            dead: 4,
            dead_by_class: [("exhausted".to_owned(), 3), ("permanent".to_owned(), 1)].into(),
            waiting: Waiting {
                in_source: 0,
                in_tiers: 5,
                in_scheduler: 2,
                in_due: 0,
            },
            successes_counted: true,
            min_margin_ms: Some(1),
            lateness: Lateness::of(&BTreeMap::from([(1, 1), (9, 2)])),
            retries: [(0, 80), (2, 14)].into(),
            ..Report::default()
        };
        for offset in 0..22 {
            report.lost.add(|| Finding {
                origin: format!("crawl-jobs-0@{offset}"),
                at: None,
                reason: "gone".into(),
            });
        }
        let text = report.to_string();
        for expected in [
            "  dead                         4  exhausted 3, permanent 1\n",
            "  waiting                      7  scheduler 2, tiers 5\n",
            "  lost                        22  nowhere any more\n      crawl-jobs-0@0: gone\n",
            "      and 2 more\n",
            "at least 1 ms; p50 9 ms, p99 9 ms",
            "failed attempts: 0 80, 2 14\n",
            "NOT CLEAN: lost",
        ] {
            assert!(text.contains(expected), "{expected:?} is missing in\n{text}");
        }
        report.lost = Findings::default();
        assert!(
            report
                .to_string()
                .ends_with("clean: every record is exactly once in the output, dead or waiting")
        );
    }
}
