//! The audit topic: records who gets payloads, before they are sent, and reads the entries of all services.
//!
//! If an entry cannot be written, the payload is not sent: an unrecorded disclosure is worse than a request
//! that has to be repeated. `dlq_inspector.record_disclosures: false` turns the entries off.

use std::convert::Infallible;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use redeliver_core::error_chain::error_chain;
use redeliver_core::pattern::matches;
use redeliver_core::{Record, Timestamp};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::credentials::Replaceable;
use redeliver_kafka::reader::{ReadError, TopicReader};
use redeliver_proto::convert::from_timestamp;
use redeliver_proto::error::status;
use redeliver_proto::{Message as _, v1};
use redeliver_service::Host;
use redeliver_service::audit::{Action, AuditEntry, AuditLog, AuditWriter, MAX_IDS, blocking};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::{Code, Status};

use crate::access::Viewer;
use crate::metrics::Metrics;

/// How long a caller waits for the first record of a page.
const READ_TIMEOUT: Duration = Duration::from_secs(15);
/// After this time, a page ends with the entries found so far.
const PAGE_TIME: Duration = Duration::from_secs(5);
/// Maximum number of concurrent readers. Further ones wait.
const READERS: usize = 2;
/// How long a caller waits for its turn.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of records that are read for a page.
const MAX_READ: usize = 50_000;
/// Maximum size of these records in bytes, unless a single one is larger.
const MAX_READ_BYTES: usize = 32 << 20;
/// A page ends once its entries exceed this many bytes.
const PAGE_BYTES: usize = 2 << 20;
/// The timestamp of a record can be earlier than its entry says by this much, by another clock.
const SLACK_MILLIS: i64 = 60_000;
/// The timestamp of a record can be later than its entry says by this much: another clock, a broker that could not be reached, and a transaction that is
/// committed late.
const LATE_MILLIS: i64 = 10 * 60_000;
/// The filters of callers are recorded up to this many bytes.
const MAX_FILTER: usize = 1_000;

/// Writes and reads the audit topic. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Audit {
    log: AuditLog,
    /// `None`: disclosures are not recorded.
    writer: Option<AuditWriter>,
    kafka: KafkaSettings,
    readers: Arc<Semaphore>,
    /// Readers that wait between calls, so that a call needs no connection of its own.
    idle: Arc<Replaceable<Mutex<Vec<TopicReader>>>>,
    metrics: Metrics,
}

/// Payloads that are about to be sent to a caller.
#[derive(Debug)]
pub(crate) struct Disclosure {
    pub(crate) action: Action,
    /// The dead letter, if it is a single one.
    pub(crate) target: String,
    /// Without the search texts for payloads.
    pub(crate) filter: String,
    /// The first [`MAX_IDS`].
    pub(crate) ids: Vec<String>,
    /// The others.
    pub(crate) ranges: Vec<v1::DisclosedRange>,
    pub(crate) count: u64,
    pub(crate) is_masked: bool,
}

/// Which entries to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) from: Timestamp,
    pub(crate) until: Timestamp,
    /// Empty: by all.
    pub(crate) by: String,
    /// Empty: all. `*` matches any text.
    pub(crate) action: String,
    /// Empty: all.
    pub(crate) target: String,
}

/// Where a page begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) offset: i64,
    /// The first half of the topic's id, 0 if that is unknown.
    pub(crate) topic: u64,
}

impl Place {
    /// The same place, or the beginning if the topic was created again.
    fn in_topic(self, topic: u64) -> Self {
        let is_other = self.topic != topic && self.topic != 0 && topic != 0;
        let offset = if is_other { 0 } else { self.offset };
        Self { offset, topic }
    }
}

/// A page of entries.
#[derive(Debug, Default)]
pub(crate) struct EntryPage {
    pub(crate) entries: Vec<v1::ListedAuditEntry>,
    /// The offset where the next page begins; `None` at the end.
    pub(crate) next: Option<i64>,
    /// See [`Place`].
    pub(crate) topic: u64,
    /// Whether a transaction that is open hides entries after these.
    pub(crate) is_incomplete: bool,
}

impl Disclosure {
    pub(crate) fn new(action: Action) -> Self {
        Self {
            action,
            target: String::new(),
            filter: String::new(),
            ids: Vec::new(),
            ranges: Vec::new(),
            count: 0,
            is_masked: false,
        }
    }

