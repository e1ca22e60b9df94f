//! `GetRedrivePreview`: what a job writes for some of its dead letters, by the code that executes it ([`Context`]).

use std::collections::HashMap;

use bytes::Bytes;
use redeliver_core::{Headers, Position, Record};
use redeliver_proto::v1::HeaderChangeKind;
use redeliver_proto::{Message as _, v1};
use redeliver_service::audit::Action;
use redeliver_service::memory_budget::Reservation;
use tonic::Status;

use super::super::Api;
use super::visible::{HIDDEN, sees_destination};
use crate::access::Viewer;
use crate::audit::Disclosure;
use crate::index::{self, IndexedLetter};
use crate::ledger::State;
use crate::redrive::job::{Item, Job, Kind};
use crate::redrive::jobs::JobEntry;
use crate::redrive::omitted::Restored;
use crate::redrive::step::{Context, Presence, Tried};

/// The maximum number of names of headers of a sample.
const MAX_NAMES: usize = 100;
/// The maximum size of the headers of a sample, in bytes.
const MAX_BYTES: usize = 64 << 10;
/// Values are truncated to this many bytes.
const MAX_VALUE: usize = 1 << 10;

impl Api {
    pub(super) async fn preview(
        &self,
        viewer: &Viewer,
        id: &str,
    ) -> Result<(v1::RedrivePreview, Reservation), Status> {
        let (entry, job) = self.visible_job(viewer, id).await?;
        let items = sampled(&entry, &job);
        let ids: Vec<Position> = items.iter().map(|item| item.id.clone()).collect();
        let getting = self.pool.query(move |connection| {
            let found = ids.iter().map(|id| index::get(connection, id));
            found.collect::<rusqlite::Result<Vec<_>>>()
        });
        let letters = getting.await?;
        let known: Vec<&IndexedLetter> = letters.iter().flatten().collect();
        let sizes = known.iter().map(|letter| letter.record_size);
        let size = sizes.fold(0, u64::saturating_add);
        let mut memory = self.reserve(viewer, size).await?;
        let mut records = self.lookup(&known).await?.into_iter();
        let found = letters.into_iter().map(|letter| {
            // Without an entry of the index, there is no dead letter any more.
            let record = letter.as_ref().and_then(|_| records.next()?);
            let state = letter.map_or(State::Open, |letter| letter.state);
            (state, record.map(|stored| stored.record))
        });
        let found: Vec<(State, Option<Record>)> = found.collect();
        let mut restored = HashMap::new();
        for record in found.iter().filter_map(|(_, record)| record.as_ref()) {
            if let Some(read) = self.read_for(viewer, &job, record).await? {
                restored.insert(record.position.clone(), read);
            }
        }
        if !restored.is_empty() {
            let wholes = restored.values().flatten();
            let size = wholes.fold(size, |size, whole| size.saturating_add(whole.size() as u64));
            drop(memory);
            memory = self.hold_bytes(viewer, size).await?;
        }
        let samples = self.samples(viewer, &entry, &job, items, &found, &restored);
        let disclosed = samples.iter().filter(|(sample, _)| !sample.headers.is_empty());
        let disclosure = Disclosure {
            ids: disclosed.clone().map(|(sample, _)| sample.id.clone()).collect(),
            count: disclosed.clone().count() as u64,
            is_masked: disclosed.clone().any(|(_, is_masked)| *is_masked),
            ..Disclosure::new(Action::ListDeadLetters)
        };
        self.audit.record(viewer, disclosure, self.clock.now()).await?;
        let preview = v1::RedrivePreview {
            samples: samples.into_iter().map(|(sample, _)| sample).collect(),
        };
        memory.shrink_to(preview.encoded_len() as u64);
        Ok((preview, memory))
    }

