//! The report of an audit, as text and as JSON.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

/// The result of an audit.
///
/// Each source record is counted in exactly one of `output`, `dead`, `waiting`, `lost` and `uncounted`, so their sum is
/// `source`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The name of the pipeline.
    pub pipeline: String,
    /// Records in the source topic, without retries that returned to it.
    pub source: u64,
    /// Source records whose last life ended in the output.
    pub output: u64,
    /// Source records whose last life ended in the dead letters.
    pub dead: u64,
    /// The same by failure class.
    pub dead_by_class: BTreeMap<String, u64>,
    /// Source records that are waiting, because a group has not processed them yet.
    pub waiting: Waiting,
    /// Source records that are completed without a result in a pipeline that has no output topic or drops results: they
    /// succeeded or are lost.
    pub uncounted: u64,
    /// Whether every success has a result, so that successes can be counted.
    pub successes_counted: bool,
    /// Source records that are in no topic any more.
    pub lost: Findings,
    /// Source records that ended more than once, or ended and still wait.
    pub doubled: Findings,
    /// Records that a tier or the scheduler released before their due time.
    pub early: Findings,
    /// Source records with copies that differ.
    pub altered: Findings,
    /// Records whose origin is not in the source topic, although it still has older records.
    pub unknown: Findings,
    /// Records that do not belong to the pipeline, such as forged ones that a tier rejected. They are not a defect and
    /// not counted elsewhere.
    pub foreign: Findings,
    /// Source records that were redriven at least once.
    pub redriven: u64,
    /// Origins that the source topic has deleted. Whether they are lost is unknown.
    pub source_gone: u64,
    /// Origins that ended during the audit and are newer than the part of the source that was read.
    pub newer: u64,
    /// The smallest lateness in milliseconds; negative if a record was early.
    pub min_margin_ms: Option<i64>,
    /// How late records were released.
    pub lateness: Option<Lateness>,
    /// The number of ended source records by number of failed attempts.
    pub retries: BTreeMap<u32, u64>,
}

/// The number of waiting records by topic; each is counted once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Waiting {
    /// In the source topic, without retries that returned to it.
    pub in_source: u64,
    /// In tiers.
    pub in_tiers: u64,
    /// In commands and jobs of the scheduler.
    pub in_scheduler: u64,
    /// In the due topic, or returned to the source topic.
    pub in_due: u64,
}

impl Waiting {
    /// The sum.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.in_source + self.in_tiers + self.in_scheduler + self.in_due
    }
}

/// Percentiles of the lateness in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Lateness {
    /// The median.
    pub p50_ms: i64,
    /// The 99th percentile.
    pub p99_ms: i64,
    /// The 99.9th percentile.
    pub p999_ms: i64,
    /// The maximum.
    pub max_ms: i64,
}

impl Lateness {
    /// Computes the percentiles from the number of records by lateness; `None` if there are none.
    #[must_use]
    pub fn of(counts: &BTreeMap<i64, u64>) -> Option<Self> {
        let total: u64 = counts.values().sum();
        // The nearest-rank method: the smallest value that at least this share of the records does not exceed.
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

/// Findings of one kind. All are counted, and the first ones are listed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Findings {
    /// The number of findings.
    pub count: u64,
    /// The first findings, at most [`Findings::LISTED`].
    pub sample: Vec<Finding>,
}

/// A record with a defect, or a foreign record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The position at which the record entered the pipeline, written `topic/partition/offset`.
    pub origin: String,
    /// The position of the copy with the defect, if there is one.
    pub at: Option<String>,
    /// Why the record is listed.
    pub reason: String,
}

impl Findings {
    /// The maximum number of listed findings.
    pub const LISTED: usize = 20;

    /// Whether there are no findings.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds a finding. Only calls `finding` if it is going to be listed.
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
    /// The findings of each kind of defect, with its name.
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

    /// Whether there are no defects.
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
        line(f, "source", self.source, "records in the source topic")?;
        if self.successes_counted || self.output > 0 {
            line(f, "output", self.output, "succeeded")?;
        }
        if !self.successes_counted {
            line(
                f,
                "done",
                self.uncounted,
                "succeeded or lost; successes without a result cannot be counted",
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
            "in no topic any more",
            "ended more than once",
            "released before their due time",
            "key, value or headers changed",
            "origin not in the source topic",
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
                "not of this pipeline; not a defect",
            )?;
            list(f, &self.foreign)?;
        }
        let notes = [
            ("redriven", self.redriven, "redriven from the dead letters"),
            (
                "source gone",
                self.source_gone,
                "deleted from the source topic; not checked",
            ),
            (
                "newer",
                self.newer,
                "written and ended during the audit; not checked",
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
            write!(
                f,
                "  clean, except that successes without a result cannot be checked"
            )
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
    fn percentiles_are_observed_values() {
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
    fn report_is_a_table() {
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
                origin: format!("crawl-jobs/0/{offset}"),
                at: None,
                reason: "gone".into(),
            });
        }
        let text = report.to_string();
        for expected in [
            "  dead                         4  exhausted 3, permanent 1\n",
            "  waiting                      7  scheduler 2, tiers 5\n",
            "  lost                        22  in no topic any more\n      crawl-jobs/0/0: gone\n",
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