    /// Of the dead letters among these whose payloads are sent.
    pub(crate) fn of<'l>(
        action: Action,
        filter: &str,
        letters: impl IntoIterator<Item = &'l v1::DeadLetter>,
    ) -> Self {
        let mut disclosure = Self {
            filter: redeliver_core::failure::bounded_text(filter, MAX_FILTER),
            ..Self::new(action)
        };
        let withheld = v1::PayloadWithheld::NoPermission;
        let shown = letters
            .into_iter()
            .filter(|letter| letter.payload_withheld() != withheld);
        for letter in shown {
            disclosure.count += 1;
            disclosure.is_masked |= letter.masked.as_ref().is_some_and(is_of_payload);
            if action == Action::GetDeadLetter {
                disclosure.target.clone_from(&letter.id);
            } else if disclosure.ids.len() < MAX_IDS {
                disclosure.ids.push(letter.id.clone());
            } else if let Some(position) = &letter.position {
                add(&mut disclosure.ranges, position);
            }
        }
        disclosure
    }
}

/// Whether parts of the payload are masked, and not only of what is known of the failure.
fn is_of_payload(masked: &v1::Masked) -> bool {
    let mut fields = masked.fields.iter();
    fields.any(|field| ["key", "value", "headers", "decoded"].contains(&field.as_str()))
}

/// Adds a dead letter to the range of its partition.
fn add(ranges: &mut Vec<v1::DisclosedRange>, position: &v1::Position) {
    let (partition, offset) = (position.partition, position.offset);
    let of_partition = ranges
        .iter_mut()
        .find(|range| range.partition == partition && range.topic == position.topic);
    match of_partition {
        Some(range) => {
            range.first_offset = range.first_offset.min(offset);
            range.last_offset = range.last_offset.max(offset);
            range.count += 1;
        }
        None => ranges.push(v1::DisclosedRange {
            topic: position.topic.clone(),
            partition,
            first_offset: offset,
            last_offset: offset,
            count: 1,
        }),
    }
}

impl Audit {
    pub(crate) fn new(host: &Host, records_disclosures: bool, metrics: Metrics) -> anyhow::Result<Self> {
        let writer = records_disclosures
            .then(|| AuditWriter::new(host, "dlq-inspector"))
            .transpose();
        let Ok(idle) = Replaceable::new(&host.kafka, "readers of the audit topic", || {
            Ok::<_, Infallible>(Mutex::default())
        });
        Ok(Self {
            idle,
            log: AuditLog::new(&host.config, "dlq-inspector"),
            writer: writer.context("creating the producer of the audit topic")?,
            kafka: host.kafka.clone(),
            readers: Arc::new(Semaphore::new(READERS)),
            metrics,
        })
    }

    /// Records a disclosure. Nothing may be sent if that fails.
    pub(crate) async fn record(
        &self,
        viewer: &Viewer,
        disclosure: Disclosure,
        now: Timestamp,
    ) -> Result<(), Status> {
        let Some(writer) = self.writer.as_ref().filter(|_| disclosure.count > 0) else {
            return Ok(());
        };
        let entry = AuditEntry {
            target: disclosure.target,
            filter: disclosure.filter,
            count: disclosure.count,
            reason: viewer.reason().to_owned(),
            ids: disclosure.ids,
            ranges: disclosure.ranges,
            is_masked: disclosure.is_masked,
            ..AuditEntry::new(viewer.name().clone(), disclosure.action)
        };
        let Err(problem) = writer.write(entry, now).await else {
            return Ok(());
        };
        self.metrics.add_audit_failure();
        tracing::error!(
            topic = &**self.log.topic(),
            %problem,
            "cannot record a disclosure in the audit topic; refusing it"
        );
        Err(unavailable(
            "cannot record in the audit topic who gets the payload; retry later",
        ))
    }

    /// Reads a page.
    pub(crate) async fn read(&self, wanted: Wanted, from: Place, size: usize) -> Result<EntryPage, Status> {
        let permit = permit(self.readers.clone()).await?;
        let (kafka, topic, pool) = (self.kafka.clone(), self.log.topic().clone(), self.idle.get());
        let reading = blocking(move || {
            let _permit = permit;
            let idle = || pool.lock().unwrap_or_else(PoisonError::into_inner);
            let taken = idle().pop();
            let mut reader = match taken {
                Some(reader) => reader,
                None => TopicReader::of_partition(&kafka, &topic, 0, None)?,
            };
            // A reader that has failed is dropped.
            let page = read(&mut reader, &topic, &wanted, from, size)?;
            idle().push(reader);
            Ok(page)
        });
        // `None`: the runtime is shutting down.
        let page = reading.await.unwrap_or_else(|| Ok(EntryPage::default()));
        page.map_err(|error: ReadError| {
            unavailable(&format!("cannot read the audit topic: {}", error_chain(&error)))
        })
    }
}

