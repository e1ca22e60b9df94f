//! What is due and not released yet: the signals by which retry tiers and the scheduler are scaled.
//!
//! Waiting is not load. The lag of a consumer group includes records that wait for their due time, and transaction
//! markers, so it says nothing about whether more processes are needed. These metrics do:
//!
//! | name | |
//! |---|---|
//! | `<prefix>_due` | what is due and not released |
//! | `<prefix>_overdue_seconds` | the time since the earliest due time of that; 0 if nothing is due |
//! | `<prefix>_next_due_seconds` | the time until something is due; 0 if something is, +Inf if nothing waits |
//!
//! They are computed at each scrape, so they also rise while a lane makes no progress. A lane without partitions has no series:
//! it does not know what waits, and a value of 0 would make an autoscaler stop processes during an outage of Kafka.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use redeliver_core::{Clock, Timestamp};

/// The due metrics of a process, with one series for each set of labels. Cheap to clone.
#[derive(Clone)]
pub struct DueFamilies<L>(Arc<Inner<L>>);

struct Inner<L> {
    prefix: &'static str,
    clock: Arc<dyn Clock>,
    /// Removed when the last [`DueSignal`] of the lane is dropped.
    lanes: Mutex<Vec<(L, Weak<State>)>>,
}

/// What one lane reports for one set of labels.
#[derive(Debug)]
pub struct DueSignal(Arc<State>);

/// `None`: the lane has no partitions.
type State = Mutex<Option<Waiting>>;

/// What waits, as far as a lane has read it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waiting {
    /// The earliest due time of what is not released yet; `None` if nothing waits.
    pub earliest: Option<Timestamp>,
    /// How much of it was due when the lane last looked.
    pub due: usize,
}

impl Waiting {
    /// What waits in two parts.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            earliest: self.earliest.into_iter().chain(other.earliest).min(),
            due: self.due + other.due,
        }
    }

    fn due_at(self, now: Timestamp) -> i64 {
        match self.earliest {
            // The lane may have looked before anything was due.
            Some(earliest) if earliest <= now => i64::try_from(self.due.max(1)).unwrap_or(i64::MAX),
            Some(_) | None => 0,
        }
    }

    fn overdue_seconds(self, now: Timestamp) -> f64 {
        self.earliest
            .map_or(0.0, |earliest| now.since(earliest).as_secs_f64())
    }

    fn next_due_seconds(self, now: Timestamp) -> f64 {
        self.earliest
            .map_or(f64::INFINITY, |earliest| earliest.since(now).as_secs_f64())
    }
}

impl DueSignal {
    /// Reports what waits; `None` if the lane has no partitions. What is in a transaction has not been released until the
    /// transaction is committed.
    pub fn set(&self, waiting: Option<Waiting>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = waiting;
    }

    /// What was reported last.
    #[must_use]
    pub fn get(&self) -> Option<Waiting> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<L: EncodeLabelSet + Clone + fmt::Debug + Ord + Send + Sync + 'static> DueFamilies<L> {
    /// Registers the metrics with this prefix.
    #[must_use]
    pub fn register(registry: &mut Registry, prefix: &'static str, clock: Arc<dyn Clock>) -> Self {
        let families = Self(Arc::new(Inner {
            prefix,
            clock,
            lanes: Mutex::default(),
        }));
        registry.register_collector(Box::new(families.0.clone()));
        families
    }

    /// The signal of one lane. The metrics of all lanes with the same labels are one series.
    #[must_use]
    pub fn signal(&self, labels: L) -> DueSignal {
        let signal = DueSignal(Arc::default());
        let mut lanes = self.0.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        lanes.retain(|(_, lane)| lane.strong_count() > 0);
        lanes.push((labels, Arc::downgrade(&signal.0)));
        signal
    }
}