    /// The samples, each with whether something is masked in it.
    fn samples(
        &self,
        viewer: &Viewer,
        entry: &JobEntry,
        job: &Job,
        items: Vec<Item>,
        found: &[(State, Option<Record>)],
        restored: &HashMap<Position, Restored>,
    ) -> Vec<(v1::RedriveSample, bool)> {
        let edit = entry.edit().ok().flatten();
        if job.is_edit() && edit.is_none() {
            // It is never redriven as it is.
            return Vec::new();
        }
        let context = Context {
            job,
            edit: edit.as_ref(),
            destinations: &self.redrives.destinations,
            restored: &|letter| restored.get(&letter.position).cloned(),
            presence: &|_| Presence::Exists,
            now: self.clock.now(),
        };
        let samples = items.into_iter().zip(found).map(|(item, (state, record))| {
            let prepared = context.prepare(item, record.as_ref());
            let tried = prepared.tried(job.kind, |_, _| *state);
            self.sample(viewer, job, &tried, record.as_ref())
        });
        samples.collect()
    }

    fn sample(
        &self,
        viewer: &Viewer,
        job: &Job,
        tried: &Tried,
        letter: Option<&Record>,
    ) -> (v1::RedriveSample, bool) {
        let mut sample = v1::RedriveSample {
            id: tried.item.id.to_string(),
            outcome: tried.outcome.into(),
            ..v1::RedriveSample::default()
        };
        let (Some(output), Some(letter)) = (&tried.output, letter) else {
            return (sample, false);
        };
        let is_seen = sees_destination(viewer, &self.redrives.destinations, &output.topic);
        sample.destination = if is_seen { &*output.topic } else { HIDDEN }.to_owned();
        let topic = &tried.item.id.topic;
        // The names of headers in which an edit has put something are not those that are masked.
        let is_shown = match job.is_edit() {
            true => viewer.sees_edits(topic),
            false => viewer.sees_payloads(topic),
        };
        // The headers are those of a record of the source.
        let origin = self.redrives.destinations.uncopied_of(letter);
        let is_shown = is_shown && origin.is_none_or(|origin| viewer.sees_payloads(&origin.topic));
        if !is_shown {
            sample.payload_withheld = v1::PayloadWithheld::NoPermission.into();
            return (sample, false);
        }
        let mask = viewer.mask(topic);
        let (before, after) = (
            mask.headers(letter.headers.iter()),
            mask.headers(output.headers.iter()),
        );
        (sample.headers, sample.headers_truncated) = changes(&before.headers, &after.headers);
        (sample, !before.masked.is_empty() || !after.masked.is_empty())
    }
}

/// The first item of a redrive, one in the middle, and the last one.
fn sampled(entry: &JobEntry, job: &Job) -> Vec<Item> {
    if job.kind != Kind::Redrive {
        return Vec::new();
    }
    let total = job.spec().total;
    let mut numbers = vec![0, total / 2, total.saturating_sub(1)];
    numbers.dedup();
    let items = numbers
        .into_iter()
        .filter_map(|number| entry.items_in(number..number + 1));
    items.flatten().collect()
}

/// The headers before and after by their names, and whether some are left out.
fn changes(before: &Headers, after: &Headers) -> (Vec<v1::HeaderChange>, bool) {
    let mut names: Vec<&str> = Vec::new();
    let mut values: HashMap<&str, [Vec<Option<&[u8]>>; 2]> = HashMap::new();
    for (side, headers) in [before, after].into_iter().enumerate() {
        for (name, value) in headers.iter() {
            let of_name = values.entry(name).or_insert_with(|| {
                names.push(name);
                [Vec::new(), Vec::new()]
            });
            of_name[side].push(value);
        }
    }
    let mut changes: Vec<v1::HeaderChange> = names.iter().map(|name| change(name, &values[name])).collect();
    changes.sort_by_key(|change| change.kind == i32::from(HeaderChangeKind::Kept));
    let mut left = MAX_BYTES;
    changes.retain(|change| {
        let size = change.encoded_len();
        let fits = size <= left;
        left -= if fits { size } else { 0 };
        fits
    });
    changes.truncate(MAX_NAMES);
    let is_truncated = changes.len() < names.len();
    (changes, is_truncated)
}