/// Waits for a turn to read.
async fn permit(readers: Arc<Semaphore>) -> Result<OwnedSemaphorePermit, Status> {
    match tokio::time::timeout(QUEUE_TIMEOUT, readers.acquire_owned()).await {
        Ok(Ok(permit)) => Ok(permit),
        // The semaphore is never closed.
        Ok(Err(_)) | Err(_) => {
            let text = format!(
                "others that read the audit topic took more than {} s; retry later",
                QUEUE_TIMEOUT.as_secs()
            );
            Err(status(Code::ResourceExhausted, text, "TOO_MANY_QUESTIONS", []))
        }
    }
}

fn unavailable(text: &str) -> Status {
    status(Code::Unavailable, text.to_owned(), "AUDIT_UNAVAILABLE", [])
}

fn read(
    reader: &mut TopicReader,
    topic: &Arc<str>,
    wanted: &Wanted,
    from: Place,
    size: usize,
) -> Result<EntryPage, ReadError> {
    let since = Timestamp::from_millis(wanted.from.as_millis().saturating_sub(SLACK_MILLIS));
    let id = reader.topics().known_id(topic);
    reader.expect_id(topic, id);
    let place = from.in_topic(id.map_or(0, |id| (id.bits() >> 64) as u64));
    reader.seek_time(topic, 0, since, place.offset)?;
    let mut page = PageBuilder::new(wanted, size);
    let started = Instant::now();
    let limit = match wanted.last_timestamp() {
        Some(time) => reader.offset_of_time(topic, 0, time)?,
        None => None,
    };
    let result = reader.read_stable(limit, READ_TIMEOUT, |record| page.add(&record, started.elapsed()));
    let page = page.end(result, reader.position(topic, 0))?;
    Ok(EntryPage {
        topic: place.topic,
        ..page
    })
}

/// A page that is being read.
struct PageBuilder<'w> {
    wanted: &'w Wanted,
    size: usize,
    read: usize,
    read_bytes: usize,
    bytes: usize,
    page: EntryPage,
}

impl<'w> PageBuilder<'w> {
    fn new(wanted: &'w Wanted, size: usize) -> Self {
        Self {
            wanted,
            size,
            read: 0,
            read_bytes: 0,
            bytes: 0,
            page: EntryPage::default(),
        }
    }

    /// Adds a record that was read after this time, unless it is not wanted. Breaks if the page is full. An entry that is later than all wanted ones ends
    /// nothing: its writer may have another clock, and others follow.
    fn add(&mut self, record: &Record, after: Duration) -> ControlFlow<()> {
        let bytes = record.value.as_ref().map_or(0, bytes::Bytes::len);
        self.read += 1;
        self.read_bytes += bytes;
        let entry = v1::AuditEntry::decode(record.value.clone().unwrap_or_default()).ok();
        // Clients cannot read an answer with a time that is out of range.
        let entry = entry.filter(|entry| {
            entry
                .time
                .as_ref()
                .is_none_or(|time| from_timestamp(time).is_some())
        });
        // An unreadable entry is listed without its contents, so that it is not overlooked.
        if entry.as_ref().is_none_or(|entry| self.wanted.has(entry)) {
            self.bytes += bytes;
            self.page.entries.push(v1::ListedAuditEntry {
                entry,
                position: Some((&record.position).into()),
            });
        }
        let is_full = self.page.entries.len() >= self.size || self.bytes >= PAGE_BYTES;
        let has_read_enough = self.read >= MAX_READ || self.read_bytes >= MAX_READ_BYTES;
        if is_full || has_read_enough || after >= PAGE_TIME {
            self.page.next = Some(record.position.offset + 1);
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    }

    /// The page, after reading has ended: whether a transaction hides entries, or why it has failed. If it took too long, the next page goes on at this
    /// position. Without any progress, that is an error.
    fn end(mut self, result: Result<bool, ReadError>, position: Option<i64>) -> Result<EntryPage, ReadError> {
        match result {
            Err(ReadError::Late { .. }) if self.read > 0 && position.is_some() => self.page.next = position,
            result => self.page.is_incomplete = result? && self.page.next.is_none(),
        }
        Ok(self.page)
    }
}

impl Wanted {
    /// The timestamp after which no record has a wanted entry; `None` if none is too late.
    fn last_timestamp(&self) -> Option<Timestamp> {
        let last = self.until.as_millis().checked_add(LATE_MILLIS)?;
        Some(Timestamp::from_millis(last))
    }