impl<L: Clone + Ord> Inner<L> {
    fn waiting(&self) -> BTreeMap<L, Waiting> {
        let lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all: BTreeMap<L, Waiting> = BTreeMap::new();
        for (labels, lane) in lanes.iter() {
            if let Some(lane) = lane.upgrade() {
                let Some(waiting) = *lane.lock().unwrap_or_else(PoisonError::into_inner) else {
                    continue;
                };
                let sum = all.entry(labels.clone()).or_default();
                *sum = sum.and(waiting);
            }
        }
        all
    }
}

impl<L> fmt::Debug for Inner<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DueFamilies")
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}

impl<L: EncodeLabelSet + Clone + Ord + Send + Sync + 'static> Collector for Inner<L> {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let waiting = self.waiting();
        let now = self.clock.now();
        let name = format!("{}_due", self.prefix);
        let help = "Due and not released; a lower bound";
        let mut metric = encoder.encode_descriptor(&name, help, None, MetricType::Gauge)?;
        for (labels, waiting) in &waiting {
            metric.encode_family(labels)?.encode_gauge(&waiting.due_at(now))?;
        }
        let name = format!("{}_overdue", self.prefix);
        let help = "Time since the earliest due time that is not released; 0 if nothing is due";
        let mut metric = encoder.encode_descriptor(&name, help, Some(&Unit::Seconds), MetricType::Gauge)?;
        for (labels, waiting) in &waiting {
            let seconds = waiting.overdue_seconds(now);
            metric.encode_family(labels)?.encode_gauge(&seconds)?;
        }
        let name = format!("{}_next_due", self.prefix);
        let help = "Time until the next due time; 0 if something is due, +Inf if nothing waits";
        let mut metric = encoder.encode_descriptor(&name, help, Some(&Unit::Seconds), MetricType::Gauge)?;
        for (labels, waiting) in &waiting {
            let seconds = waiting.next_due_seconds(now);
            metric.encode_family(labels)?.encode_gauge(&seconds)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prometheus_client::encoding::text::encode;
    use redeliver_core::ManualClock;

    use super::*;

    fn series(registry: &Registry) -> Vec<String> {
        let mut text = String::new();
        encode(&mut text, registry).unwrap();
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        lines.map(str::to_owned).collect()
    }

    #[test]
    fn equal_labels_are_one_series() {
        let clock = Arc::new(ManualClock::new(Timestamp::from_millis(10_000)));
        let mut registry = Registry::default();
        let families = DueFamilies::register(&mut registry, "tier", clock.clone());
        let labels = |tier: &str| vec![("tier".to_owned(), tier.to_owned())];
        let lanes = [families.signal(labels("5s")), families.signal(labels("5s"))];
        let other = families.signal(labels("30s"));
        // All series, by tier the values of due, overdue and next due.
        let check = |expected: &[(&str, [&str; 3])]| {
            let names = ["tier_due", "tier_overdue_seconds", "tier_next_due_seconds"];
            let lines = expected.iter().flat_map(|(tier, values)| {
                let lines = names.iter().zip(values);
                lines.map(move |(name, value)| format!("{name}{{tier=\"{tier}\"}} {value}"))
            });
            let mut lines: Vec<String> = lines.collect();
            let mut read = series(&registry);
            lines.sort();
            read.sort();
            assert_eq!(read, lines);
        };
        // No lane has partitions.
        check(&[]);
        lanes[1].set(Some(Waiting::default()));
        other.set(Some(Waiting::default()));
        let nothing = ["0", "0.0", "inf"];
        check(&[("5s", nothing), ("30s", nothing)]);

        let waiting = |earliest, due| {
            Some(Waiting {
                earliest: Some(Timestamp::from_millis(earliest)),
                due,
            })
        };
        lanes[0].set(waiting(12_000, 0));
        lanes[1].set(waiting(11_500, 0));
        other.set(waiting(9_000, 7));
        check(&[("5s", ["0", "0.0", "1.5"]), ("30s", ["7", "1.0", "0.0"])]);

        clock.advance(Duration::from_secs(3));
        check(&[("5s", ["1", "1.5", "0.0"]), ("30s", ["7", "4.0", "0.0"])]);

        // The lane has ended.
        drop(other);
        check(&[("5s", ["1", "1.5", "0.0"])]);
    }
}
