//! A batch as the arguments of its script.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use bytes::Bytes;
use fred::prelude::Value;
use redeliver_core::Timestamp;

use super::{LAST_MILLIS, bucket, flow_value, id_value, number, score, text};
use crate::index::{Batch, Effect, KeyEntry, is_earlier_use};
use crate::job::{Flow, JobId, KeyHash};

/// The length of the time slice of one log is 2 to the power of this in ms, about four minutes, or more.
const MIN_LOG_BITS: u32 = 18;
/// A key is in use for at least so many time slices, except if they are the shortest ones, and for less than twice as many.
const SLICES_OF_USE: u64 = 16;
/// How long Redis keeps a log and its keys after the end of the time slice. A lookup compares the stored expiry with the
/// clock of the caller, which may be behind the clock of Redis.
const EXPIRY_MARGIN_MS: i64 = 60_000;

/// The arguments of a batch, in the order of the script.
#[derive(Default)]
pub(super) struct BatchArguments {
    /// The number of each flow, from 1 on.
    flows: HashMap<Flow, usize>,
    /// Their names, by number.
    flow_names: Vec<Value>,
    buckets: BTreeMap<u64, Bucket>,
    /// The entry of each ended job in the list `recent`, in the order of their ends.
    ends: Vec<Value>,
    /// By the bits of the length of the time slice, and its number.
    key_logs: BTreeMap<(u32, i64), KeyLog>,
}

#[derive(Default)]
struct Bucket {
    /// The number of the flow, due time, id and record of each job.
    waiting: Vec<Value>,
    /// The number of the flow, time to forget it, id and record of each job.
    ended: Vec<Value>,
    /// The number of the flow and id of each job. See the script for the numbers of unknown flows.
    forgotten: Vec<Value>,
}

/// The flow of each scheduled job that a batch forgets, as far as they were searched for; `None` if no flow has the job.
pub(super) type LocatedJobs = HashMap<JobId, Option<Flow>>;

enum Kind {
    Waiting,
    Ended,
}

struct KeyLog {
    life: i64,
    /// Hash and value of each key.
    keys: Vec<Value>,
}

impl BatchArguments {
    /// Only the last change of each job and of each key is sent.
    pub(super) fn of(batch: &Batch, now: Timestamp, located: &LocatedJobs) -> Self {
        let mut arguments = Self {
            ends: batch.ends().into_iter().map(end_value).collect(),
            ..Self::default()
        };
        let (mut jobs, mut keys) = (HashSet::<JobId>::new(), BTreeMap::<KeyHash, &KeyEntry>::new());
        // With the flow that an earlier change of the batch names.
        let mut forgotten: BTreeMap<JobId, Option<&Flow>> = BTreeMap::new();
        for change in batch.changes.iter().rev() {
            let is_last = jobs.insert(change.id);
            let (flow, kind, time, record, key) = match &change.effect {
                Effect::Waits {
                    flow,
                    due,
                    record,
                    key,
                } => (flow, Kind::Waiting, due, record, key),
                Effect::Ended {
                    flow,
                    forget,
                    record,
                    key,
                    ..
                } => (flow, Kind::Ended, forget, record, key),
                Effect::Forgotten => {
                    if is_last {
                        let of_schedule = change.id.is_schedule().then(Flow::schedules);
                        forgotten.insert(change.id, of_schedule);
                    }
                    continue;
                }
            };
            if is_last {
                let flow = number(arguments.number_of(flow));
                let bucket = arguments.buckets.entry(bucket(change.id)).or_default();
                let list = match kind {
                    Kind::Waiting => &mut bucket.waiting,
                    Kind::Ended => &mut bucket.ended,
                };
                list.extend([flow, score(*time), id_value(change.id), record.clone().into()]);
            } else if let Some(of_forgotten) = forgotten.get_mut(&change.id) {
                *of_forgotten = Some(flow);
            }
            if let Some(key) = key
                && key.expires > now
            {
                let last = keys.entry(key.hash).or_insert(key);
                if is_earlier_use(&last.value, &key.value) {
                    *last = key;
                }
            }
        }
        for key in keys.into_values() {
            arguments.add_key(key, now);
        }
        for (id, flow) in forgotten {
            let number = match (flow, located.get(&id)) {
                (Some(flow), _) | (None, Some(Some(flow))) => number(arguments.number_of(flow)),
                (None, Some(None)) => (-1).into(),
                (None, None) => 0.into(),
            };
            let bucket = arguments.buckets.entry(bucket(id)).or_default();
            bucket.forgotten.extend([number, id_value(id)]);
        }
        arguments
    }

