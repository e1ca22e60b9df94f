//! The audit topic: records who gets payloads, before they are sent, and reads the entries of all services.
//!
//! If an entry cannot be written, the payload is not sent: a disclosure that nobody can find out is worse than a request that has to be
//! repeated. `dlq_inspector.record_disclosures: false` turns the entries off.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use redeliver_core::pattern::matches;
use redeliver_core::{Record, Timestamp};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::Producer;
use redeliver_kafka::reader::{ReadError, TopicReader};
use redeliver_proto::convert::from_timestamp;
use redeliver_proto::error::status;
use redeliver_proto::{Message as _, v1};
use redeliver_service::Host;
use redeliver_service::audit::{Action, AuditLog, Entry, MAX_IDS};
use tokio::sync::Semaphore;
use tonic::{Code, Status};

use crate::access::Viewer;
use crate::metrics::Metrics;

/// How long a caller waits until an entry is written.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long reading a page may take.
const READ_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum number of concurrent readers. Further ones wait.
const READERS: usize = 2;
/// Maximum number of records that are read for a page.
const MAX_READ: usize = 50_000;
/// A page ends once its entries exceed this many bytes.
const PAGE_BYTES: usize = 2 << 20;
/// The timestamp of a record can be earlier than its entry says by this much, by another clock.
const SLACK_MILLIS: i64 = 60_000;
/// The filters of callers are recorded up to this many bytes.
const MAX_FILTER: usize = 1_000;

/// Writes and reads the audit topic. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Audit {
    log: AuditLog,
    /// `None`: disclosures are not recorded.
    producer: Option<Producer>,
    kafka: KafkaSettings,
    readers: Arc<Semaphore>,
    metrics: Metrics,
}

/// Payloads that are about to be sent to a caller.
#[derive(Debug)]
pub(crate) struct Disclosure {
    pub(crate) action: Action,
    /// The dead letter, if it is a single one.
    pub(crate) target: String,
    pub(crate) filter: String,
    pub(crate) ids: Vec<String>,
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

/// A page of entries.
#[derive(Debug, Default)]
pub(crate) struct EntryPage {
    pub(crate) entries: Vec<v1::ListedAuditEntry>,
    /// The offset where the next page begins; `None` at the end.
    pub(crate) next: Option<i64>,
}

impl Disclosure {
    pub(crate) fn new(action: Action) -> Self {
        Self {
            action,
            target: String::new(),
            filter: String::new(),
            ids: Vec::new(),
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
            disclosure.is_masked |= letter.masked.is_some();
            if action == Action::GetDeadLetter {
                disclosure.target.clone_from(&letter.id);
            } else if disclosure.ids.len() < MAX_IDS {
                disclosure.ids.push(letter.id.clone());
            }
        }
        disclosure
    }
}

impl Audit {
    pub(crate) fn new(host: &Host, records_disclosures: bool, metrics: Metrics) -> anyhow::Result<Self> {
        let producer = records_disclosures
            .then(|| Producer::new(&host.kafka))
            .transpose();
        Ok(Self {
            log: AuditLog::new(&host.config, "dlq-inspector"),
            producer: producer.context("creating the producer of the audit topic")?,
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
        let Some(producer) = self.producer.as_ref().filter(|_| disclosure.count > 0) else {
            return Ok(());
        };
        let entry = Entry {
            target: disclosure.target,
            filter: disclosure.filter,
            count: disclosure.count,
            ids: disclosure.ids,
            is_masked: disclosure.is_masked,
            ..Entry::new(viewer.author(), disclosure.action)
        };
        let record = self.log.record(entry, now);
        let written = tokio::time::timeout(WRITE_TIMEOUT, producer.send(&record)).await;
        let problem = match written {
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(error)) => redeliver_core::error_chain::error_chain(&error),
            Err(_) => format!("no acknowledgement within {} s", WRITE_TIMEOUT.as_secs()),
        };
        self.metrics.add_audit_failure();
        tracing::error!(
            topic = &**self.log.topic(),
            problem,
            "cannot record who gets a payload; refusing it"
        );
        Err(unavailable(
            "cannot record in the audit topic who gets the payload; retry later",
        ))
    }

    /// Reads a page, beginning at an offset.
    pub(crate) async fn read(
        &self,
        wanted: Wanted,
        from: Option<i64>,
        size: usize,
    ) -> Result<EntryPage, Status> {
        // The semaphore is never closed.
        let permit = self.readers.clone().acquire_owned().await.ok();
        let (kafka, topic) = (self.kafka.clone(), self.log.topic().clone());
        let reading = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            read(&kafka, &topic, &wanted, from, size)
        });
        let page = reading
            .await
            .unwrap_or_else(|error| match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // Cancelled, because the runtime is shutting down.
                Err(_) => Ok(EntryPage::default()),
            });
        page.map_err(|error| {
            let problem = redeliver_core::error_chain::error_chain(&error);
            unavailable(&format!("cannot read the audit topic: {problem}"))
        })
    }
}