    fn has(&self, entry: &v1::AuditEntry) -> bool {
        let time = entry.time.as_ref().and_then(from_timestamp);
        let is_any = |wanted: &str, found: &str| wanted.is_empty() || wanted == found;
        time.is_none_or(|time| time >= self.from && time < self.until)
            && is_any(&self.by, &entry.by)
            && (self.action.is_empty() || matches(&self.action, &entry.action))
            && (is_any(&self.target, &entry.target) || entry.ids.contains(&self.target))
    }
}

#[cfg(test)]
mod tests {
    use redeliver_proto::convert::to_timestamp;
    use redeliver_testkit::record_at;

    use super::*;

    fn wanted() -> Wanted {
        Wanted {
            from: Timestamp::from_millis(1_000),
            until: Timestamp::from_millis(2_000),
            by: String::new(),
            action: String::new(),
            target: String::new(),
        }
    }

    fn record(offset: i64, millis: i64, by: &str, action: &str) -> Record {
        let entry = v1::AuditEntry {
            time: Some(to_timestamp(Timestamp::from_millis(millis))),
            by: by.to_owned(),
            action: action.to_owned(),
            ..v1::AuditEntry::default()
        };
        Record {
            timestamp: Some(Timestamp::from_millis(millis)),
            value: Some(entry.encode_to_vec().into()),
            ..record_at("audit", 0, offset)
        }
    }

    fn offsets(records: &[Record], wanted: &Wanted, size: usize) -> (Vec<i64>, Option<i64>) {
        let mut page = PageBuilder::new(wanted, size);
        for record in records {
            if page.add(record, Duration::ZERO).is_break() {
                break;
            }
        }
        let entries = page.page.entries.iter();
        let offsets = entries.map(|entry| entry.position.as_ref().unwrap().offset);
        (offsets.collect(), page.page.next)
    }

    #[test]
    fn page_has_the_matching_entries() {
        let records = [
            record(0, 999, "bob", "control.pause"),
            record(1, 1_000, "bob", "control.pause"),
            // Another clock.
            record(2, 2_500, "bob", "control.rate"),
            record(3, 1_999, "eve", "dead-letters.list"),
            record(4, 1_500, "bob", "control.resume"),
        ];
        assert_eq!(offsets(&records, &wanted(), 9), (vec![1, 3, 4], None));
        let by = Wanted {
            by: "bob".to_owned(),
            ..wanted()
        };
        assert_eq!(offsets(&records, &by, 9), (vec![1, 4], None));
        let action = Wanted {
            action: "control.*".to_owned(),
            ..wanted()
        };
        assert_eq!(offsets(&records, &action, 1), (vec![1], Some(2)));
        // A clock that is ahead hides nothing.
        let late = [
            record(5, 2_000 + 10 * SLACK_MILLIS, "bob", "control.pause"),
            record(6, 1_500, "bob", "x"),
        ];
        assert_eq!(offsets(&late, &wanted(), 9), (vec![6], None));
    }

    #[test]
    fn recreated_topic_is_listed_from_beginning() {
        for (topic, now, expected) in [(1, 1, 7), (1, 2, 0), (0, 2, 7), (1, 0, 7)] {
            let place = Place { offset: 7, topic }.in_topic(now);
            assert_eq!((place.offset, place.topic), (expected, now));
        }
    }

    #[test]
    fn what_cannot_be_read_is_listed() {
        let broken = Record {
            value: Some(bytes::Bytes::from_static(b"\xff")),
            ..record(0, 1_500, "", "")
        };
        let by = Wanted {
            by: "bob".to_owned(),
            ..wanted()
        };
        assert_eq!(offsets(&[broken], &by, 9), (vec![0], None));
    }

    #[test]
    fn slow_read_ends_with_continuable_page() {
        let wanted = Wanted {
            by: "bob".to_owned(),
            ..wanted()
        };
        // Nothing is found.
        let mut page = PageBuilder::new(&wanted, 9);
        assert!(
            page.add(&record(0, 1_500, "eve", "x"), PAGE_TIME / 2)
                .is_continue()
        );
        assert!(page.add(&record(1, 1_500, "eve", "x"), PAGE_TIME).is_break());
        let page = page.end(Ok(true), Some(2)).unwrap();
        assert_eq!(
            (page.entries.len(), page.next, page.is_incomplete),
            (0, Some(2), false)
        );
        // Large records.
        let large = Record {
            value: Some(vec![0xff; MAX_READ_BYTES].into()),
            ..record(3, 1_500, "", "")
        };
        assert_eq!(
            offsets(&[large, record(4, 1_500, "bob", "x")], &wanted, 9),
            (vec![3], Some(4))
        );
        // No record arrives any more.
        let late = || {
            Err(ReadError::Late {
                topic: "audit".to_owned(),
                partition: 0,
                end: 9,
            })
        };
        let mut page = PageBuilder::new(&wanted, 9);
        assert!(
            page.add(&record(0, 1_500, "bob", "x"), Duration::ZERO)
                .is_continue()
        );
        let page = page.end(late(), Some(5)).unwrap();
        assert_eq!((page.entries.len(), page.next), (1, Some(5)));
        assert!(PageBuilder::new(&wanted, 9).end(late(), None).is_err());
    }