    fn number_of(&mut self, flow: &Flow) -> usize {
        if let Some(number) = self.flows.get(flow) {
            return *number;
        }
        self.flow_names.push(flow_value(flow));
        self.flows.insert(flow.clone(), self.flow_names.len());
        self.flow_names.len()
    }

    fn add_key(&mut self, key: &KeyEntry, now: Timestamp) {
        let expires = key.expires.as_millis();
        let bits = log_bits(key.expires.since(now));
        let slice = expires >> bits;
        let log = self.key_logs.entry((bits, slice)).or_insert_with(|| {
            let end = slice.saturating_add(1).saturating_mul(1 << bits);
            let life = end
                .saturating_sub(now.as_millis())
                .saturating_add(EXPIRY_MARGIN_MS);
            KeyLog {
                life: life.clamp(1, LAST_MILLIS / 4),
                keys: Vec::new(),
            }
        });
        let value = [&expires.to_be_bytes()[..], &key.value].concat();
        log.keys
            .extend([Value::from(&key.hash[..]), Bytes::from(value).into()]);
    }

    pub(super) fn write(self, arguments: &mut Vec<Value>) {
        fn list(arguments: &mut Vec<Value>, values: Vec<Value>, width: usize) {
            arguments.push(number(values.len() / width));
            arguments.extend(values);
        }
        list(arguments, self.flow_names, 1);
        arguments.push(number(self.buckets.len()));
        for (name, bucket) in self.buckets {
            arguments.push(text(name));
            list(arguments, bucket.waiting, 4);
            list(arguments, bucket.ended, 4);
            list(arguments, bucket.forgotten, 2);
        }
        list(arguments, self.ends, 1);
        arguments.push(number(self.key_logs.len()));
        for ((bits, slice), log) in self.key_logs {
            arguments.extend([format!("{bits}.{slice}").into(), log.life.into()]);
            list(arguments, log.keys, 2);
        }
    }
}

/// The id (16 bytes), then the time of the end in ms as text, as Lua reads it.
fn end_value((id, ended): (JobId, Timestamp)) -> Value {
    let ended = ended.as_millis().clamp(-LAST_MILLIS, LAST_MILLIS).to_string();
    Bytes::from([&id.to_bytes()[..], ended.as_bytes()].concat()).into()
}

/// The length of the time slices for a key that is in use for this long, as the power of 2 in ms. A key that is used again and again is in
/// the log of each slice until its use ends, so their number must not grow with the time of its use.
fn log_bits(in_use: Duration) -> u32 {
    let millis = u64::try_from(in_use.as_millis()).unwrap_or(u64::MAX);
    (millis / SLICES_OF_USE)
        .checked_ilog2()
        .map_or(MIN_LOG_BITS, |bits| bits.max(MIN_LOG_BITS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_slices_cover_a_key() {
        for hours in [0, 1, 2, 5, 24, 24 * 30, 24 * 3_650] {
            let in_use = Duration::from_secs(hours * 3_600);
            let bits = log_bits(in_use);
            let slices = in_use.as_millis() >> bits;
            let is_short = bits == MIN_LOG_BITS && slices < 32;
            assert!(
                is_short || (16..32).contains(&slices),
                "{hours} h: {slices} slices"
            );
        }
    }
}