fn unavailable(text: &str) -> Status {
    status(Code::Unavailable, text.to_owned(), "AUDIT_UNAVAILABLE", [])
}

fn read(
    kafka: &KafkaSettings,
    topic: &Arc<str>,
    wanted: &Wanted,
    from: Option<i64>,
    size: usize,
) -> Result<EntryPage, ReadError> {
    let since = Timestamp::from_millis(wanted.from.as_millis().saturating_sub(SLACK_MILLIS));
    let mut reader = TopicReader::of_partition_since(kafka, topic, 0, since, from.unwrap_or(0))?;
    let mut page = PageBuilder::new(wanted, size);
    reader.read_while(READ_TIMEOUT, |record| page.add(&record))?;
    Ok(page.page)
}

/// A page that is being read.
struct PageBuilder<'w> {
    wanted: &'w Wanted,
    size: usize,
    read: usize,
    bytes: usize,
    page: EntryPage,
}

impl<'w> PageBuilder<'w> {
    fn new(wanted: &'w Wanted, size: usize) -> Self {
        Self {
            wanted,
            size,
            read: 0,
            bytes: 0,
            page: EntryPage::default(),
        }
    }

    /// Adds a record, unless it is not wanted. Breaks if the page is full. A record that is later than all wanted ones ends nothing: its
    /// writer may have another clock, and others follow.
    fn add(&mut self, record: &Record) -> ControlFlow<()> {
        self.read += 1;
        let entry = v1::AuditEntry::decode(record.value.clone().unwrap_or_default()).ok();
        // What cannot be read is listed without its contents: nobody must overlook it.
        if entry.as_ref().is_none_or(|entry| self.wanted.has(entry)) {
            self.bytes += record.value.as_ref().map_or(0, bytes::Bytes::len);
            self.page.entries.push(v1::ListedAuditEntry {
                entry,
                position: Some(v1::Position {
                    topic: record.position.topic.to_string(),
                    partition: record.position.partition,
                    offset: record.position.offset,
                }),
            });
        }
        if self.page.entries.len() >= self.size || self.read >= MAX_READ || self.bytes >= PAGE_BYTES {
            self.page.next = Some(record.position.offset + 1);
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    }
}

impl Wanted {
    fn has(&self, entry: &v1::AuditEntry) -> bool {
        let time = entry.time.as_ref().and_then(from_timestamp);
        let is_any = |wanted: &str, found: &str| wanted.is_empty() || wanted == found;
        time.is_none_or(|time| time >= self.from && time < self.until)
            && is_any(&self.by, &entry.by)
            && (self.action.is_empty() || matches(&self.action, &entry.action))
            && is_any(&self.target, &entry.target)
    }
}

#[cfg(test)]
mod tests {
    use redeliver_core::{Headers, Position};
    use redeliver_proto::convert::to_timestamp;

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
            position: Position {
                topic: "audit".into(),
                partition: 0,
                offset,
            },
            timestamp: Some(Timestamp::from_millis(millis)),
            key: None,
            value: Some(entry.encode_to_vec().into()),
            headers: Headers::new(),
            unreadable_headers: 0,
        }
    }

    fn offsets(records: &[Record], wanted: &Wanted, size: usize) -> (Vec<i64>, Option<i64>) {
        let mut page = PageBuilder::new(wanted, size);
        for record in records {
            if page.add(record).is_break() {
                break;
            }
        }
        let entries = page.page.entries.iter();
        let offsets = entries.map(|entry| entry.position.as_ref().unwrap().offset);
        (offsets.collect(), page.page.next)
    }

    #[test]
    fn a_page_has_the_entries_of_its_time_by_whom_and_what_is_wanted() {
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
    fn only_what_the_caller_gets_is_a_disclosure() {
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