    #[test]
    fn last_page_reports_hidden_entries() {
        let wanted = wanted();
        for is_hidden in [true, false] {
            let page = PageBuilder::new(&wanted, 9).end(Ok(is_hidden), None).unwrap();
            assert_eq!((page.next, page.is_incomplete), (None, is_hidden));
        }
        let last = wanted.last_timestamp().map(Timestamp::as_millis);
        assert_eq!(last, Some(2_000 + LATE_MILLIS));
        let until = Timestamp::from_millis(i64::MAX);
        assert_eq!(Wanted { until, ..wanted }.last_timestamp(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn reader_waits_for_limited_time() {
        let readers = Arc::new(Semaphore::new(1));
        let first = permit(readers.clone()).await.unwrap();
        let refused = permit(readers.clone()).await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted);
        drop(first);
        assert!(permit(readers).await.is_ok());
    }

    #[test]
    fn large_page_is_recorded_in_ranges() {
        let letter = |partition: i32, offset: i64| v1::DeadLetter {
            id: format!("a-dlq/{partition}/{offset}"),
            position: Some(v1::Position {
                topic: "a-dlq".to_owned(),
                partition,
                offset,
            }),
            ..v1::DeadLetter::default()
        };
        let mut letters: Vec<_> = (0..MAX_IDS as i64).map(|offset| letter(0, offset)).collect();
        letters.extend([
            letter(1, 9),
            letter(0, 300),
            letter(1, 7),
            letter(0, 200),
            letter(0, 250),
        ]);
        let listed = Disclosure::of(Action::ListDeadLetters, "", &letters);
        assert_eq!((listed.count, listed.ids.len()), (MAX_IDS as u64 + 5, MAX_IDS));
        let ranges = listed.ranges.iter();
        let ranges: Vec<_> = ranges
            .map(|range| {
                (
                    range.partition,
                    range.first_offset,
                    range.last_offset,
                    range.count,
                )
            })
            .collect();
        assert_eq!(ranges, [(1, 7, 9, 2), (0, 200, 300, 3)]);
    }

    #[test]
    fn entry_is_masked_with_its_payloads() {
        let masked = |fields: &[&str]| {
            let letter = v1::DeadLetter {
                masked: Some(v1::Masked {
                    fields: fields.iter().map(|field| (*field).to_owned()).collect(),
                    ..v1::Masked::default()
                }),
                ..v1::DeadLetter::default()
            };
            Disclosure::of(Action::ListDeadLetters, "", [&letter]).is_masked
        };
        assert!(!masked(&["content_hash", "error_message"]));
        assert!(masked(&["content_hash", "headers"]) && masked(&["value"]) && masked(&["key"]));
    }

    #[test]
    fn withheld_payloads_are_no_disclosure() {
        let letter = |id: &str, withheld: v1::PayloadWithheld| v1::DeadLetter {
            id: id.to_owned(),
            payload_withheld: withheld.into(),
            ..v1::DeadLetter::default()
        };
        let letters = [
            letter("a/0/0", v1::PayloadWithheld::Unspecified),
            letter("b/0/0", v1::PayloadWithheld::NoPermission),
        ];
        let listed = Disclosure::of(Action::ListDeadLetters, "state = OPEN", &letters);
        assert_eq!(
            (listed.count, listed.ids, listed.is_masked),
            (1, vec!["a/0/0".to_owned()], false)
        );
        assert_eq!(listed.filter, "state = OPEN");
        let gotten = Disclosure::of(Action::GetDeadLetter, "", &letters[..1]);
        assert_eq!((gotten.count, &*gotten.target, gotten.ids.len()), (1, "a/0/0", 0));
        assert_eq!(Disclosure::of(Action::GetDeadLetter, "", &letters[1..]).count, 0);
    }
}