fn change(name: &str, [before, after]: &[Vec<Option<&[u8]>>; 2]) -> v1::HeaderChange {
    let kind = match (before.is_empty(), after.is_empty()) {
        (_, true) => HeaderChangeKind::Removed,
        (true, _) => HeaderChangeKind::Added,
        _ if before == after => HeaderChangeKind::Kept,
        _ => HeaderChangeKind::Changed,
    };
    let is_kept = kind == HeaderChangeKind::Kept;
    v1::HeaderChange {
        name: name.to_owned(),
        kind: kind.into(),
        before: before.iter().copied().map(shown).collect(),
        after: after.iter().copied().filter(|_| !is_kept).map(shown).collect(),
    }
}

fn shown(value: Option<&[u8]>) -> v1::HeaderValue {
    let bytes = value.unwrap_or_default();
    let mut end = bytes.len().min(MAX_VALUE);
    // Not within a character of UTF-8, which has at most four bytes.
    let least = end.saturating_sub(3);
    while end > least && bytes.get(end).is_some_and(|byte| byte & 0xc0 == 0x80) {
        end -= 1;
    }
    v1::HeaderValue {
        bytes: value.map(|_| Bytes::copy_from_slice(&bytes[..end])),
        truncated: end < bytes.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&str, Option<&[u8]>)]) -> Headers {
        list.iter().copied().collect()
    }

    #[test]
    fn changes_are_by_name() {
        let before = headers(&[
            ("tenant", Some(b"a")),
            ("error-code", Some(b"http.500")),
            ("retry-count", Some(b"3")),
            ("tenant", None),
        ]);
        let after = headers(&[
            ("tenant", Some(b"a")),
            ("tenant", None),
            ("retry-count", Some(b"0")),
            ("redrive-id", Some(b"r1")),
        ]);
        let (changes, is_truncated) = changes(&before, &after);
        let shown: Vec<_> = changes
            .iter()
            .map(|change| {
                (
                    change.name.as_str(),
                    change.kind(),
                    change.before.len(),
                    change.after.len(),
                )
            })
            .collect();
        let expected = [
            ("error-code", HeaderChangeKind::Removed, 1, 0),
            ("retry-count", HeaderChangeKind::Changed, 1, 1),
            ("redrive-id", HeaderChangeKind::Added, 0, 1),
            ("tenant", HeaderChangeKind::Kept, 2, 0),
        ];
        assert_eq!((shown.as_slice(), is_truncated), (&expected[..], false));
        assert_eq!(changes[3].before[1], v1::HeaderValue::default());
    }

    #[test]
    fn large_headers_are_bounded() {
        let long = "\u{20ac}".repeat(1 << 10);
        let value = shown(Some(long.as_bytes()));
        assert!(value.truncated && str::from_utf8(&value.bytes.unwrap()).unwrap().len() == 1_023);
        let binary = shown(Some(&[0x80; 2 << 10]));
        assert!(binary.truncated && binary.bytes.unwrap().len() > MAX_VALUE - 4);
        let names: Vec<String> = (0..1_000)
            .map(|number| format!("{number}{}", "n".repeat(600)))
            .collect();
        let many: Headers = names
            .iter()
            .map(|name| (name.as_str(), Some(long.as_bytes())))
            .collect();
        let one: Headers = (0..1_000).map(|_| ("same", Some(long.as_bytes()))).collect();
        for headers in [many, one] {
            let (changes, is_truncated) = changes(&headers, &headers);
            let size: usize = changes.iter().map(v1::HeaderChange::encoded_len).sum();
            assert!(is_truncated && size <= MAX_BYTES && changes.len() <= MAX_NAMES);
        }
    }
}
